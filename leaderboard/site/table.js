// Lets a reader sort tables by a column and filter their rows. Every page reads well without it.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies].filter((body) => !body.classList.contains("line"));
  const all = bodies.flatMap((body) => [...body.rows]);
  const heads = [...table.tHead.rows[0].cells];

  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent.trim();
    return text === "" || isNaN(text) ? text : Number(text);
  };
  const before = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is missing stands last, either way
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
    return typeof a === "number" ? -1 : 1;
  };

  for (const [column, head] of heads.entries()) {
    if (head.dataset.sort === undefined) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      for (const body of bodies) {
        const rows = [...body.rows].map((row) => [value(row, column), row]);
        rows.sort(([a], [b]) => (a === "" || b === "" ? before(a, b) : sign * before(a, b)));
        body.append(...rows.map(([, row]) => row));
      }
    });
  }

  if (!table.classList.contains("filtered") || all.length < 3) continue;
  const label = document.createElement("label");
  const input = document.createElement("input");
  const count = document.createElement("output");
  label.className = "filter";
  label.append("Filter rows ", input);
  input.type = "search";
  count.className = "filter";
  table.parentElement.before(label, count);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of all) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${all.length}` : "";
  });
}
