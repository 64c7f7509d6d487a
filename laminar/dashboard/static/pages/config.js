// The run's settings, defaults filled in, secrets starred.
import { el, get } from "../dom.js";

export const title = "Config";

export function open(root) {
  const text = el("pre", { tabindex: 0, "aria-label": "Settings" }, "…");
  root.append(el("h1", {}, title), el("div", { class: "card" }, text));
  get("/api/config").then((found) => { text.textContent = found; }, (error) => { text.textContent = String(error.message); });
  return {};
}
