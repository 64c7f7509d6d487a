// What a person should look at now.
import { el } from "../dom.js";

export const title = "Alerts";

export function open(root) {
  const list = el("div", { id: "alerts", "aria-live": "polite" });
  root.append(el("h1", {}, title), list);
  let last = null;
  return {
    onState(state) {
      const key = JSON.stringify(state.alerts.map((alert) => [alert.name, alert.text]));
      if (key === last) return;
      last = key;
      list.replaceChildren(...(state.alerts.length
        ? state.alerts.map((alert) => el("p", { class: `card alert ${alert.level}` }, el("strong", {}, alert.level === "critical" ? "Critical: " : "Warning: "), alert.text))
        : [el("p", { class: "card good" }, state.run.is_alive ? "Nothing to look at." : "The run has ended.")]));
    },
  };
}
