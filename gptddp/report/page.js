const nonce = document.currentScript.nonce;
const narrow = matchMedia("(max-width: 640px)"),
  dark = matchMedia("(prefers-color-scheme: dark)");
const options = { responsive: true, displayModeBar: false };

const colour = (name) =>
  getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
const steps = (it) => it.traces !== undefined;
const largest = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 0) || 1;
let whole = [0, 1]; // the x range of all plots except the ranks
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Plotly is in the page as gzip: the text of the page is visible before it is unpacked.
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
    base = { x: it.at, y: it.y, name: escaped(it.name), type: "scatter" };
  if (it.kind === "mark") {
    return {
      ...base,
      yaxis: "y2",
      mode: "markers",
      text: it.text.map((text) => escaped(text).replace(/(.{50}[^ ]*) /g, "$1<br>")),
      ...hover("%{text}<extra></extra>"),
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
    ...(it.faint ? { hoverinfo: "skip" } : hover("%{y}<extra>%{fullData.name}</extra>")),
  };
}

// A narrow screen has no room for labels: the readout below shows the values.
const hover = (hovertemplate) => (narrow.matches ? { hoverinfo: "none" } : { hovertemplate });

function curves(it) {
  it.drawn = chosen(it);
  const lines = it.drawn.filter((t) => t.kind !== "mark"),
    legend = !several && lines.length > 1;
  const y = view.range && seen(it, view.range);
  return [
    it.drawn.map(trace),
    layout({
      showlegend: legend,
      margin: { l: 50, r: 10, t: 18, b: legend ? 64 : 40 },
      xaxis: axis({
        range: (view.range || whole).slice(),
        title: { text: unit, standoff: 4 },
        ...(view.x === "steps" ? { tickformat: ",d", hoverformat: ",d" } : {}),
        ...(whole[1] < 8 && view.x === "steps" ? { dtick: 1 } : {}),
      }),
      yaxis: axis({
        type: isLog(it) ? "log" : "linear",
        rangemode: it.low === 0 ? "tozero" : "normal",
        exponentformat: /^(lr|grad_norm)$/.test(it.id) ? "e" : "SI",
        nticks: 6,
        hoverformat: "~r",
        ...(y ? { range: y } : {}),
        ...(it.id === "world_size" ? { dtick: Math.ceil(largest(lines.flatMap((t) => t.y)) / 6) } : {}),
      }),
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    }),
  ];
}

const isLog = (it) => view.log && it.id !== "world_size";
async function draw(it) {
  await Plotly.react($(it.id), ...(steps(it) ? curves(it) : strip(it)), options);
  if (it.connected) return;
  it.connected = true;
  $(it.id).on("plotly_relayout", (change) => (steps(it) ? zoomed(it, change) : ticked(it, change)));
  keys(it);
}

async function drawAll(which = () => true) {
  choose();
  const end = largest(figures.filter(steps).flatMap((it) => chosen(it).flatMap((t) => t.at)));
  whole = [-0.01 * end, 1.02 * end];
  for (const it of figures.filter(which)) {
    if ($(it.id).clientWidth) await draw(it); // not hidden
    await new Promise((next) => setTimeout(next)); // the page stays usable meanwhile
  }
}

async function main() {
  const back = restore();
  await unpack();
  $("view").hidden = !figures.some(steps);
  await drawAll();
  $("view").addEventListener("change", ({ target }) => {
    if (target.name === "x") view.range = null;
    drawAll();
  });
  for (const it of details)
    it.addEventListener("toggle", () => it.open && drawAll((one) => it.contains($(one.id))));
  dark.addEventListener("change", () => drawAll());
  back();
  refresh(Number(document.body.dataset.every));
  document.documentElement.dataset.drawn = Math.round(performance.now()); // for the tests
}
main().catch((error) => {
  for (const it of document.querySelectorAll(".plot"))
    it.textContent = "This browser cannot draw the plots: gptddp log prints their numbers.";
  throw error;
});
