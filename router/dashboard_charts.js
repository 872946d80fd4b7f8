"use strict";
// The charts of the dashboard on uPlot. Each is drawn again from plain arrays; none fetches anything.

const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = new Map();

function axis(label, more) {
  return {label, stroke: colourOf("--soft"), grid: {stroke: colourOf("--line"), width: 1},
          ticks: {stroke: colourOf("--line"), width: 1}, labelSize: 18, size: 46, ...more};
}

// Draws `data` into the element `id`; `options` builds uPlot's options when the chart is first made.
function draw(id, data, options) {
  const box = document.getElementById(id);
  const known = charts.get(id);
  if (known) { known.setData(data); return; }
  if (!box.clientWidth) return;
  const made = {width: box.clientWidth, height: 190, legend: {live: false}, cursor: {show: false}, ...options()};
  charts.set(id, new uPlot(made, data, box));
}

// New colours and widths take a new chart.
function forgetCharts() {
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
}

function drawFlow(series) {
  const local = series.map(b => b.local), pulled = series.map((b, i) => local[i] + b.pulled);
  const all = series.map((b, i) => pulled[i] + b.computed);
  const area = (label, name) => ({label, stroke: colourOf(name), fill: colourOf(name), width: 0, points: {show: false},
                                  paths: uPlot.paths.bars({size: [1, 40], align: 1})});
  draw("flow", [series.map(b => b.at), all, pulled, local], () => ({
    axes: [axis(null, {size: 30}), axis("tokens in 5 s", {size: 60})],
    series: [{}, area("computed", "--computed"), area("pulled", "--pulled"), area("local", "--local")],
  }));
}

function drawHits(bins) {
  draw("hits", [bins.map((_, i) => (i + .5) / bins.length), bins], () => ({
    scales: {x: {time: false, range: [0, 1]}},
    legend: {show: false},
    axes: [axis("part of the prompt that was not computed", {size: 30}), axis("requests")],
    series: [{}, {label: "requests", fill: colourOf("--local"), stroke: colourOf("--local"), points: {show: false},
                  paths: uPlot.paths.bars({size: [.9, 60]})}],
  }));
}

function cumulative(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return [sorted, sorted.map((_, i) => (i + 1) / sorted.length)];
}

function drawTtft(timed) {
  const data = uPlot.join([cumulative(timed.map(s => s.ttft_s)), cumulative(timed.map(s => s.cold_s))]);
  const line = (label, name, dash) => ({label, stroke: colourOf(name), width: 2, dash, spanGaps: true, points: {show: false}});
  draw("ttft", data, () => ({
    scales: {x: {time: false}, y: {range: [0, 1]}},
    axes: [axis("seconds", {size: 30}), axis("part of requests")],
    series: [{}, line("with the cache, observed", "--local"), line("without, estimated", "--computed", [6, 4])],
  }));
}

function drawOutcome(timed) {
  const sorted = [...timed].sort((a, b) => a.estimate_s - b.estimate_s);
  const estimates = sorted.map(s => s.estimate_s);
  draw("outcome", [estimates, sorted.map(s => s.ttft_s), estimates], () => ({
    scales: {x: {time: false}},
    axes: [axis("estimate, seconds", {size: 30}), axis("outcome, seconds")],
    series: [{}, {label: "a request", width: 1, paths: () => null, points: {show: true, size: 5, fill: colourOf("--local"), stroke: colourOf("--local")}},
             {label: "as estimated", stroke: colourOf("--computed"), dash: [6, 4], points: {show: false}}],
  }));
}
