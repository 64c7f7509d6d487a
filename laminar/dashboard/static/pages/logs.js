// The last lines of the roles' logs.
import { el, get } from "../dom.js";

export const title = "Logs";

export function open(root) {
  const role = el("select", {}, el("option", { value: "" }, "all roles"));
  const pattern = el("input", { type: "search" });
  const text = el("pre", { class: "log", tabindex: 0, "aria-label": "Log lines" }, "…");
  root.append(el("h1", {}, title), el("div", { class: "card" }, el("div", { class: "row" }, el("label", {}, "Role", role), el("label", {}, "Lines that contain", pattern))), el("div", { class: "card" }, text));
  let lines = [];
  const paint = () => {
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 30;
    const wanted = pattern.value.toLowerCase();
    text.textContent = lines.filter(([, line]) => line.toLowerCase().includes(wanted)).map(([name, line]) => (role.value ? line : `${name.padEnd(18)} ${line}`)).join("\n") || "no lines";
    if (atEnd) text.scrollTop = text.scrollHeight;
  };
  const load = async () => {
    try {
      const found = await get(`/api/logs?role=${encodeURIComponent(role.value)}`);
      lines = found.lines;
      if (role.options.length !== found.roles.length + 1) {
        const chosen = role.value;
        role.replaceChildren(el("option", { value: "" }, "all roles"), ...found.roles.map((name) => el("option", { value: name }, name)));
        role.value = chosen;
      }
      paint();
    } catch (error) { text.textContent = String(error.message); }
  };
  role.addEventListener("change", load);
  pattern.addEventListener("input", paint);
  load();
  const timer = setInterval(load, 2000);
  return { close: () => clearInterval(timer) };
}
