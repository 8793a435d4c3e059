"use strict";
// Numbers in words, and the scales of charts with their ticks.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function label(value) {
  const size = Math.abs(value);
  if (size === 0 || (size >= 0.001 && size < 1e4)) return d3.format(".5~g")(value);
  const [digits, exponent] = d3.format(".3~e")(value).split("e");
  const power = [...String(Math.abs(Number(exponent)))].map((digit) => SUPERSCRIPTS[digit]).join("");
  const ten = `10${exponent.startsWith("-") ? "⁻" : ""}${power}`;
  return digits === "1" ? ten : `${digits}·${ten}`;
}

function shown(value) {
  return d3.format(".4~g")(value);
}

function wrapped(text, letters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (longer.length > letters && lines.at(-1)) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

function shortened(text, letters) {
  return text.length > letters ? `${text.slice(0, Math.max(1, letters - 1))}…` : text;
}

// scales

const withinFloats = (value) => Math.max(-1e300, Math.min(1e300, value));

// from the least to the largest figure, and at least a decade or half of the largest, so that a change of a few percent
// does not fill it
function spanOf(figures, log) {
  const known = figures.filter((value) => value !== null && (!log || value > 0));
  if (!known.length) return log ? [0.3, 3] : [0, 1];
  const [low, high] = d3.extent(log ? known.map(Math.log10) : known);
  const least = log ? 1 : Math.max(Math.abs(low), Math.abs(high)) / 2 || 1;
  const space = Math.max(0.05 * (high - low), (least - (high - low)) / 2);
  if (log) return [10 ** Math.max(-300, low - space), 10 ** Math.min(300, high + space)];
  return [withinFloats(low - space), withinFloats(high + space)];
}

// a little more than from the first place to the last
function placesOf(chart, places) {
  const [first, last] = d3.extent(places);
  if (chart.log_x) {
    const margin = Math.max(1.05, (last / first) ** 0.04);
    return [first / margin, last * margin];
  }
  const margin = 0.04 * (last - first) || 1;
  return [first - margin, last + margin];
}

// a logarithmic axis has no place for 0
function hasPlace(chart, place) {
  return !chart.log_x || place > 0;
}

function domainsOf(chart, view) {
  const x = view.lines.flatMap((line) => line.x).filter((place) => hasPlace(chart, place));
  const places = placesOf(chart, x.length ? x : [0, 1]);
  const frames = Object.values(chart.frames);
  const figures = frames.length ? frames.flat(2) : view.lines.flatMap((line) => line.y);
  const ends = frames.length ? [] : view.lines.filter((line) => !line.bound).flatMap((line) => [...line.low, ...line.high]);
  if (chart.kind === "bars") {
    const half = barsOf(view.lines).step / 2;
    return { x: [d3.min(x) - half, d3.max(x) + half], y: spanOf([0, ...figures], false) };
  }
  const [low, high] = spanOf([...figures, ...ends], view.log);
  const hasZero = view.log && figures.includes(0);
  return { x: places, y: [hasZero ? low / 3 : low, high] };  // a 0 has its mark below the figures
}

function scaleOf(log, domain, ends) {
  return (log ? d3.scaleLog() : d3.scaleLinear()).domain(domain).range(ends);
}

function ticksOf(scale, log, most) {
  const [low, high] = scale.domain();
  const [first, last] = [Math.log10(low), Math.log10(high)];
  if (!log || last - first < 0.7) return d3.ticks(low, high, most);
  const powers = d3.range(Math.floor(first), Math.ceil(last) + 1);
  const steps = last - first < most / 3 ? [1, 2, 5] : [1];
  const every = steps.length > 1 ? 1 : Math.ceil((last - first) / most);
  return powers.filter((power) => power % every === 0)
    .flatMap((power) => steps.map((step) => Number(`${step}e${power}`)))
    .filter((tick) => tick >= low && tick <= high);
}

// places that are whole numbers have ticks at whole numbers; those that double have theirs at each
function placeTicksOf(scale, chart, places, most) {
  const each = [...new Set(places)].sort(d3.ascending);
  const [low, high] = scale.domain();
  const doubles = each.length <= most && each.every((place) => place >= 1 && Number.isInteger(Math.log2(place)));
  if (chart.log_x && doubles) return each.filter((place) => place >= low && place <= high);
  const ticks = ticksOf(scale, chart.log_x, most);
  return !chart.log_x && each.every(Number.isInteger) ? ticks.filter(Number.isInteger) : ticks;
}

function labelsOf(scale, log, ticks, most) {
  const largest = d3.max(ticks, Math.abs) ?? 0;
  if (log || largest >= 1e5 || largest < 0.001) return ticks.map(label);
  if (ticks.every(Number.isInteger)) return ticks.map(d3.format(","));
  return ticks.map(scale.tickFormat(most));
}
