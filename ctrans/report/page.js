"use strict";
(async () => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const charts = read("charts"), looks = read("looks");
  // the pictures' library is packed; without it, in a browser of before 2023, the tables still stand
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  }
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const MOST_LINES = 7;
  const text = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const root = document.documentElement;

  // a model's look: its placement's colour and mark; models of one colour are told apart by their dashes
  const models = new Map(looks.map(([name, colour, symbol, repeat]) => [name, { colour, symbol, dash: DASHES[repeat % DASHES.length], shown: true }]));

  const theme = () => getComputedStyle(root);
  const printing = () => root.classList.contains("printing");
  const axis = (title, log) => {
    const style = theme();
    return {
      title: { text: title, standoff: 8 }, type: log ? "log" : "linear", automargin: true, zeroline: false,
      gridcolor: style.getPropertyValue("--line").trim(), linecolor: style.getPropertyValue("--line").trim(), exponentformat: "power",
    };
  };

  // 0 has no place on a logarithmic axis: it is a hollow mark at its foot
  function zeroTraces(chart, lines) {
    const shown = lines.filter((line) => !line.bound && models.get(line.model).shown && line.y.includes(0));
    const known = lines.filter((line) => models.get(line.model).shown).flatMap((line) => line.y).filter((v) => v > 0);
    const foot = known.length ? Math.min(...known) / 3 : 1;
    return shown.map((line) => ({
      type: "scatter", mode: "markers", name: text(line.model), x: line.x.filter((_, i) => line.y[i] === 0), y: line.y.filter((v) => v === 0).map(() => foot),
      marker: { symbol: "triangle-down-open", color: models.get(line.model).colour, size: 9, line: { width: 2 } },
      hovertemplate: `${text(line.model)}<br>${text(chart.x)} %{x}<br>0, below the axis<extra></extra>`,
    }));
  }

  function lineTraces(chart, lines, log) {
    const zeros = log ? zeroTraces(chart, lines) : [];
    return zeros.concat(lines.filter((line) => models.get(line.model).shown).map((line) => {
      const look = models.get(line.model);
      return {
        type: "scatter", mode: line.bound ? "lines" : "lines+markers", name: text(line.model), x: line.x, y: log ? line.y.map((v) => (v > 0 ? v : null)) : line.y,
        line: { color: look.colour, dash: line.bound ? "5px 3px" : look.dash === "solid" ? "solid" : look.dash, width: line.bound ? 1 : 2 },
        opacity: line.bound ? 0.75 : 1, marker: { symbol: look.symbol, size: line.x.length > 30 ? 4 : 7 },
        ...(line.low.length && !line.bound ? { error_y: { type: "data", symmetric: false, array: line.high.map((v, i) => v - line.y[i]), arrayminus: line.low.map((v, i) => line.y[i] - v), color: look.colour, thickness: 1 } } : {}),
        hovertemplate: `${text(line.model)}${line.bound && !line.predicted ? ", bound" : ""}<br>${text(chart.x)} %{x}<br>%{y:.4g}<extra></extra>`,
      };
    }));
  }

  function mapTraces(chart, lines, log) {
    const shown = lines.filter((line) => !line.bound && models.get(line.model).shown);
    const at = [...new Set(shown.flatMap((line) => line.x))].sort((a, b) => a - b);
    const raw = shown.map((line) => at.map((x) => { const i = line.x.indexOf(x); return i < 0 ? null : line.y[i]; }));
    const least = Math.log10(Math.min(...raw.flat().filter((v) => v > 0)));  // 0 is as dark as the least
    const z = raw.map((row) => row.map((v) => (v === null ? null : log ? (v > 0 ? Math.log10(v) : Number.isFinite(least) ? least : null) : v)));
    const [low, high] = range(raw, log).range ?? [0, 1], most = Math.max(-low, high);
    const [zmin, zmax] = !log && raw.flat().some((v) => v < 0) ? [-most, most] : [low, high];  // signed: the middle colour is 0
    return [{
      type: "heatmap", zmin, zmax, x: at, y: shown.map((line) => text(line.model)), z, customdata: raw, colorscale: "Cividis",
      colorbar: { title: { text: (log ? "log10 of " : "") + text(chart.y), side: "right" }, thickness: 12 },
      hovertemplate: `%{y}<br>${text(chart.x)} %{x}<br>%{customdata:.4g}<extra></extra>`,
    }];
  }

  function barTraces(chart, lines) {
    return lines.filter((line) => models.get(line.model).shown).map((line) => ({
      type: "bar", name: text(line.model), x: line.x, y: line.y, marker: { color: models.get(line.model).colour },
      hovertemplate: `${text(line.model)}<br>${text(chart.x)} %{x}<br>%{y:.4g}<extra></extra>`,
    }));
  }

  function pointTraces(chart, lines) {
    return lines.filter((line) => models.get(line.model).shown).map((line, i) => ({
      type: "scatter", mode: "markers", name: text(line.model), x: line.x, y: line.y,
      marker: { color: [...line.shade], colorscale: "Viridis", cmin: 0, size: 5, showscale: i === 0, colorbar: { title: { text: "segment", side: "right" }, thickness: 12 } },
      hovertemplate: `${text(line.model)}, segment %{marker.color}<br>%{x:.4g}, %{y:.4g}<extra></extra>`,
    }));
  }

  // an axis spans a decade, or half of its largest figure, so that a change of a few percent does not fill it; the same at every moment
  function range(all, log) {
    const known = all.flat().filter((v) => v !== null && (!log || v > 0)).map((v) => (log ? Math.log10(v) : v));
    if (!known.length) return {};
    let [low, high] = [Infinity, -Infinity];
    for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
    const least = log ? 1 : Math.max(Math.abs(low), Math.abs(high)) / 2 || 1;
    const space = Math.max(0.05 * (high - low), (least - (high - low)) / 2);
    const foot = log && all.flat().includes(0) ? 0.5 : 0;
    return { range: [low - space - foot, high + space] };
  }

  function draw(figure) {
    const chart = charts[Number(figure.dataset.chart)];
    const slider = figure.querySelector(".moment");
    const moments = Object.entries(chart.frames);
    const [name, figures] = slider ? moments[Number(slider.value)] : ["", null];
    const lines = figures ? chart.lines.map((line, i) => ({ ...line, y: figures[i] })) : chart.lines;
    if (slider) figure.querySelector("output").textContent = name;
    const log = figure.querySelector(".scale")?.getAttribute("aria-pressed") === "true";
    const measured = new Set(lines.filter((line) => !line.bound && models.get(line.model).shown).map((line) => line.model));
    const style = theme(), ink = style.getPropertyValue("--ink").trim();
    const asMap = chart.kind === "lines" && measured.size > MOST_LINES;
    const all = moments.length ? moments.map(([, frame]) => frame.flat()) : lines.filter((line) => models.get(line.model).shown).map((line) => line.y);
    const plot = figure.querySelector(".plot");
    figure.classList.toggle("map", asMap);
    const at = lines.flatMap((line) => line.x), span = Math.max(...at) - Math.min(...at);
    const counted = chart.kind !== "points" && !chart.log_x && at.every(Number.isInteger) ? { tick0: 0, dtick: Math.max(1, Math.ceil(span / 8)) } : {};
    plot.style.height = asMap ? `${Math.max(22, 6 + 1.3 * measured.size)}rem` : "";
    const layout = {
      margin: { l: 8, r: 8, t: 8, b: 8 }, showlegend: false, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 13 },
      ...(printing() ? { width: plot.clientWidth, height: plot.clientHeight, font: { color: ink, size: 9 } } : {}),
      xaxis: { ...axis(text(chart.x), chart.log_x), ...counted },
      yaxis: asMap ? { automargin: true, autorange: "reversed" } : { ...axis(text(chart.y), log), ...(chart.kind === "lines" ? range(all, log) : {}) },
      shapes: chart.events.map(([at]) => ({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: ink, dash: "dash", width: 1 } })),
      annotations: chart.events.map(([at, word]) => ({ x: chart.log_x ? Math.log10(at) : at, yref: "paper", y: 1, text: text(word), textangle: -90, showarrow: false, xanchor: at <= Math.min(...lines.flatMap((line) => line.x)) ? "left" : "right", yanchor: "top" })),
    };
    const traces = asMap ? mapTraces : chart.kind === "bars" ? barTraces : chart.kind === "points" ? pointTraces : lineTraces;
    return Plotly.react(plot, traces(chart, lines, log), layout, { responsive: true, displayModeBar: false });
  }
  let drawable = true;
  try {
    if (charts.length) await unpack();
  } catch (error) {
    drawable = false;
    const trouble = document.getElementById("trouble");
    trouble.textContent = `No chart can be drawn in this browser (${error.message}); the tables are complete.`;
    trouble.hidden = false;
  }
  const figures = [...document.querySelectorAll("figure.chart")];
  const drawn = new Set();
  const ready = (figure) => drawable && !figure.closest("details:not([open])");
  function redraw() {
    return Promise.all(figures.filter(ready).map((figure) => draw(figure).then(() => drawn.add(figure)))).then(() => { root.dataset.drawn = drawn.size; });
  }

  // choices of models: a swatch with its mark, a name, a box that hides it everywhere
  const box = document.getElementById("models"), choices = document.getElementById("choices");
  const DASH = { solid: "", dash: "6 3", dot: "2 3", dashdot: "6 3 2 3", longdash: "10 3", longdashdot: "10 3 2 3" };
  const MARK = {
    circle: "M10 5a4 4 0 1 0 8 0a4 4 0 1 0-8 0", square: "M10 1h8v8h-8z", diamond: "M14 0l5 5-5 5-5-5z", "triangle-up": "M14 0l5 9h-10z",
    "triangle-down": "M14 10l5-9h-10z", cross: "M12 0h4v3h3v4h-3v3h-4v-3h-3v-4h3z", x: "M10 0l4 3 4-3 1 1-3 4 3 4-1 1-4-3-4 3-1-1 3-4-3-4z",
    star: "M14 0l1.5 3.5 3.5.2-2.7 2.4.9 3.7-3.2-2-3.2 2 .9-3.7-2.7-2.4 3.5-.2z",
  };
  for (const [name, look] of models) {
    const label = document.createElement("label"), input = document.createElement("input");
    input.type = "checkbox";
    input.checked = true;
    input.addEventListener("change", () => { look.shown = input.checked; redraw(); });
    label.append(input);
    label.insertAdjacentHTML("beforeend", `<svg width="28" height="10" aria-hidden="true"><line x1="0" y1="5" x2="28" y2="5" stroke="${look.colour}" stroke-width="3" stroke-dasharray="${DASH[look.dash]}"/><path d="${MARK[look.symbol]}" fill="${look.colour}"/></svg>`);
    label.append(name === "" ? "this" : name);
    choices.append(label);
  }
  box.hidden = models.size < 2;
  const setAll = (shown) => () => {
    for (const look of models.values()) look.shown = shown;
    for (const input of choices.querySelectorAll("input")) input.checked = shown;
    redraw();
  };
  document.getElementById("all").addEventListener("click", setAll(true));
  document.getElementById("none").addEventListener("click", setAll(false));

  for (const figure of figures) {
    figure.querySelector(".scale")?.addEventListener("click", (event) => {
      event.target.setAttribute("aria-pressed", String(event.target.getAttribute("aria-pressed") !== "true"));
      if (drawable) draw(figure);
    });
    figure.querySelector(".moment")?.addEventListener("input", () => drawable && draw(figure));
  }
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => { fit(); redraw(); });

  // sorting: numbers by value, empty cells last; the parts of a table that was split are sorted alike
  const rank = (cell) => {
    if (cell.dataset.v !== undefined) return [0, cell.dataset.v === "inf" ? Infinity : cell.dataset.v === "-inf" ? -Infinity : Number(cell.dataset.v)];
    return cell.textContent === "–" ? [2, ""] : [1, cell.textContent];
  };
  function sort(table, column, up) {
    for (const head of table.tHead.rows[0].cells) head.setAttribute("aria-sort", head.cellIndex === column ? (up ? "ascending" : "descending") : "none");
    const rows = [...table.tBodies[0].rows].map((row) => [rank(row.cells[column]), row]);
    rows.sort(([[a, x]], [[b, y]]) => a - b || (x === y ? 0 : typeof x === "number" ? (x < y ? -1 : 1) * (up ? 1 : -1) : x.localeCompare(y, undefined, { numeric: true }) * (up ? 1 : -1)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }
  const originals = [...document.querySelectorAll("table")];
  for (const table of originals) {
    [...table.tHead.rows[0].cells].forEach((head, column) => { head.dataset.column = column; });
    table.closest(".sheet").addEventListener("click", (event) => {
      const head = event.target.closest("th");
      if (!head) return;
      const column = Number(head.dataset.column), split = table.hidden;
      sort(table, column, head.getAttribute("aria-sort") !== "ascending");
      if (!split) return;
      whole(table);
      const parts = continued(table);
      parts.flatMap((part) => [...part.querySelectorAll("th")]).find((each) => Number(each.dataset.column) === column).firstElementChild.focus();
    });
  }

  document.getElementById("download").addEventListener("click", () => {
    const results = read("results"), names = Object.keys(results);
    const kept = names.length === 1 ? results[names[0]] : results;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(kept, null, 1) + "\n"], { type: "application/json" }));
    link.download = names.length === 1 ? `${kept.command}.json` : "results.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  const theming = document.getElementById("theme");
  function setTheme(dark) {
    root.dataset.theme = dark ? "dark" : "light";
    root.style.colorScheme = dark ? "dark" : "light";
    theming.setAttribute("aria-pressed", String(dark));
    return redraw();
  }
  theming.addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));

  // a table that is wider than its room goes on below with its first column again
  function whole(table) {
    table.hidden = false;
    for (const part of table.parentElement.querySelectorAll("table[data-part]")) part.remove();
  }
  function continued(table) {
    const room = table.parentElement.clientWidth;
    if (table.scrollWidth <= room && table.offsetWidth <= room) return [];
    const widths = [...table.tHead.rows[0].cells].map((cell) => cell.offsetWidth);
    const parts = [];
    let used = Infinity;
    widths.forEach((width, column) => {
      if (column === 0) return;
      if (used + width > room) {
        parts.push([0]);
        used = widths[0];
      }
      parts.at(-1).push(column);
      used += width;
    });
    if (parts.length < 2) return [];
    const copies = parts.map((columns) => {
      const copy = table.cloneNode(true);
      copy.dataset.part = "";
      for (const row of copy.rows) [...row.cells].forEach((cell, column) => { if (!columns.includes(column)) cell.remove(); });
      return copy;
    });
    copies.slice(1).forEach((copy) => copy.caption?.remove());
    table.after(...copies);
    table.hidden = true;
    return copies;
  }
  function fit() {
    for (const table of originals.filter((each) => each.closest("details:not([open])") === null)) {
      whole(table);
      continued(table);
    }
  }
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(fit, 100); });

  // on paper: light, nothing folded, each picture as wide as there is room
  let undo = [];
  addEventListener("beforeprint", () => {
    const dark = root.dataset.theme === "dark", folded = [...document.querySelectorAll("details:not([open])")];
    root.classList.add("printing");
    for (const details of folded) details.open = true;
    setTheme(false);
    fit();
    undo = [() => {
      root.classList.remove("printing");
      for (const details of folded) details.open = false;
      fit();
      setTheme(dark).then(() => { for (const figure of figures.filter(ready)) Plotly.Plots.resize(figure.querySelector(".plot")); });
    }];
  });
  addEventListener("afterprint", () => { for (const each of undo.splice(0)) each(); });
  fit();
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
})();
