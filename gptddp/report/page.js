"use strict";
const nonce = document.currentScript.nonce;
const $ = (id) => document.getElementById(id);
const figures = JSON.parse($("figures").textContent);
const narrow = matchMedia("(max-width: 640px)"),
  dark = matchMedia("(prefers-color-scheme: dark)");
const options = { responsive: true, displayModeBar: false };

const colour = (name) =>
  getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
const steps = (it) => it.traces !== undefined;
const largest = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 1);
const most = largest(figures.filter(steps).flatMap((it) => it.traces.flatMap((t) => t.x)));
const whole = [-0.01 * most, 1.02 * most]; // of all axes of steps
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Plotly itself lies in the page as gzip: the text of the page is there before it is unpacked.
async function unpack() {
  const bytes = Uint8Array.from(atob($("plotly").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function axis(more) {
  return {
    gridcolor: colour("line"),
    linecolor: colour("line"),
    zeroline: false,
    automargin: true,
    ...more,
  };
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: "x unified",
    dragmode: narrow.matches ? false : "zoom",
    font: { color: colour("fg"), size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: {
      bgcolor: colour("soft"),
      bordercolor: colour("dim"),
      font: { color: colour("fg") },
      align: "left",
    },
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
    ...more,
  };
}

function trace(it) {
  const paint = colour("c" + (it.colour % 6)),
    base = { x: it.x, y: it.y, name: escaped(it.name), type: "scatter" };
  if (it.kind === "mark") {
    return {
      ...base,
      yaxis: "y2",
      mode: "markers",
      text: it.text.map(escaped),
      hovertemplate: "%{text}<extra></extra>",
      marker: {
        symbol: it.symbol,
        size: it.x.length > 40 ? 5 : it.mark === "restart" ? 11 : 8,
        color: paint,
        line: { width: it.x.length > 40 ? 1 : 2, color: paint },
      },
    };
  }
  const points = it.kind === "points";
  return {
    ...base,
    mode: points || it.x.length <= 40 ? "lines+markers" : "lines",
    connectgaps: false,
    opacity: it.faint ? 0.45 : 1,
    marker: { symbol: it.symbol, size: points ? 7 : 4 },
    line: {
      color: paint,
      width: it.faint ? 1 : 1.8,
      dash: points && it.dash === "solid" ? "dot" : it.dash,
      shape: it.steps ? "hv" : "linear",
    },
    hovertemplate: "%{y}<extra>%{fullData.name}</extra>",
  };
}

function curves(it) {
  const legend = it.traces.filter((t) => t.kind !== "mark").length > 1;
  return [
    it.traces.map(trace),
    layout({
      showlegend: legend,
      margin: { l: 50, r: 10, t: 18, b: legend ? 64 : 40 },
      xaxis: axis({
        range: whole.slice(),
        title: { text: "step", standoff: 4 },
        tickformat: ",d",
        hoverformat: ",d",
        ...(most < 8 ? { dtick: 1 } : {}),
      }),
      yaxis: axis({
        rangemode: it.low === 0 ? "tozero" : "normal",
        exponentformat: /^(lr|grad_norm)$/.test(it.id) ? "e" : "SI",
        nticks: 6,
        hoverformat: "~r",
        ...(it.id === "world_size"
          ? {
              dtick: Math.ceil(
                largest(it.traces.filter((t) => t.kind !== "mark").flatMap((t) => t.y)) / 6,
              ),
            }
          : {}),
      }),
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    }),
  ];
}

const draw = (it) => Plotly.react($(it.id), ...(steps(it) ? curves(it) : strip(it)), options);

async function main() {
  await unpack();
  for (const it of figures) {
    if (!$(it.id)) continue;
    await draw(it);
    $(it.id).on("plotly_relayout", (change) =>
      steps(it) ? zoomed(it, change) : ticked(it, change),
    );
    keys(it);
    await new Promise((next) => setTimeout(next)); // the page stays usable meanwhile
  }
  dark.addEventListener("change", () => figures.forEach(draw));
  document.documentElement.dataset.drawn = Math.round(performance.now()); // for the tests
}
main().catch((error) => {
  for (const it of document.querySelectorAll(".plot"))
    it.textContent = "This browser cannot draw the plots: gptddp log has their numbers.";
  throw error;
});
