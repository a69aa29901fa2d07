"use strict";
const nonce = document.currentScript.nonce;
const $ = (id) => document.getElementById(id);
const figures = JSON.parse($("figures").textContent);
const narrow = matchMedia("(max-width: 640px)"), dark = matchMedia("(prefers-color-scheme: dark)");
const options = { responsive: true, displayModeBar: false };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const steps = (it) => it.traces !== undefined;
const most = Math.max(1, ...figures.filter(steps).flatMap((it) => it.traces.flatMap((t) => t.x)));
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
  return { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true, ...more };
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
    dragmode: narrow.matches ? false : "zoom",
    font: { color: colour("fg"), size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: colour("soft"), bordercolor: colour("dim"), font: { color: colour("fg") }, align: "left" },
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" }, ...more,
  };
}

function trace(it) {
  const paint = colour("c" + (it.colour % 6)), base = { x: it.x, y: it.y, name: escaped(it.name), type: "scatter" };
  if (it.kind === "mark") {
    return { ...base, yaxis: "y2", mode: "markers", text: it.text.map(escaped), hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: it.symbol, size: it.mark === "restart" ? 11 : 8, color: paint, line: { width: 2, color: paint } } };
  }
  const points = it.kind === "points";
  return { ...base, mode: points || it.x.length <= 40 ? "lines+markers" : "lines", connectgaps: false, opacity: it.faint ? 0.45 : 1,
    marker: { symbol: it.symbol, size: points ? 7 : 4 },
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
        text: (it.shades.length > 5 || narrow.matches ? "" : "life ") + life.life +
          (it.id === "loss" && life.note && it.shades.length <= 6 && !narrow.matches ? ": " + life.note : ""), font: { size: 11, color: colour("dim") } });
    }
  });
  const legend = it.traces.filter((t) => t.kind !== "mark").length > 1;
  return [it.traces.map(trace), layout({
    shapes, annotations, showlegend: legend, margin: { l: 50, r: 10, t: 18, b: legend ? 64 : 40 },
    xaxis: axis({ range: whole.slice(), title: { text: "step", standoff: 4 }, tickformat: ",d", hoverformat: ",d",
      ...(most < 8 ? { dtick: 1 } : {}) }),
    yaxis: axis({ rangemode: it.low === 0 ? "tozero" : "normal", exponentformat: /^(lr|grad_norm)$/.test(it.id) ? "e" : "SI", nticks: 6, hoverformat: "~r",
      ...(it.id === "world_size" ? { dtick: Math.ceil(Math.max(1, ...it.traces.filter((t) => t.kind !== "mark").flatMap((t) => t.y)) / 6) } : {}) }),
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  })];
}

// The picture of the ranks: columns of equal seconds, in pieces between which a stop is cut out.
const pieceAt = (it, column) => it.pieces.findLast((piece) => piece[0] <= column) || it.pieces[0];
const timeAt = (it, column) => { const [from, , seconds] = pieceAt(it, column); return seconds + (column - from) * it.width; };
const clock = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ");

function columnAt(it, seconds) {
  const piece = it.pieces.findLast((one) => one[2] <= seconds + 0.5) || it.pieces[0];
  return Math.min(piece[1], piece[0] + Math.max(0, seconds - piece[2]) / it.width);
}

function ticks(it, [from, to], pixels) {
  const room = (to - from) * it.width * 75 / pixels, vals = [], text = [];
  const by = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2419200].find((s) => s > room) || 31536000;
  let day = "";
  for (const [left, right, seconds] of it.pieces) {
    for (let at = Math.ceil(seconds / by) * by; ; at += by) {
      const column = left + (at - seconds) / it.width;
      if (column > right || column > to) break;
      if (column < from || vals.length && column - vals.at(-1) < room / it.width) continue;
      const [date, time] = clock(at).split(" ");
      vals.push(column);
      text.push((by < 60 ? time : time.slice(0, 5)) + (date === day ? "" : "<br>" + date));
      day = date;
    }
  }
  return { tickvals: vals, ticktext: text };
}

function strip(it) {
  const n = it.owners.length, columns = it.cells[0].length;
  const z = it.cells.map((line) => Array.from(line, (c) => (c = parseInt(c, 36)) < n ? c : null));
  it.told = it.rows.map((name, row) => {
    const lines = z.slice(row * it.perRow, (row + 1) * it.perRow);
    return Array.from({ length: columns }, (_, column) => {
      const parts = {};
      for (const line of lines) if (line[column] !== null) parts[it.owners[line[column]]] = (parts[it.owners[line[column]]] || 0) + 1;
      const words = Object.entries(parts).map(([owner, k]) => k === it.perRow ? owner : `${owner} ${k}/${it.perRow}`);
      return `${clock(timeAt(it, column + 0.5))} UTC, ${name}: ${words.join(", ") || "not there"}`;
    });
  });
  const text = z.map((_, line) => it.told[Math.floor(line / it.perRow)]);
  const scale = it.owners.flatMap((_, i) => [[i / n, colour("o" + i)], [(i + 1) / n, colour("o" + i)]]);
  const every = Math.ceil(it.rows.length / 16), lines = it.cells.length, shapes = [], annotations = [];
  const upright = (column, line) => shapes.push({ type: "line", x0: column, x1: column, y0: -0.5, y1: lines - 0.5, line });
  for (let y = it.perRow - 0.5; y < lines - 1; y += it.perRow) {
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("bg"), width: 2 } });
  }
  for (const piece of it.pieces.slice(1)) upright(piece[0], { color: colour("bg"), width: 7 });
  it.lives.forEach(([seconds, life], i) => {
    const column = columnAt(it, seconds);
    if (i && it.lives.length <= 60) upright(column, { color: colour("fg"), width: 1, dash: "dash" });
    if (it.lives.length <= 12) annotations.push({ x: column, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false,
      text: (it.lives.length > 5 || narrow.matches ? "" : "life ") + life, font: { size: 11, color: colour("dim") } });
  });
  const heat = { type: "heatmap", x0: 0.5, dx: 1, z, text, colorscale: scale, zmin: -0.5, zmax: n - 0.5, showscale: false,
    hovertemplate: "%{text}<extra></extra>", hoverongaps: false };
  return [[heat], layout({
    hovermode: "closest", height: Math.max(140, Math.min(520, 80 + 34 * it.rows.length)), shapes, annotations, margin: { l: 50, r: 10, t: 18, b: 44 },
    xaxis: axis({ range: [0, columns], showgrid: false, tickangle: 0, ...ticks(it, [0, columns], $(it.id).clientWidth || 600) }),
    yaxis: axis({ range: [lines - 0.5, -0.5], showgrid: false, fixedrange: true, tickmode: "array",
      tickvals: it.rows.map((_, i) => (i + 0.5) * it.perRow - 0.5).filter((_, i) => i % every === 0),
      ticktext: it.rows.filter((_, i) => i % every === 0) }),
  })];
}

function ticked(it, change) {
  if (change["xaxis.tickvals"]) return;
  const { range } = $(it.id)._fullLayout.xaxis, found = ticks(it, range, $(it.id).clientWidth);
  Plotly.relayout($(it.id), { "xaxis.tickvals": found.tickvals, "xaxis.ticktext": found.ticktext });
}

const draw = (it) => Plotly.react($(it.id), ...(steps(it) ? curves(it) : strip(it)), options);

// A zoom of one plot over the steps is one of all; the others' y follows what is to be seen.
let busy = false;
async function zoomed(from, change) {
  if (busy) return;
  const range = change["xaxis.autorange"] ? whole : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (range[0] === undefined) return;
  const all = range[0] === whole[0] && range[1] === whole[1];
  busy = true;
  for (const it of figures.filter(steps)) {
    const y = all ? null : seen(it, range);
    const own = it === from && change["yaxis.range[0]"] !== undefined;
    await Plotly.relayout($(it.id), { "xaxis.range": range.slice(),
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
    const xs = steps(it) ? it.traces[0].x : Array.from(it.cells[0], (_, i) => i + 0.5);
    at = Math.max(0, Math.min(xs.length - 1, at + (by || 0)));
    if (down) row = Math.max(0, Math.min(it.rows.length - 1, row + down));
    if (zoom !== undefined) return zoomTo(it, xs[at], zoom);
    const points = steps(it) ? [{ curveNumber: 0, pointNumber: at }] : [{ curveNumber: 0, pointNumber: [row * it.perRow, at] }];
    Plotly.Fx.hover(div, points);
    readout.textContent = steps(it) ? told(it, xs[at]) : it.told[row][at];
  });
  div.addEventListener("blur", () => { Plotly.Fx.unhover(div); readout.textContent = ""; });
}

function told(it, x) {
  const parts = it.traces.flatMap((t) => t.x.flatMap((at, i) => at !== x ? [] : t.kind === "mark" ? [t.text[i]] : [`${t.name} ${t.y[i]}`]));
  return `step ${x}: ${parts.join("; ")}`;
}

function zoomTo(it, x, by) {
  const div = $(it.id), [a, b] = div._fullLayout.xaxis.range, half = (b - a) * by / 2;
  const all = steps(it) ? whole : [0, it.cells[0].length];
  const [from, to] = by ? [Math.max(all[0], x - half), Math.min(all[1], x + half)] : all;
  return Plotly.relayout(div, { "xaxis.range[0]": from, "xaxis.range[1]": to });
}

async function main() {
  await unpack();
  for (const it of figures) {
    if (!$(it.id)) continue;
    await draw(it);
    $(it.id).on("plotly_relayout", (change) => steps(it) ? zoomed(it, change) : ticked(it, change));
    keys(it);
    await new Promise((next) => setTimeout(next)); // the page stays usable meanwhile
  }
  dark.addEventListener("change", () => figures.forEach(draw));
  document.documentElement.dataset.drawn = Math.round(performance.now()); // for the tests
}
main();
