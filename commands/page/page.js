"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // The map: a cell tells of itself when it is pointed at, or chosen with the arrow keys.
  const tell = (map, cell) => {
    for (const other of all(".cell.on", map)) other.classList.remove("on");
    cell.classList.add("on");
    map.querySelector(".told").textContent = cell.querySelector("title").textContent;
  };
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  for (const map of all(".map")) {
    const cells = all(".cell", map);
    const at = (layer, row) => cells.find((c) => +c.dataset.layer === layer && +c.dataset.row === row);
    const layers = Math.max(0, ...cells.map((c) => +c.dataset.layer));
    const rows = Math.max(0, ...cells.map((c) => +c.dataset.row));
    map.addEventListener("pointerover", (event) => {
      const cell = event.target.closest(".cell");
      if (cell) tell(map, cell);
    });
    map.querySelector(".bands").addEventListener("keydown", (event) => {
      const move = step[event.key];
      if (!move) return;
      event.preventDefault();
      const now = map.querySelector(".cell.on");
      if (!now) return void (cells.length && tell(map, cells[0]));
      let layer = +now.dataset.layer, row = +now.dataset.row, next = null;
      do {
        layer += move[0];
        row += move[1];
        next = at(layer, row);
      } while (!next && layer >= 0 && row >= 0 && layer <= layers && row <= rows);
      if (next) tell(map, next);
    });
  }

  // A sweep: two sliders over points that were solved, nothing between them.
  const sliders = all("input[data-axis]");
  const choose = () => {
    const key = sliders.map((slider) => slider.value).join("-");
    for (const slider of sliders) {
      const label = slider.dataset.labels.split("|")[+slider.value];
      slider.nextElementSibling.value = label;
      slider.setAttribute("aria-valuetext", label);
    }
    for (const panel of all("[data-panel]")) panel.hidden = panel.dataset.panel !== key;
    for (const dot of all(".dot")) dot.classList.toggle("now", dot.dataset.key === key);
    for (const figure of all("[data-along]")) {
      figure.hidden = !figure.dataset.keys.split(" ").includes(key);
    }
  };
  for (const slider of sliders) slider.addEventListener("input", choose);
  for (const dot of all(".dot")) {
    dot.addEventListener("click", () => {
      const values = dot.dataset.key.split("-");
      sliders.forEach((slider, n) => { slider.value = values[n]; });
      choose();
    });
  }
  if (sliders.length) choose();

  // Copying, where a page from a file may not use the clipboard too.
  const copy = async (from) => {
    try {
      await navigator.clipboard.writeText(from.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(from);
      return document.execCommand("copy");
    }
  };
  for (const button of all("[data-copies]")) {
    button.addEventListener("click", async () => {
      const done = await copy(document.getElementById(button.dataset.copies));
      button.nextElementSibling.textContent = done ? "copied" : "selected: copy with Ctrl-C";
    });
  }

  // Escape puts a tooltip away until its word is reached again.
  for (const term of all(".term")) {
    term.addEventListener("keydown", (event) => event.key === "Escape" && term.classList.add("quiet"));
    for (const name of ["blur", "pointerleave"]) term.addEventListener(name, () => term.classList.remove("quiet"));
  }
})();
