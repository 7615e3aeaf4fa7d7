"use strict";
// The page is complete without this script; it adds values on hover, touch and arrow keys, copying, the toggle, and folding for print.
(() => {
  const tip = document.getElementById("tip");

  function showTip(lines, x, y) {
    tip.replaceChildren(...lines.map(({ text, as }) => {
      const line = document.createElement(as || "div");
      line.textContent = text;
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
    return lines;
  }

  function against(ratio) {
    if (ratio >= 2) return ratio.toPrecision(2) * 1 + " times the base";
    const percent = 100 * (ratio - 1);
    return (percent < 0 ? "−" : "+") + Math.abs(percent).toFixed(Math.abs(percent) < 10 ? 1 : 0) + "%";
  }

  // What is pointed at in a drawing, or chosen by arrow keys, says its values. `near` finds it at a place, `beside` by a
  // step across and down from the last one, `mark` shows which it is and returns what is said of it and where.
  function speaking(svg, { near, beside, mark, unmark }) {
    let current = null;
    function choose(found, x, y) {
      unmark(current);
      current = found ?? null;
      if (current === null) return hideTip();
      const { lines, box } = mark(current);
      showTip(lines, x ?? box.right, y ?? box.bottom);
    }
    const point = (event) => choose(near(event.clientX, event.clientY), event.clientX, event.clientY);
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") choose(null); });
    svg.addEventListener("blur", () => choose(null));
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return choose(null);
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const next = beside(current, ...move);
      if (next !== undefined) choose(next);
    });
  }

  for (const drawing of document.querySelectorAll("[data-cells]")) {
    const svg = drawing.querySelector("svg");
    const here = svg.querySelector(".here");
    const { left, top, w, h, across, down } = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
    let cells = null, byPlace = null;
    function at(column, row) {
      cells ??= JSON.parse(document.getElementById(drawing.dataset.cells).textContent);
      byPlace ??= new Map(cells.at.map((place, index) => [place, index]));
      const place = row * across + column;
      return column >= 0 && row >= 0 && column < across && row < down && byPlace.has(place) ? place : undefined;
    }
    speaking(svg, {
      near(x, y) {
        const inside = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM().inverse());
        return at(Math.floor((inside.x - left) / w), Math.floor((inside.y - top) / h));
      },
      beside(place, right, below) {
        if (place !== null) return at((place % across) + right, Math.floor(place / across) + below);
        at(0, 0);
        return cells.at[0];
      },
      mark(place) {
        here.setAttribute("x", left + (place % across) * w);
        here.setAttribute("y", top + Math.floor(place / across) * h);
        here.setAttribute("visibility", "visible");
        return { lines: describe(cells, byPlace.get(place)), box: here.getBoundingClientRect() };
      },
      unmark: () => here.setAttribute("visibility", "hidden"),
    });
  }

  for (const svg of document.querySelectorAll(".chart .drawing svg")) {
    // The browser's own titles come late, and neither to touch nor to the keyboard.
    const marks = [...svg.querySelectorAll(".mark")];
    const tips = new Map(marks.map((one) => [one, one.querySelector("title").textContent]));
    for (const one of marks) one.replaceChildren();
    if (!marks.length) continue;
    speaking(svg, {
      near(x, y) {
        let best = null, least = 30 * 30;
        for (const one of marks) {
          const box = one.getBoundingClientRect();
          const far = (box.x + box.width / 2 - x) ** 2 + (box.y + box.height / 2 - y) ** 2;
          if (far < least) [best, least] = [one, far];
        }
        return best;
      },
      beside: (one, right, below) => marks[one === null ? 0 : marks.indexOf(one) + right + below],
      mark(one) {
        one.classList.add("at");
        return { lines: [{ text: tips.get(one) }], box: one.getBoundingClientRect() };
      },
      unmark: (one) => one?.classList.remove("at"),
    });
  }
  addEventListener("scroll", hideTip, { passive: true });

  for (const code of document.querySelectorAll("figure.code")) {
    const copy = document.createElement("button");
    const label = (text) => { copy.textContent = text; };
    copy.type = "button";
    copy.className = "copy";
    copy.setAttribute("aria-description", code.querySelector("figcaption").textContent);
    copy.addEventListener("click", async () => {
      const text = code.querySelector("code");
      try {
        await navigator.clipboard.writeText(text.textContent);
        label("Copied");
      } catch {  // where the browser does not let pages do that
        getSelection().selectAllChildren(text);
        label("Selected");
      }
      setTimeout(label, 1500, "Copy");
    });
    label("Copy");
    code.append(copy);
  }

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
