"use strict";
// The page is complete without this script; it adds values on hover, touch and arrow keys, the toggle, and folding for print.
(() => {
  const tip = document.getElementById("tip");

  function showTip(lines, x, y) {
    tip.replaceChildren(...lines.map(({ text, as, name }) => {
      const line = document.createElement(as || "div");
      line.textContent = text;
      if (name) line.className = name;
      return line;
    }));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    const top = y + 16 + box.height > innerHeight ? y - 12 - box.height : y + 16;
    tip.style.left = Math.max(8, Math.min(left, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(8, top) + "px";
  }

  function hideTip() {
    tip.hidden = true;
  }

  // A program is written for layers from 0: move it to where the stretch begins.
  const shifted = (program, first) => program.replace(/([AF])(\d+)/g, (_, kind, layer) => kind + (Number(layer) + first));

  function describe(cells, index) {
    const place = cells.at[index];
    const row = cells.rows[Math.floor(place / cells.columns.length)];
    const column = cells.columns[place % cells.columns.length];
    const pattern = cells.one && row === column ? cells.one : cells.title;
    const title = pattern.replace(/\{(row|column)\}/g, (_, name) => (name === "row" ? row : column));
    const lines = [{ as: "b", text: title.charAt(0).toUpperCase() + title.slice(1) }];
    for (const [number, field] of cells.fields.entries()) {
      const value = field.values[index];
      if (value === null) continue;
      let text = field.label + " " + value.toLocaleString("en");
      if (number === 0 && cells.base && typeof value === "number") text += " (" + against(value / cells.base) + ")";
      if (field.low && field.low[index] !== null && field.high[index] !== null) {
        text += ", 95% " + field.low[index].toLocaleString("en") + " to " + field.high[index].toLocaleString("en");
      }
      lines.push({ text });
    }
    const tokens = Array.isArray(cells.tokens) ? cells.tokens[index] : cells.tokens;
    if (tokens) lines.push({ text: "on " + tokens.toLocaleString("en") + " tokens" });
    if (cells.notes) lines.push({ text: cells.notes[index] });
    if (cells.programs) {
      const length = Number(column) - Number(row) + 1;
      const program = cells.programs[length - (length % cells.group)];
      if (program) lines.push({ text: shifted(program, Number(row)), name: "program" });
      if (program === "") lines.push({ text: "left out", name: "program" });
    }
    return lines;
  }

  function against(ratio) {
    if (ratio >= 2) return ratio.toPrecision(2) * 1 + " times the base";
    const percent = 100 * (ratio - 1);
    return (percent < 0 ? "−" : "+") + Math.abs(percent).toFixed(Math.abs(percent) < 10 ? 1 : 0) + "%";
  }

  for (const drawing of document.querySelectorAll("[data-cells]")) {
    const svg = drawing.querySelector("svg");
    const here = svg.querySelector(".here");
    const { left, top, w, h, across, down } = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
    let cells = null, byPlace = null, current = -1;

    function load() {
      if (cells) return;
      cells = JSON.parse(document.getElementById(drawing.dataset.cells).textContent);
      byPlace = new Map(cells.at.map((place, index) => [place, index]));
    }

    function select(row, column, x, y) {
      load();
      const index = byPlace.get(row * across + column);
      if (index === undefined || row < 0 || column < 0 || row >= down || column >= across) return leave();
      current = row * across + column;
      here.setAttribute("x", left + column * w);
      here.setAttribute("y", top + row * h);
      here.setAttribute("visibility", "visible");
      if (x === undefined) {
        const box = here.getBoundingClientRect();
        x = box.right;
        y = box.bottom;
      }
      showTip(describe(cells, index), x, y);
    }

    function leave() {
      here.setAttribute("visibility", "hidden");
      hideTip();
    }

    function point(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      select(Math.floor((at.y - top) / h), Math.floor((at.x - left) / w), event.clientX, event.clientY);
    }

    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return leave();
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      load();
      if (current < 0) current = cells.at[0];
      else {
        const row = Math.floor(current / across) + move[0], column = (current % across) + move[1];
        if (!byPlace.has(row * across + column) || column < 0 || column >= across) return;
        current = row * across + column;
      }
      select(Math.floor(current / across), current % across);
    });
  }

  // Points of charts: the browser's own slow titles become the page's, and reach touch and the keyboard.
  for (const mark of document.querySelectorAll(".chart .mark > title")) {
    const owner = mark.parentElement;
    owner.dataset.tip = mark.textContent;
    mark.remove();
  }
  for (const drawing of document.querySelectorAll(".chart .drawing svg")) {
    let near = null;
    function choose(mark, x, y) {
      if (near) near.classList.remove("at");
      near = mark;
      if (!mark) return hideTip();
      mark.classList.add("at");
      const box = mark.getBoundingClientRect();
      showTip([{ text: mark.dataset.tip }], x ?? box.right, y ?? box.bottom);
    }
    function nearest(event) {
      let best = null, least = 30 * 30;
      for (const mark of drawing.querySelectorAll("[data-tip]")) {
        const box = mark.getBoundingClientRect();
        const far = (box.x + box.width / 2 - event.clientX) ** 2 + (box.y + box.height / 2 - event.clientY) ** 2;
        if (far < least) [best, least] = [mark, far];
      }
      choose(best, event.clientX, event.clientY);
    }
    drawing.addEventListener("pointermove", nearest);
    drawing.addEventListener("pointerdown", nearest);
    drawing.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") choose(null); });
    drawing.setAttribute("tabindex", "0");
    drawing.addEventListener("blur", () => choose(null));
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return choose(null);
      if (!step) return;
      event.preventDefault();
      const marks = [...drawing.querySelectorAll("[data-tip]")];
      const place = near ? marks.indexOf(near) + step : 0;
      if (marks[place]) choose(marks[place]);
    });
  }
  addEventListener("scroll", hideTip, { passive: true });

  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.setAttribute("aria-label", "Switch between light and dark");
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
  dark.addEventListener("change", label);
  label();

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open]):not(.screen-only)")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
})();
