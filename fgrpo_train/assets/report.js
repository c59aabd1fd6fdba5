"use strict";
// A crosshair in the line charts: the value of every curve at the step under the pointer.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

function curvesOf(svg) {
  const lines = [...svg.querySelectorAll("polyline[data-name]")];
  const compared = lines.filter((line) => line.classList.contains("mean")).length > 1;
  return lines
    .filter((line) => !(compared && line.classList.contains("each")))
    .map((line) => ({
      name: line.dataset.name,
      classes: line.getAttribute("class"),
      xs: line.dataset.x.split(" "),
      ys: line.dataset.y.split(" "),
      at: [...line.points].map((point) => point.x),
    }));
}

function nearest(at, x) {
  let best = 0;
  at.forEach((value, i) => {
    if (Math.abs(value - x) < Math.abs(at[best] - x)) best = i;
  });
  return best;
}

for (const svg of document.querySelectorAll("svg.chart")) {
  const curves = curvesOf(svg);
  const label = [...svg.querySelectorAll("text")].pop().textContent;
  const height = svg.viewBox.baseVal.height;
  const cursor = svg.querySelector("line").cloneNode();
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 12);
  cursor.setAttribute("y2", height - 34);
  svg.querySelectorAll("title").forEach((title) => title.remove());

  svg.addEventListener("pointermove", (event) => {
    const pointer = new DOMPoint(event.clientX, event.clientY);
    const x = pointer.matrixTransform(svg.getScreenCTM().inverse()).x;
    const found = curves.map((curve) => ({ curve, i: nearest(curve.at, x) }));
    const distance = ({ curve, i }) => Math.abs(curve.at[i] - x);
    const first = found.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const at = first.curve.at[first.i];
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    svg.append(cursor);
    tip.replaceChildren(`${label} ${first.curve.xs[first.i]}`);
    for (const { curve, i } of found) {
      if (Math.abs(curve.at[i] - at) > 3) continue;
      const row = document.createElement("div");
      const mark = document.createElement("i");
      mark.setAttribute("class", curve.classes);
      const value = document.createElement("b");
      value.textContent = curve.ys[i];
      row.append(mark, `${curve.name} `, value);
      tip.append(row);
    }
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.remove();
  });
}

// The table of completions: search, and sorting by a click on a heading.
const samples = document.getElementById("samples");
if (samples) {
  const body = samples.querySelector("tbody");
  const tools = samples.querySelector(".tools");
  const search = tools.querySelector("input");
  tools.hidden = false;
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    let shown = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      shown += !row.hidden;
    }
    tools.querySelector("output").textContent = shown;
  });

  const headings = [...samples.querySelectorAll("th")];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent.trim();
      const compare = (a, b) => {
        const [x, y] = [Number(text(a)), Number(text(b))];
        const numbers = !Number.isNaN(x) && !Number.isNaN(y);
        return numbers ? x - y : text(a).localeCompare(text(b));
      };
      const rows = [...body.rows].sort(compare);
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}
