"use strict";
const nonce = document.currentScript.nonce;
const $ = (id) => document.getElementById(id);
const figures = JSON.parse($("figures").textContent);
const narrow = matchMedia("(max-width: 640px)"), dark = matchMedia("(prefers-color-scheme: dark)");
const options = { responsive: true, displaylogo: false, displayModeBar: !narrow.matches && "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"] };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const steps = (it) => it.traces !== undefined;
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
  return { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true, ...more };
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
    dragmode: narrow.matches ? false : "zoom", margin: { l: 50, r: 10, t: 18, b: 34 },
    font: { color: colour("fg"), size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: colour("soft"), bordercolor: colour("dim"), font: { color: colour("fg") }, align: "left" },
    legend: { orientation: "h", x: 0, y: -0.14, yanchor: "top" }, ...more,
  };
}

function trace(it) {
  const paint = colour("c" + (it.colour % 6)), base = { x: it.x, y: it.y, name: escaped(it.name), type: "scatter" };
  if (it.kind === "mark") {
    return { ...base, yaxis: "y2", mode: "markers", text: it.text.map(escaped), hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: it.symbol, size: it.mark === "restart" ? 11 : 8, color: paint, line: { width: 2, color: paint } } };
  }
  const points = it.kind === "points";
  return { ...base, mode: points ? "lines+markers" : "lines", connectgaps: false, opacity: it.faint ? 0.45 : 1,
    marker: { symbol: it.symbol, size: 7 },
    line: { color: paint, width: it.faint ? 1 : 1.8, dash: points && it.dash === "solid" ? "dot" : it.dash,
      shape: it.steps ? "hv" : "linear" },
    hovertemplate: "%{y}<extra>%{fullData.name}</extra>" };
}

function curves(it) {
  const shapes = [], annotations = [];
  it.shades.forEach((life, i) => {
    const at = { type: "rect", yref: "paper", y0: 0, y1: 1, layer: "below", x0: life.begin, x1: life.end };
    if (i % 2) shapes.push({ ...at, fillcolor: colour("band"), line: { width: 0 } });
    if (i) shapes.push({ ...at, type: "line", x1: life.begin, line: { width: 1, dash: "dash", color: colour("dim") } });
    if (it.shades.length > 1 && it.shades.length <= 12) {
      annotations.push({ x: life.begin, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false,
        text: (it.shades.length > 5 || narrow.matches ? "" : "life ") + life.life, font: { size: 11, color: colour("dim") } });
    }
  });
  return [it.traces.map(trace), layout({
    shapes, annotations, showlegend: it.traces.length > 1,
    xaxis: axis({ title: { text: "step", standoff: 4 }, tickformat: ",d", hoverformat: ",d" }),
    yaxis: axis({ rangemode: it.low === 0 ? "tozero" : "normal", exponentformat: "power", nticks: 6 }),
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  })];
}

function strip(it) {
  const n = it.owners.length, z = it.cells.map((line) => Array.from(line, (c) => (c = parseInt(c, 36)) < n ? c : null));
  const text = it.rows.flatMap((name, row) => {
    const lines = z.slice(row * it.perRow, (row + 1) * it.perRow);
    const told = it.times.map((_, column) => {
      const parts = {};
      for (const line of lines) if (line[column] !== null) parts[it.owners[line[column]]] = (parts[it.owners[line[column]]] || 0) + 1;
      const words = Object.entries(parts).map(([owner, k]) => k === it.perRow ? owner : `${owner} ${k}/${it.perRow}`);
      return words.length ? `${name}: ${words.join(", ")}` : "";
    });
    return lines.map(() => told);
  });
  it.told = text.filter((_, i) => i % it.perRow === 0);
  const scale = it.owners.flatMap((_, i) => [[i / n, colour("o" + i)], [(i + 1) / n, colour("o" + i)]]);
  const every = Math.ceil(it.rows.length / 16), shapes = [], annotations = [];
  const lines = it.rows.length * it.perRow;
  for (let i = 1; i < it.rows.length; i++) {
    const y = i * it.perRow - 0.5;
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("bg"), width: 2 } });
  }
  it.lives.forEach(([at, life], i) => {
    if (!i || it.lives.length > 60) return;
    shapes.push({ type: "line", x0: at, x1: at, y0: -0.5, y1: lines - 0.5, line: { color: colour("fg"), width: 1, dash: "dash" } });
    if (it.lives.length <= 12) annotations.push({ x: at, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false,
      text: (it.lives.length > 5 || narrow.matches ? "" : "life ") + life, font: { size: 11, color: colour("dim") } });
  });
  return [[{ type: "heatmap", x: it.times, z, text, colorscale: scale, zmin: -0.5, zmax: n - 0.5, showscale: false,
    hovertemplate: "%{x|%Y-%m-%d %H:%M:%S}<br>%{text}<extra></extra>", hoverongaps: false }], layout({
    hovermode: "closest", height: Math.max(130, Math.min(520, 70 + 34 * it.rows.length)), shapes, annotations,
    xaxis: axis({ type: "date", showgrid: false, rangebreaks: it.breaks.map((b) => ({ bounds: b })) }),
    yaxis: axis({ autorange: "reversed", showgrid: false, fixedrange: true, tickmode: "array",
      tickvals: it.rows.map((_, i) => (i + 0.5) * it.perRow - 0.5).filter((_, i) => i % every === 0),
      ticktext: it.rows.filter((_, i) => i % every === 0) }),
  })];
}

const draw = (it) => Plotly.react($(it.id), ...(steps(it) ? curves(it) : strip(it)), options);

// A zoom of one plot over the steps is one of all; the others' y follows what is to be seen.
let busy = false;
async function zoomed(from, change) {
  if (busy) return;
  const all = change["xaxis.autorange"], range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (!all && range[0] === undefined) return;
  busy = true;
  for (const it of figures.filter(steps)) {
    const y = all ? null : seen(it, range);
    const own = it === from && change["yaxis.range[0]"] !== undefined;
    await Plotly.relayout($(it.id), { ...(all ? { "xaxis.autorange": true } : { "xaxis.range": range.slice() }),
      ...(own ? {} : y ? { "yaxis.range": y } : { "yaxis.autorange": true }) });
  }
  busy = false;
}

function seen(it, [a, b]) {
  let low = Infinity, high = -Infinity;
  for (const { x, y, kind } of it.traces) {
    if (kind === "mark") continue;
    x.forEach((at, i) => { if (at >= a && at <= b && y[i] !== null) { low = Math.min(low, y[i]); high = Math.max(high, y[i]); } });
  }
  if (low > high) return null;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [it.low === 0 ? 0 : low - room, high + room];
}

// Keys: from point to point, and zoom.
function keys(it) {
  const div = $(it.id), readout = div.parentElement.querySelector(".readout");
  let at = -1, row = 0;
  div.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key], zoom = { "+": 0.5, "=": 0.5, "-": 2, 0: 0 }[event.key];
    if (by === undefined && zoom === undefined && (down === undefined || steps(it)) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const xs = steps(it) ? it.traces[0].x : it.times;
    at = Math.max(0, Math.min(xs.length - 1, at + (by || 0)));
    if (down) row = Math.max(0, Math.min(it.rows.length - 1, row + down));
    if (zoom !== undefined) return zoomTo(it, xs[at], zoom);
    const points = steps(it) ? [{ curveNumber: 0, pointNumber: at }] : [{ curveNumber: 0, pointNumber: [row * it.perRow, at] }];
    Plotly.Fx.hover(div, points);
    readout.textContent = steps(it) ? told(it, xs[at]) : new Date(xs[at]).toISOString().slice(0, 19).replace("T", " ") + " UTC, " + (it.told[row][at] || "nothing");
  });
  div.addEventListener("blur", () => { Plotly.Fx.unhover(div); readout.textContent = ""; });
}

function told(it, x) {
  const parts = it.traces.flatMap((t) => t.x.flatMap((at, i) => at !== x ? [] : t.kind === "mark" ? [t.text[i]] : [`${t.name} ${t.y[i]}`]));
  return `step ${x}: ${parts.join("; ")}`;
}

function zoomTo(it, x, by) {
  const div = $(it.id), axis = div._fullLayout.xaxis, [a, b] = axis.range.map((v) => axis.d2l(v)), half = (b - a) * by / 2;
  if (!by) return Plotly.relayout(div, { "xaxis.autorange": true });
  return Plotly.relayout(div, { "xaxis.range[0]": x - half, "xaxis.range[1]": x + half });
}

async function main() {
  await unpack();
  for (const it of figures) {
    if (!$(it.id)) continue;
    await draw(it);
    if (steps(it)) $(it.id).on("plotly_relayout", (change) => zoomed(it, change));
    keys(it);
    await new Promise((next) => setTimeout(next)); // the page stays usable meanwhile
  }
  dark.addEventListener("change", () => figures.forEach(draw));
  document.documentElement.dataset.drawn = Math.round(performance.now()); // for the tests
}
main();
