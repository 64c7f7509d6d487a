// The frame: pages by the address's hash, the state by server-sent events, theme and control.
import { el, get } from "./dom.js";
import { closeAll, redrawAll } from "./charts.js";
import * as overview from "./pages/overview.js";
import * as timeline from "./pages/timeline.js";
import * as staleness from "./pages/staleness.js";
import * as rollouts from "./pages/rollouts.js";
import * as weights from "./pages/weights.js";
import * as trajectories from "./pages/trajectories.js";
import * as alerts from "./pages/alerts.js";
import * as config from "./pages/config.js";
import * as logs from "./pages/logs.js";

const pages = { overview, timeline, staleness, rollouts, weights, trajectories, alerts, config, logs };
const HISTORY_SECONDS = 2, LONG_HISTORY_SECONDS = 30;
const by = (id) => document.getElementById(id);
const frame = { state: null, page: null, name: "", history: null, asked: 0, seen: "" };

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const chosen = pages[name] ? name : "overview";
  const argument = decodeURIComponent(rest.join("/"));
  if (chosen !== frame.name || !frame.page?.show) {
    closeAll();
    frame.page?.close?.();
    frame.name = chosen; frame.history = null; frame.seen = "";
    by("main").replaceChildren();
    frame.page = pages[chosen].open(by("main"));
    document.title = `${pages[chosen].title} · Laminar`;
    for (const link of by("nav").children) {
      if (link.dataset.page !== chosen) { link.removeAttribute("aria-current"); continue; }
      link.setAttribute("aria-current", "page");
      by("nav").scrollLeft = link.offsetLeft - by("nav").clientWidth / 2;
    }
  }
  frame.page.show?.(argument);
  if (frame.state) tell(frame.state);
}

async function tell(state) {
  frame.state = state;
  showFrame(state);
  frame.page?.onState?.(state);
  const wait = (frame.history?.steps_per_point ?? 1) > 1 ? LONG_HISTORY_SECONDS : HISTORY_SECONDS;
  const there = `${state.step} ${state.num_marks} ${state.num_evaluations}`;
  if (!frame.page?.metrics || frame.seen === there || Date.now() - frame.asked < 1000 * wait && frame.history) return;
  frame.asked = Date.now(); frame.seen = there;
  const page = frame.page;
  try {
    const history = await get(`/api/history?names=${encodeURIComponent(page.metrics.join(","))}`);
    if (page !== frame.page) return;
    frame.history = history;
    page.onHistory(history, state);
  } catch (error) { frame.seen = ""; console.warn(String(error)); }
}

function showFrame(state) {
  by("run").textContent = state.run.id;
  const status = by("status");
  const paused = state.buffer.is_paused ? ", paused" : "";
  status.textContent = state.run.status + paused;
  status.className = `status ${state.run.is_alive ? (paused ? "warn" : "good") : ["finished", "stopped"].includes(state.run.status) ? "soft" : "bad"}`;
  const link = by("nav").querySelector('[data-page="alerts"]');
  const count = state.alerts.length;
  if (link.dataset.count !== String(count)) {
    link.dataset.count = String(count);
    link.replaceChildren("Alerts", count ? el("span", { class: "count" }, String(count)) : "");
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("laminar-theme", theme);
  by("theme").textContent = theme === "dark" ? "Light" : "Dark";
  by("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} theme`);
  redrawAll();
  frame.page?.onTheme?.();
}

function openControl() {
  const panel = by("control-panel"), said = el("p", { role: "status" });
  const token = el("input", { type: "password", autocomplete: "off", size: 34, value: sessionStorage.getItem("laminar-token") || "" });
  const order = async (verb, parameters = {}) => {
    sessionStorage.setItem("laminar-token", token.value);
    said.textContent = "asking…";
    const answer = await fetch("/api/control", {
      method: "POST", headers: { "content-type": "application/json", "x-laminar-token": token.value },
      body: JSON.stringify({ verb, arguments: parameters }),
    });
    const body = await answer.json();
    said.textContent = answer.ok ? body.text : typeof body.detail === "string" ? body.detail : "refused";
  };
  const button = (text, verb, parameters, question) => el("button", { type: "button", onclick: () => { if (!question || confirm(question)) order(verb, parameters); } }, text);
  const number = (key) => {
    const input = el("input", { type: "number", min: 1 });
    return el("div", { class: "row" }, el("label", {}, key, input), el("button", { type: "button", onclick: () => order("set", { key, value: input.value }) }, "Set"));
  };
  panel.replaceChildren(
    el("div", { class: "row" }, el("label", {}, "Run token (laminar dashboard RUN --token)", token),
      button("Pause rollouts", "pause"), button("Unpause", "unpause"),
      button("Stop after this step", "stop", { how: "drain" }, "Stop the run after this step?"),
      button("Stop at once", "stop", { how: "now" }, "Stop at once, without a checkpoint?")),
    el("div", { class: "row" }, number("staleness.max_staleness"), number("rollout.max_in_flight_groups")), said);
}

function begin() {
  by("nav").append(...Object.entries(pages).map(([name, page]) => el("a", { href: `#/${name}`, "data-page": name }, page.title)));
  setTheme(localStorage.getItem("laminar-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  by("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  by("control").addEventListener("click", () => {
    const panel = by("control-panel");
    panel.hidden = !panel.hidden;
    by("control").setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) openControl();
  });
  addEventListener("hashchange", () => { route(); by("main").focus({ preventScroll: true }); });
  route();
  const events = new EventSource("/api/events");
  events.addEventListener("state", (event) => tell(JSON.parse(event.data)));
  events.onerror = () => { by("status").textContent = "dashboard not reachable"; by("status").className = "status bad"; };
}

begin();
