"use strict";
(async () => {
  const root = document.documentElement;

  // what a page is made of is packed; without `DecompressionStream`, in a browser of before 2023, the tables still stand
  async function unpacked(id) {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  async function loadLibrary() {
    const script = document.createElement("script");
    script.textContent = await unpacked("library");
    document.head.append(script);
  }

  const figures = [...document.querySelectorAll("figure.chart")];
  let charts = [], looks = new Map(), ramps = {};
  let drawable = figures.length > 0;
  try {
    if (drawable) {
      const drawing = JSON.parse(await unpacked("charts"));
      charts = drawing.charts;
      ramps = drawing.ramps;
      looks = new Map(drawing.looks.map((look) => [look.name, { ...look, shown: true }]));
      await loadLibrary();
    }
  } catch (error) {
    drawable = false;
    const trouble = document.getElementById("trouble");
    trouble.textContent = `No chart can be drawn in this browser (${error.message}); the tables are complete.`;
    trouble.hidden = false;
  }

  const zooms = new Map();  // by figure, the part of its chart to see
  const drawn = new Set();
  const isVisible = (figure) => figure.closest("details:not([open])") === null;

  function draw(figure) {
    const chart = charts[Number(figure.dataset.chart)];
    let lines = chart.lines;
    const slider = figure.querySelector(".moment");
    if (slider) {
      const [moment, frame] = Object.entries(chart.frames)[Number(slider.value)];
      lines = lines.map((line, i) => ({ ...line, y: frame[i] }));
      figure.querySelector("output").textContent = moment;
    }
    const view = {
      lines: lines.filter((line) => looks.get(line.model).shown),
      log: figure.querySelector(".scale")?.getAttribute("aria-pressed") === "true",
      looks, ramps,
      zoom: zooms.get(figure),
      onZoom: (part) => {
        if (part) zooms.set(figure, part);
        else zooms.delete(figure);
        draw(figure);
      },
    };
    const plot = figure.querySelector(".plot"), asMap = isMap(chart, view);
    figure.classList.toggle("map", asMap);
    plot.style.height = asMap ? `${Math.max(16, 6 + 1.3 * view.lines.length)}rem` : "";
    drawChart(plot, chart, view);
    drawn.add(figure);
  }
  function redraw() {
    if (drawable) figures.filter(isVisible).forEach(draw);
    root.dataset.drawn = drawn.size;
  }

  // where there are several models, a box for each hides it in all charts
  const models = [...looks.values()].filter((look) => !look.local);
  const box = document.getElementById("models"), choices = document.getElementById("choices");
  for (const look of drawable && models.length > 1 ? models : []) {
    const text = document.createElement("label"), input = document.createElement("input");
    input.type = "checkbox";
    input.checked = true;
    input.addEventListener("change", () => { look.shown = input.checked; redraw(); });
    text.append(input, swatch(look, false), look.name === "" ? "this" : look.name);
    choices.append(text);
    box.hidden = false;
  }
  function setAll(shown) {
    for (const look of models) look.shown = shown;
    for (const input of choices.querySelectorAll("input")) input.checked = shown;
    redraw();
  }
  document.getElementById("all").addEventListener("click", () => setAll(true));
  document.getElementById("none").addEventListener("click", () => setAll(false));

  for (const figure of drawable ? figures : []) {
    const scale = figure.querySelector(".scale");
    scale?.addEventListener("click", () => {
      scale.setAttribute("aria-pressed", String(scale.getAttribute("aria-pressed") !== "true"));
      zooms.delete(figure);
      draw(figure);
    });
    figure.querySelector(".moment")?.addEventListener("input", () => draw(figure));
    addKey(figure, charts[Number(figure.dataset.chart)]);
  }
  // lines that are no models have their names below their own chart
  function addKey(figure, chart) {
    const names = new Map(chart.lines.filter((line) => line.local).map((line) => [line.model, line.bound]));
    if (!names.size || names.size > MOST_LINES) return;
    const key = document.createElement("p");
    key.className = "key";
    for (const [name, isBound] of names) {
      const text = document.createElement("span");
      text.append(swatch(looks.get(name), isBound), name);
      key.append(text);
    }
    figure.append(key);
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

  const download = document.getElementById("download");
  download.addEventListener("click", async () => {
    const text = JSON.stringify(JSON.parse(await unpacked("results")), null, 1);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "application/json" }));
    link.download = download.dataset.name;
    link.click();
    URL.revokeObjectURL(link.href);
  });

  const theming = document.getElementById("theme");
  function setTheme(dark) {
    root.dataset.theme = dark ? "dark" : "light";
    root.style.colorScheme = dark ? "dark" : "light";
    theming.setAttribute("aria-pressed", String(dark));
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
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { fit(); redraw(); }, 100); });

  // on paper: light, nothing folded, each picture as wide as there is room
  let undo = [];
  addEventListener("beforeprint", () => {
    const dark = root.dataset.theme === "dark", folded = [...document.querySelectorAll("details:not([open])")];
    root.classList.add("printing");
    for (const details of folded) details.open = true;
    setTheme(false);
    fit();
    redraw();
    undo = [() => {
      root.classList.remove("printing");
      for (const details of folded) details.open = false;
      setTheme(dark);
      fit();
      redraw();
    }];
  });
  addEventListener("afterprint", () => { for (const each of undo.splice(0)) each(); });
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  fit();
  redraw();
})();
