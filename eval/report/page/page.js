"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort by this column";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      const numeric = header.classList.contains("number");
      const key = (row) => {
        const text = row.cells[column].dataset.sort;
        return text === undefined || !numeric ? text : Number(text);
      };
      const compare = (a, b) =>
        numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row), row]);
      const missing = (value) => value === undefined || Number.isNaN(value);
      rows.sort(([a], [b]) => {
        // What has no value goes last, in either direction.
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        return up ? compare(a, b) : compare(b, a);
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      // Without leave to write there, the text is selected for the reader to copy.
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
  });
}
// Paper cannot be opened.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
