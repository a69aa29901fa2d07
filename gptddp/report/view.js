// One form has the choices for all plots.
"use strict";
const $ = (id) => document.getElementById(id);
const figures = JSON.parse($("figures").textContent);
const inputs = [...$("view").elements],
  details = [...document.querySelectorAll("details")];
const traces = figures.flatMap((it) => it.traces || []),
  several = inputs.some((it) => it.name === "run");
const view = { x: "steps", smooth: 0, log: false, off: new Set(), range: null };
let unit, scale; // of the x axis

function choose() {
  const runs = inputs.filter((it) => it.name === "run");
  const { x, smooth, log } = $("view").elements;
  view.x = x.value;
  view.smooth = Number(smooth.value);
  view.log = log.checked;
  view.off = new Set(runs.flatMap((it, i) => (it.checked ? [] : [i])));
  const [name, seconds] = largest(traces.flatMap((it) => it.x.time)) < 7200 ? ["min", 60] : ["h", 3600];
  unit = { steps: "step", tokens: "tokens", time: `${name} since the run began` }[view.x];
  scale = view.x === "time" ? seconds : 1;
}

// The mean over a window around each step.
function smoothed(t) {
  const { x, y } = t.means.y.length ? t.means : t,
    half = (view.smooth * (x.steps.at(-1) - x.steps[0])) / 2;
  let from = 0,
    to = 0;
  const means = x.steps.map((step) => {
    while (x.steps[to] <= step + half) to++;
    while (x.steps[from] < step - half) from++;
    const known = y.slice(from, to).filter((it) => it !== null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  });
  return { ...t, x, y: means, name: `${t.name}, mean of ${Math.ceil(2 * half)}` };
}

// The traces of a figure that are drawn.
function chosen(it) {
  return it.traces
    .filter((t) => !view.off.has(t.run))
    .flatMap((t) => (t.means && view.smooth ? [{ ...t, faint: true }, smoothed(t)] : [t]))
    .map((t) => ({ ...t, at: t.x[view.x].map((it) => it / scale) }));
}

// The browser keeps this state while the page reloads. A page of a live run reloads itself, unless
// the mouse is over a plot or the form.
function keep() {
  const choices = inputs.map((it) => [it.checked, it.value]),
    open = details.map((it) => it.open);
  const { id } = document.activeElement;
  history.replaceState({ choices, open, range: view.range, y: scrollY, id }, "");
}

function restore() {
  const kept = history.state || { choices: [], open: [], range: null };
  inputs.forEach((it, i) => ([it.checked, it.value] = kept.choices[i] || [it.checked, it.value]));
  details.forEach((it, i) => (it.open = kept.open[i]));
  view.range = kept.range;
  return () => {
    $(kept.id)?.focus({ preventScroll: true });
    if (kept.y) scrollTo(0, kept.y);
  };
}

function refresh(everyS) {
  const load = () => {
    if (document.hidden || document.querySelector(".plot:hover, form:hover")) return;
    keep();
    location.reload();
  };
  // less often on a slow machine
  if (everyS) setInterval(load, Math.max(1000 * everyS, 3 * performance.now()));
}
