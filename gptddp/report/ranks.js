// The picture of the ranks: columns of equal duration, in pieces; stops between them are cut out.
const pieceAt = (it, column) => it.pieces.findLast((piece) => piece[0] <= column) || it.pieces[0];
const timeAt = (it, column) => {
  const [from, , seconds] = pieceAt(it, column);
  return seconds + (column - from) * it.width;
};
const clock = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ");

function columnAt(it, seconds) {
  const piece = it.pieces.findLast((one) => one[2] <= seconds + 0.5) || it.pieces[0];
  return Math.min(piece[1], piece[0] + Math.max(0, seconds - piece[2]) / it.width);
}

function ticks(it, [from, to], pixels) {
  const room = ((to - from) * it.width * 75) / pixels,
    vals = [],
    text = [];
  const by =
    [
      1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400,
      172800, 604800, 2419200,
    ].find((s) => s > room) || 31536000;
  let day = "";
  for (const [left, right, seconds] of it.pieces) {
    let first = true; // a piece's first tick replaces the last tick of the piece before
    for (let at = Math.ceil(seconds / by) * by; ; at += by) {
      const column = left + (at - seconds) / it.width;
      if (column > right || column > to) break;
      if (column < from) continue;
      if (vals.length && column - vals.at(-1) < room / it.width) {
        if (!first) continue;
        vals.pop();
        text.pop();
      }
      first = false;
      const [date, time] = clock(at).split(" ");
      vals.push(column);
      text.push((by < 60 ? time : time.slice(0, 5)) + (date === day ? "" : "<br>" + date));
      day = date;
    }
  }
  return { tickvals: vals, ticktext: text };
}

function strip(it) {
  const n = it.owners.length,
    columns = it.cells[0].length;
  const z = it.cells.map((line) => Array.from(line, (c) => ((c = parseInt(c, 36)) < n ? c : null)));
  it.words = it.rows.map((name, row) => {
    const lines = z.slice(row * it.perRow, (row + 1) * it.perRow);
    return Array.from({ length: columns }, (_, column) => {
      const parts = {};
      for (const line of lines)
        if (line[column] !== null)
          parts[it.owners[line[column]]] = (parts[it.owners[line[column]]] || 0) + 1;
      const words = Object.entries(parts).map(([owner, k]) =>
        k === it.perRow ? owner : `${owner} ${k}/${it.perRow}`,
      );
      return `${clock(timeAt(it, column + 0.5))} UTC, ${name}: ${words.join(", ") || "no data"}`;
    });
  });
  const text = z.map((_, line) => it.words[Math.floor(line / it.perRow)]);
  const scale = it.owners.flatMap((_, i) => [
    [i / n, colour("o" + i)],
    [(i + 1) / n, colour("o" + i)],
  ]);
  const every = Math.ceil(it.rows.length / 16),
    lines = it.cells.length,
    shapes = [],
    annotations = [];
  const upright = (column, line) =>
    shapes.push({ type: "line", x0: column, x1: column, y0: -0.5, y1: lines - 0.5, line });
  for (let y = it.perRow - 0.5; y < lines - 1; y += it.perRow) {
    shapes.push({
      type: "line",
      xref: "paper",
      x0: 0,
      x1: 1,
      y0: y,
      y1: y,
      line: { color: colour("bg"), width: 2 },
    });
  }
  for (const piece of it.pieces.slice(1)) upright(piece[0], { color: colour("bg"), width: 7 });
  it.lives.forEach(([seconds, life], i) => {
    const column = columnAt(it, seconds);
    if (i && it.lives.length <= 60)
      upright(column, { color: colour("fg"), width: 1, dash: "dash" });
    if (it.lives.length <= 12)
      annotations.push({
        x: column,
        y: 1,
        yref: "paper",
        yanchor: "bottom",
        xanchor: "left",
        showarrow: false,
        text: (it.lives.length > 5 || narrow.matches ? "" : "life ") + life,
        font: { size: 11, color: colour("dim") },
      });
  });
  const heat = {
    type: "heatmap",
    x0: 0.5,
    dx: 1,
    z,
    text,
    colorscale: scale,
    zmin: -0.5,
    zmax: n - 0.5,
    showscale: false,
    hovertemplate: "%{text}<extra></extra>",
    hoverongaps: false,
  };
  return [
    [heat],
    layout({
      hovermode: "closest",
      height: Math.max(140, Math.min(520, 80 + 34 * it.rows.length)),
      shapes,
      annotations,
      margin: { l: 50, r: 10, t: 18, b: 44 },
      xaxis: axis({
        range: [0, columns],
        showgrid: false,
        tickangle: 0,
        ...ticks(it, [0, columns], $(it.id).clientWidth || 600),
      }),
      yaxis: axis({
        range: [lines - 0.5, -0.5],
        showgrid: false,
        fixedrange: true,
        tickmode: "array",
        tickvals: it.rows
          .map((_, i) => (i + 0.5) * it.perRow - 0.5)
          .filter((_, i) => i % every === 0),
        ticktext: it.rows.filter((_, i) => i % every === 0),
      }),
    }),
  ];
}

function ticked(it, change) {
  if (change["xaxis.tickvals"]) return;
  const { range } = $(it.id)._fullLayout.xaxis,
    found = ticks(it, range, $(it.id).clientWidth);
  Plotly.relayout($(it.id), { "xaxis.tickvals": found.tickvals, "xaxis.ticktext": found.ticktext });
}
