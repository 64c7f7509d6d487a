// What every role did over the last minutes: a Gantt chart, and the same in figures.
import { el, get, percent, table } from "../dom.js";
import { colour } from "../charts.js";

export const title = "Timeline";

const STATES = ["decode", "prefill", "train", "wait", "environment", "swap", "drain", "publish", "checkpoint", "spool", "idle", "idle_staleness", "idle_bytes", "idle_paused", "start", "restart", "restore"];
const MEANINGS = { decode: "the engine samples", prefill: "the engine reads what was given", train: "forward, backward, update", wait: "trainer waits for a batch", environment: "episodes are open, none at the engine",
  swap: "takes new weights", drain: "ends what is open before a swap", publish: "hands weights out", checkpoint: "saves", spool: "writes the step down",
  idle: "nothing admitted", idle_staleness: "held back by the bound", idle_bytes: "held back by the buffer's bytes", idle_paused: "paused by request",
  serve: "relay hands weights on", watch: "manager looks at loads", plan: "manager plans moves", start: "is starting", restart: "its engine is restarted", restore: "replays steps" };
const TINTS = { decode: 0, train: 2, wait: 1, environment: 5, swap: 3, drain: 4, publish: 6, checkpoint: 7, spool: 7, start: 7, restart: 7, restore: 7 };
const DARK = 0.18;
/* Relative luminance (WCAG 2) of a colour such as #0072b2: whether black or white text can be read on it. */
function isDark(hex) {
  const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16) / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < DARK;
}
const tint = (state) => (state in TINTS ? colour(TINTS[state]) : getComputedStyle(document.documentElement).getPropertyValue("--line").trim());

export function open(root) {
  const span = el("select", {}, [[30, "30 s"], [120, "2 min"], [600, "10 min"]].map(([value, text]) => el("option", { value, selected: value === 120 }, text)));
  const canvas = el("canvas", { role: "img", "aria-label": "States of every role over time; the table below has the shares" });
  const legend = el("div", { class: "legend" });
  const shares = table("Shares of the time in each state", [{ title: "role" }, { title: "now" }, { title: "where its time went, last two minutes" }]);
  root.append(el("h1", {}, title), el("div", { class: "card" }, el("div", { class: "row" }, el("label", {}, "Show the last", span)), legend, el("div", { class: "scroll" }, canvas)),
    el("h2", {}, "Where time goes"), el("div", { class: "card" }, shares.element));
  let data = null, timer = null;

  function draw() {
    if (!data) return;
    const names = Object.keys(data.roles), row = 30, left = 92, width = Math.max(320, canvas.parentElement.clientWidth), height = names.length * row + 26, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d"), scale = (width - left - 8) / (data.end - data.begin), style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text"), grid = style.getPropertyValue("--grid");
    c.scale(ratio, ratio);
    c.font = "13px system-ui, 'DejaVu Sans', sans-serif";
    c.textBaseline = "middle";
    names.forEach((name, place) => {
      const top = place * row + 3;
      c.fillStyle = text; c.fillText(name, 4, top + row / 2 - 3);
      c.fillStyle = grid; c.fillRect(left, top, width - left - 8, row - 7);
      for (const [state, start, end] of data.roles[name]) {
        const x = left + (start - data.begin) * scale, wide = Math.max(1, (end - start) * scale);
        c.fillStyle = tint(state); c.fillRect(x, top, wide, row - 7);
        if (wide > 7.5 * state.length + 10) { c.fillStyle = isDark(tint(state)) ? "#fff" : "#000"; c.fillText(state, x + 5, top + row / 2 - 3); }
      }
    });
    c.fillStyle = text;
    const total = data.end - data.begin;
    const parts = width < 600 ? 2 : 4;
    for (let part = 0; part <= parts; part++) {
      const label = part === parts ? "now" : `−${Math.round(total * (1 - part / parts))} s`;
      c.textAlign = part === parts ? "right" : "left";
      c.fillText(label, left + (width - left - 8) * (part / parts), height - 10);
    }
  }
  async function load() {
    data = await get(`/api/timeline?seconds=${span.value}`).catch(() => data);
    const seen = new Set(data ? Object.values(data.roles).flat().map((one) => one[0]) : []);
    const key = [...seen].sort().join() + document.documentElement.dataset.theme;
    if (legend.dataset.key !== key) {
      legend.dataset.key = key;
      legend.replaceChildren(...[...STATES, ...[...seen].filter((state) => !STATES.includes(state))].filter((state) => seen.has(state)).map((state) => {
        const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
        swatch.style.background = tint(state);
        return el("span", {}, swatch, `${state}: ${MEANINGS[state] ?? state.replace("idle_", "idle, ")}`);
      }));
    }
    draw();
  }
  span.addEventListener("change", load);
  addEventListener("resize", draw);
  load();
  timer = setInterval(load, 2000);
  return {
    onState: (state) => shares.set(Object.entries(state.roles).map(([name, role]) => ({
      class: role.is_silent ? "dead" : "",
      cells: [name, role.is_silent ? `silent for ${Math.round(role.silent_seconds)} s` : role.state,
        Object.entries(role.shares).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]).map(([name_, share]) => `${name_} ${percent(share)}`).join(", ")],
    }))),
    onTheme: load,
    close: () => { clearInterval(timer); removeEventListener("resize", draw); },
  };
}
