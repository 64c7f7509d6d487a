// Small pieces that all pages use: making elements, showing numbers. No page knows another.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function show(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.001 ? value.toExponential(1) : value.toFixed(digits);
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)}\u00a0%`);

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const place = value > 0 ? Math.min(units.length - 1, Math.floor(Math.log10(value) / 3)) : 0;
  return `${(value / 1000 ** place).toFixed(place ? 1 : 0)} ${units[place]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

export function tile(name) {
  const value = el("div", { class: "value" }, "–");
  const note = el("div", { class: "note" });
  const element = el("div", { class: "tile" }, el("div", { class: "name" }, name), value, note);
  return { element, set: (text, more = "") => { value.textContent = text; note.textContent = more; } };
}

// A table whose body is replaced only when its text changed, so that the focus stays where it is.
export function table(caption, columns, empty = "") {
  const body = el("tbody");
  const heads = columns.map((column) => el("th", { scope: "col", class: column.num ? "num" : null }, column.title));
  const element = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", { "aria-label": caption }, el("thead", {}, el("tr", {}, heads)), body));
  let last = null;
  const set = (rows) => {
    const key = JSON.stringify(rows.map((row) => [row.class, row.cells.map((cell) => (cell instanceof Node ? cell.outerHTML : cell))]));
    if (key === last) return;
    last = key;
    if (!rows.length && empty) body.replaceChildren(el("tr", {}, el("td", { class: "soft", colspan: columns.length }, empty)));
    else body.replaceChildren(...rows.map((row) => el("tr", { class: row.class || null },
      row.cells.map((cell, place) => el("td", { class: columns[place].num ? "num" : null }, cell ?? "–")))));
  };
  return { element, set };
}

export async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail || `the server answered ${answer.status}`);
  return answer.headers.get("content-type").includes("json") ? answer.json() : answer.text();
}
