"use strict";
// Charts as SVG, drawn by d3: lines, bars, points, and a map where lines are many. `view` is what the reader has chosen:
// the lines with a moment's figures, the models' looks, whether the axis is logarithmic, and the part of the chart to see.

const MOST_LINES = 7;
const NEAR = 40;  // pixels from the pointer within which a point is read
const DASHES = ["", "6 3", "2 3", "6 2 2 2", "10 3", "10 3 2 3"];
const BOUND_DASHES = "5 3";
const MARKS = {
  "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
  "s": "M-4-4h8v8h-8z",
  "D": "M0-5l5 5-5 5-5-5z",
  "^": "M0-5l5 9h-10z",
  "v": "M0 5l5-9h-10z",
  "P": "M-2-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
  "X": "M-4-5l4 3 4-3 1 1-3 4 3 4-1 1-4-3-4 3-1-1 3-4-3-4z",
  "*": "M0-5l1.5 3.5 3.5.2-2.7 2.4.9 3.7-3.2-2-3.2 2 .9-3.7-2.7-2.4 3.5-.2z",
};
const markOf = (look) => MARKS[look.marker] ?? MARKS.o;

function isMap(chart, view) {
  const measured = new Set(view.lines.filter((line) => !line.bound).map((line) => line.model));
  return chart.kind === "lines" && measured.size > MOST_LINES;
}

function drawChart(plot, chart, view) {
  plot.replaceChildren();
  if (isMap(chart, view)) drawMap(plot, chart, view);
  else drawPlane(plot, chart, view);
}

// a short line with its mark, as in the chart
function swatch(look, isBound) {
  const svg = d3.create("svg").attr("width", 28).attr("height", 10).attr("aria-hidden", "true");
  svg.append("line").attr("x2", 28).attr("y1", 5).attr("y2", 5).attr("stroke", look.colour).attr("stroke-width", isBound ? 1 : 3)
    .attr("stroke-dasharray", isBound ? BOUND_DASHES : DASHES[look.repeat % DASHES.length]);
  if (!isBound) svg.append("path").attr("d", markOf(look)).attr("transform", "translate(14,5)").attr("fill", look.colour);
  return svg.node();
}

// a plane with axes

function emptySvg(plot) {
  const size = parseFloat(getComputedStyle(plot).fontSize);
  const width = plot.clientWidth, height = plot.clientHeight;
  const svg = d3.select(plot).append("svg").attr("width", width).attr("height", height);
  return { svg, width, height, size, letter: 0.6 * size };
}

function drawPlane(plot, chart, view) {
  const { svg, width, height, size, letter } = emptySvg(plot);
  const domains = view.zoom ?? domainsOf(chart, view);
  const said = chart.y.toLowerCase() === chart.title.toLowerCase();
  const title = said ? [] : wrapped(chart.y, width / letter);
  const top = size * (0.8 + 1.3 * title.length), bottom = height - 3.2 * size;
  const y = scaleOf(view.log, domains.y, [bottom, top]);
  const yMost = Math.max(2, Math.floor((bottom - top) / (3 * size)));
  const yTicks = ticksOf(y, view.log, yMost), yLabels = labelsOf(y, view.log, yTicks, yMost);
  const left = letter * (2 + (d3.max(yLabels, (text) => text.length) ?? 1));
  const right = width - (chart.kind === "points" ? 5.5 * size : size);
  const x = scaleOf(chart.log_x, domains.x, [left, right]);
  const xMost = Math.max(2, Math.floor((right - left) / (6 * size)));
  const xTicks = placeTicksOf(x, chart, view.lines.flatMap((line) => line.x), xMost);

  title.forEach((line, i) => svg.append("text").attr("class", "title").attr("y", size * (1 + 1.3 * i)).text(line));
  drawBottomAxis(svg, chart.x, { x, left, right, top, bottom, size, ticks: xTicks, labels: labelsOf(x, chart.log_x, xTicks, xMost) });
  yTicks.forEach((tick, i) => {
    svg.append("line").attr("class", "grid").attr("x1", left).attr("x2", right).attr("y1", y(tick)).attr("y2", y(tick));
    svg.append("text").attr("class", "y tick").attr("x", left - letter).attr("y", y(tick)).attr("dy", "0.35em").text(yLabels[i]);
  });
  const area = clippedArea(svg, plot, { left, right, top, bottom });
  const draw = { lines: drawLines, bars: drawBars, points: drawPoints }[chart.kind];
  const readings = draw(area, chart, view, x, y);
  if (chart.kind === "points") drawColourBar(svg, { x: right + size, edge: width, top, bottom, size, title: "segment", whole: true, ...shadesOf(view.lines) });
  drawEvents(area, chart, view, x, { top, bottom, size });
  const tree = d3.quadtree(readings, (reading) => reading.x, (reading) => reading.y);
  readAtPointer(plot, svg, (px, py) => tree.find(px, py, NEAR));
  zoomByDragging(svg, view, { x, y, left, right, top, bottom });
}

function drawBottomAxis(svg, title, { x, left, right, top, bottom, size, ticks, labels }) {
  ticks.forEach((tick, i) => {
    svg.append("line").attr("class", "grid").attr("x1", x(tick)).attr("x2", x(tick)).attr("y1", top).attr("y2", bottom);
    svg.append("text").attr("class", "x tick").attr("x", x(tick)).attr("y", bottom + 1.2 * size).text(labels[i]);
  });
  svg.append("text").attr("class", "x title").attr("x", (left + right) / 2).attr("y", bottom + 2.7 * size).text(title);
}

function clippedArea(svg, plot, { left, right, top, bottom }) {
  const name = `area-${plot.parentElement.dataset.chart}`;
  svg.append("clipPath").attr("id", name).append("rect")
    .attr("x", left).attr("y", top - 5).attr("width", Math.max(0, right - left)).attr("height", bottom - top + 10);
  return svg.append("g").attr("clip-path", `url(#${name})`);
}

function reading(x, y, ...words) {
  return { x, y, text: words.join("\n") };
}

function drawLines(area, chart, view, x, y) {
  const readings = [];
  for (const line of view.lines) {
    const look = view.looks.get(line.model);
    const has = (value) => value !== null && (!view.log || value > 0);
    const points = line.x.map((place, i) => ({ place, i, value: line.y[i] })).filter((point) => hasPlace(chart, point.place));
    const drawn = points.filter((point) => has(point.value));
    const group = area.append("g").attr("class", line.bound ? "bound" : "line").attr("data-model", line.model).attr("stroke", look.colour);
    const path = d3.line().defined((point) => has(point.value)).x((point) => x(point.place)).y((point) => y(point.value));
    group.append("path").attr("class", "path").attr("d", path(points))
      .attr("stroke-dasharray", line.bound ? BOUND_DASHES : DASHES[look.repeat % DASHES.length]);
    const name = line.bound && !line.predicted ? `${line.model}, bound` : line.model;
    for (const { place, value } of drawn) readings.push(reading(x(place), y(value), name, `${chart.x} ${shown(place)}`, shown(value)));
    if (line.bound) continue;
    for (const { place, i } of drawn.filter((point) => has(line.low[point.i] ?? null) && has(line.high[point.i] ?? null))) {
      group.append("line").attr("class", "interval").attr("x1", x(place)).attr("x2", x(place)).attr("y1", y(line.low[i])).attr("y2", y(line.high[i]));
    }
    const scale = points.length > 30 ? 0.5 : 0.8;
    for (const { place, value } of drawn) {
      group.append("path").attr("class", "mark").attr("d", markOf(look)).attr("fill", look.colour)
        .attr("transform", `translate(${x(place)},${y(value)}) scale(${scale})`);
    }
    if (view.log) readings.push(...drawZeros(group, chart, line, points, x, y.range()[0]));
  }
  return readings;
}

// 0 has no place on a logarithmic axis: it is a hollow mark at its foot
function drawZeros(group, chart, line, points, x, foot) {
  return points.filter((point) => point.value === 0).map(({ place }) => {
    group.append("path").attr("class", "zero").attr("d", MARKS.v).attr("transform", `translate(${x(place)},${foot - 6})`);
    return reading(x(place), foot - 6, line.model, `${chart.x} ${shown(place)}`, "0, below the axis");
  });
}

// bars of several models stand next to each other at each place
function barsOf(lines) {
  const places = [...new Set(lines.flatMap((line) => line.x))].sort(d3.ascending);
  const step = d3.min(d3.pairs(places, (a, b) => b - a)) ?? 1;
  return { step, width: (0.8 * step) / Math.max(1, lines.length) };
}

function drawBars(area, chart, view, x, y) {
  const { step, width } = barsOf(view.lines);
  const readings = [];
  view.lines.forEach((line, k) => {
    const group = area.append("g").attr("class", "bars").attr("data-model", line.model).attr("fill", view.looks.get(line.model).colour);
    line.x.forEach((place, i) => {
      const value = line.y[i];
      if (value === null) return;
      const start = place - 0.4 * step + k * width;
      group.append("rect").attr("x", x(start)).attr("width", x(start + width) - x(start))
        .attr("y", Math.min(y(0), y(value))).attr("height", Math.abs(y(value) - y(0)));
      readings.push(reading(x(start + width / 2), y(value), line.model, `${chart.x} ${shown(place)}`, shown(value)));
    });
  });
  const [left, right] = x.range();
  area.append("line").attr("class", "zero-line").attr("x1", left).attr("x2", right).attr("y1", y(0)).attr("y2", y(0));
  return readings;
}

function shadesOf(lines) {
  const most = d3.max(lines.flatMap((line) => line.shade)) || 1;
  return { domain: [0, most], colour: d3.scaleSequential(d3.interpolateViridis).domain([0, most]) };
}

function drawPoints(area, chart, view, x, y) {
  const { colour } = shadesOf(view.lines);
  const readings = [];
  area.append("line").attr("class", "zero-line").attr("x1", x(0)).attr("x2", x(0)).attr("y1", y.range()[0]).attr("y2", y.range()[1]);
  for (const line of view.lines) {
    const group = area.append("g").attr("class", "points").attr("data-model", line.model);
    line.x.forEach((place, i) => {
      const value = line.y[i];
      if (value === null) return;
      group.append("circle").attr("cx", x(place)).attr("cy", y(value)).attr("r", 2.5).attr("fill", colour(line.shade[i]));
      readings.push(reading(x(place), y(value), `${line.model}, segment ${line.shade[i]}`, `${shown(place)}, ${shown(value)}`));
    });
  }
  return readings;
}

// vertical lines with a word, such as an alarm
function drawEvents(area, chart, view, x, { top, bottom, size }) {
  const first = d3.min(view.lines.flatMap((line) => line.x));
  for (const [place, word] of chart.events) {
    const beside = place <= first ? 0.9 * size : -0.3 * size;
    area.append("line").attr("class", "event").attr("x1", x(place)).attr("x2", x(place)).attr("y1", top).attr("y2", bottom);
    area.append("text").attr("class", "event").attr("transform", `translate(${x(place) + beside},${top}) rotate(-90)`).text(word);
  }
}

// a map: a row for each model, the figure as a colour

// The colours of a map. A figure with a limit has one ramp within it and another beyond it, so that what is within looks
// alike however little it varies.
function coloursOf(chart, figures, { log, ramps }) {
  const [lowest, highest] = chart.limits;
  const limits = chart.limits.filter((limit) => limit !== null && (!log || limit > 0));
  let domain = spanOf([...figures, ...limits], log);
  if (!limits.length && !log && d3.min(figures) < 0) {
    const most = d3.max(domain, Math.abs);  // of figures of both signs the middle colour is 0
    domain = [-most, most];
  }
  const place = scaleOf(log, domain, [0, 1]).clamp(true);
  const ramp = (colours) => d3.piecewise(d3.interpolateRgb, colours);
  const plain = ramp(ramps.plain), within = ramp(ramps.within), beyond = ramp(ramps.beyond);
  const at = (value) => (log && value <= 0 ? 0 : place(value));  // 0 is as dark as the least
  const colour = (value) => {
    if (highest !== null && value > highest) return beyond(at(value));
    if (lowest !== null && value < lowest) return beyond(1 - at(value));
    return (limits.length ? within : plain)(at(value));
  };
  return { domain, colour, limits };
}

function drawMap(plot, chart, view) {
  const { svg, width, height, size, letter } = emptySvg(plot);
  const rows = view.lines.filter((line) => !line.bound);
  const places = [...new Set(rows.flatMap((line) => line.x))].sort(d3.ascending);
  const most = Math.floor((0.4 * width) / letter);
  const names = rows.map((line) => shortened(line.model, most));
  const left = letter * (2 + d3.max(names, (name) => name.length));
  const right = width - 6.5 * size, top = 0.5 * size, bottom = height - 3.2 * size;
  const x = d3.scaleBand().domain(places).range([left, right]);
  const y = d3.scaleBand().domain(d3.range(rows.length)).range([top, bottom]);
  const figures = rows.flatMap((line) => line.y).filter((value) => value !== null);
  const colours = coloursOf(chart, figures, view);
  rows.forEach((line, row) => {
    svg.append("text").attr("class", "y tick").attr("x", left - letter).attr("y", y(row) + y.bandwidth() / 2).attr("dy", "0.35em").text(names[row]);
    const group = svg.append("g").attr("class", "row").attr("data-model", line.model);
    line.x.forEach((place, i) => {
      if (line.y[i] === null) return;
      group.append("rect").attr("x", x(place)).attr("y", y(row)).attr("width", x.bandwidth() + 0.5).attr("height", y.bandwidth() + 0.5)
        .attr("fill", colours.colour(line.y[i]));
    });
  });
  const every = Math.ceil((places.length * 4 * size) / Math.max(1, right - left));
  const ticks = places.filter((_, i) => i % every === 0);
  const middle = (place) => x(place) + x.bandwidth() / 2;
  drawBottomAxis(svg, chart.x, { x: middle, left, right, top: bottom, bottom, size, ticks, labels: ticks.map(label) });
  drawColourBar(svg, { x: right + size, edge: width, top, bottom, size, title: chart.y, log: view.log, ...colours });
  readAtPointer(plot, svg, (px, py) => {
    const row = Math.floor((py - top) / y.step()), place = places[Math.floor((px - left) / x.step())];
    const value = rows[row]?.y[rows[row].x.indexOf(place)] ?? null;
    if (value === null) return undefined;
    return reading(middle(place), y(row) + y.bandwidth() / 2, rows[row].model, `${chart.x} ${shown(place)}`, shown(value));
  });
}

function drawColourBar(svg, { x, edge, top, bottom, size, title, domain, colour, log = false, limits = [], whole = false }) {
  const scale = scaleOf(log, domain, [bottom, top]);
  const bar = svg.append("g").attr("class", "colours");
  for (let at = Math.floor(top); at < bottom; at += 2) {
    bar.append("rect").attr("x", x).attr("y", at).attr("width", size).attr("height", 2.5).attr("fill", colour(scale.invert(at)));
  }
  const ticks = ticksOf(scale, log, 6).filter((tick) => !whole || Number.isInteger(tick));
  const labels = labelsOf(scale, log, ticks, 6);
  ticks.forEach((tick, i) => {
    bar.append("text").attr("x", x + 1.3 * size).attr("y", scale(tick)).attr("dy", "0.35em").text(labels[i]);
  });
  for (const limit of limits) bar.append("line").attr("class", "event").attr("x1", x - 3).attr("x2", x + size + 3).attr("y1", scale(limit)).attr("y2", scale(limit));
  bar.append("text").attr("class", "title").attr("transform", `translate(${edge - 0.4 * size},${(top + bottom) / 2}) rotate(-90)`).text(title);
}

// what the pointer does

function readAtPointer(plot, svg, find) {
  const words = d3.select(plot).append("div").attr("class", "reading").attr("hidden", "");
  const ring = svg.append("circle").attr("class", "ring").attr("r", 6).attr("visibility", "hidden");
  const hide = () => {
    words.attr("hidden", "");
    ring.attr("visibility", "hidden");
  };
  svg.on("pointermove.read pointerdown.read", () => {
    const found = find(...d3.mouse(svg.node()));
    if (!found) return hide();
    ring.attr("visibility", null).attr("cx", found.x).attr("cy", found.y);
    words.attr("hidden", null).text(found.text);
    const box = words.node();
    words.style("left", `${Math.max(0, Math.min(found.x + 10, plot.clientWidth - box.offsetWidth))}px`);
    words.style("top", `${Math.max(0, found.y - box.offsetHeight - 10)}px`);
  });
  svg.on("pointerleave.read", hide);
}

// a mouse that is dragged marks the part to see; one that is dragged along one axis only leaves the other as it is
function zoomByDragging(svg, view, { x, y, left, right, top, bottom }) {
  const frame = svg.append("rect").attr("class", "zoom").attr("visibility", "hidden");
  let start = null;
  const marked = () => {
    const [px, py] = d3.mouse(svg.node());
    const within = (value, low, high) => Math.max(low, Math.min(high, value));
    const xs = [start[0], within(px, left, right)].sort(d3.ascending), ys = [start[1], within(py, top, bottom)].sort(d3.ascending);
    const wide = xs[1] - xs[0] > 10, tall = ys[1] - ys[0] > 10;
    return { xs: wide || !tall ? xs : [left, right], ys: tall || !wide ? ys : [top, bottom], isPart: wide || tall };
  };
  svg.on("pointerdown.zoom", () => {
    const [px, py] = d3.mouse(svg.node());
    const inside = px >= left && px <= right && py >= top && py <= bottom;
    if (d3.event.pointerType !== "mouse" || d3.event.button !== 0 || !inside) return;
    d3.event.preventDefault();
    svg.node().setPointerCapture(d3.event.pointerId);
    start = [px, py];
  });
  svg.on("pointermove.zoom", () => {
    if (!start) return;
    const { xs, ys } = marked();
    frame.attr("visibility", null).attr("x", xs[0]).attr("width", xs[1] - xs[0]).attr("y", ys[0]).attr("height", ys[1] - ys[0]);
  });
  svg.on("pointerup.zoom", () => {
    if (!start) return;
    const { xs, ys, isPart } = marked();
    start = null;
    frame.attr("visibility", "hidden");
    if (isPart) view.onZoom({ x: xs.map(x.invert), y: [ys[1], ys[0]].map(y.invert) });
  });
  svg.on("dblclick.zoom", () => view.onZoom(null));
}
