// A zoom of one plot over the steps zooms all; the y axes fit the visible points.
let busy = false;
async function zoomed(from, change) {
  if (busy) return;
  const range = change["xaxis.autorange"]
    ? whole
    : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (range[0] === undefined) return;
  const all = range[0] === whole[0] && range[1] === whole[1];
  busy = true;
  view.range = all ? null : range;
  for (const it of figures.filter(steps)) {
    const y = all ? null : seen(it, range);
    const own = it === from && change["yaxis.range[0]"] !== undefined;
    await Plotly.relayout($(it.id), {
      "xaxis.range": range.slice(),
      ...(own ? {} : y ? { "yaxis.range": y } : { "yaxis.autorange": true }),
    });
  }
  busy = false;
}

function seen(it, [a, b]) {
  let low = Infinity,
    high = -Infinity;
  for (const { at: x, y, kind } of it.drawn) {
    if (kind === "mark") continue;
    x.forEach((at, i) => {
      if (at >= a && at <= b && y[i] !== null && (y[i] > 0 || !isLog(it))) {
        low = Math.min(low, y[i]);
        high = Math.max(high, y[i]);
      }
    });
  }
  if (low > high) return null;
  if (isLog(it)) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [it.low === 0 && !isLog(it) ? 0 : low - room, high + room];
}

// Keys move between points, and zoom.
function keys(it) {
  const div = $(it.id),
    readout = div.parentElement.querySelector(".readout");
  let at = -1,
    row = 0;
  div.addEventListener("keydown", (event) => {
    const by = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageUp: -20,
      PageDown: 20,
      Home: -Infinity,
      End: Infinity,
    }[event.key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key],
      zoom = { "+": 0.5, "=": 0.5, "-": 2, 0: 0 }[event.key];
    if (
      (by === undefined && zoom === undefined && (down === undefined || steps(it))) ||
      event.ctrlKey ||
      event.metaKey
    )
      return;
    event.preventDefault();
    const first = steps(it) && it.drawn.findIndex((t) => !t.faint);
    const xs = steps(it) ? it.drawn[first]?.at || [] : Array.from(it.cells[0], (_, i) => i + 0.5);
    at = Math.max(0, Math.min(xs.length - 1, at + (by || 0)));
    if (down) row = Math.max(0, Math.min(it.rows.length - 1, row + down));
    if (zoom !== undefined) return zoomTo(it, xs[at], zoom);
    const points = steps(it)
      ? [{ curveNumber: first, pointNumber: at }]
      : [{ curveNumber: 0, pointNumber: [row * it.perRow, at] }];
    Plotly.Fx.hover(div, points);
    readout.textContent = steps(it) ? words(it, xs[at]) : it.words[row][at];
  });
  const end = () => {
    Plotly.Fx.unhover(div);
    readout.textContent = "";
  };
  div.addEventListener("blur", end);
  div.on("plotly_hover", ({ points: [point] }) => {
    if (narrow.matches) readout.textContent = steps(it) ? words(it, point.x) : point.text;
  });
  div.on("plotly_unhover", () => narrow.matches && (readout.textContent = ""));
}

// The values of all lines at x or nearest to it, and the marks at x.
function words(it, x) {
  const lines = it.drawn.flatMap((t) => {
    const near = (i) => Math.abs(t.at[i] - x) / (whole[1] - whole[0]);
    if (t.kind === "mark") return t.text.filter((_, i) => near(i) < (narrow.matches ? 0.01 : 1e-9));
    const i = t.at.reduce((best, _, at) => (near(at) < near(best) ? at : best), 0);
    const hidden = (t.faint && several) || near(i) > 0.02;
    return hidden ? [] : [`${t.name} ${t.y[i] && Number(t.y[i].toPrecision(6))}`];
  });
  return [`${unit} ${Number(x.toPrecision(6))}`, ...lines].join("\n");
}

function zoomTo(it, x, by) {
  const div = $(it.id),
    [a, b] = div._fullLayout.xaxis.range,
    half = ((b - a) * by) / 2;
  const all = steps(it) ? whole : [0, it.cells[0].length];
  const [from, to] = by ? [Math.max(all[0], x - half), Math.min(all[1], x + half)] : all;
  return Plotly.relayout(div, { "xaxis.range[0]": from, "xaxis.range[1]": to });
}
