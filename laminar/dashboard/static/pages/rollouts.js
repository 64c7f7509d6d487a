// Each replica: alive or not, what it does, how full it is, which weights it holds.
import { duration, el, get, percent, show, table } from "../dom.js";
import { colour, lineChart } from "../charts.js";

export const title = "Rollouts";

export function open(root) {
  const replicas = table("Replicas", [{ title: "replica" }, { title: "state" }, { title: "version", num: true }, { title: "running", num: true }, { title: "waiting", num: true },
    { title: "open", num: true }, { title: "cache", num: true }, { title: "tokens", num: true }, { title: "finished", num: true }, { title: "failed", num: true },
    { title: "aborted", num: true }, { title: "moved", num: true }, { title: "guests", num: true }, { title: "restarts", num: true }, { title: "decode", num: true }, { title: "idle", num: true }]);
  const charts = el("div", { class: "charts" });
  const count = el("p", { class: "soft", id: "workers" });
  root.append(el("h1", {}, title), count, el("div", { class: "card" }, replicas.element), el("h2", {}, "The last minutes"), charts);
  const drawn = {};
  const kinds = { "engine/running": "Requests being decoded", "engine/kv_use_ratio": "Key-value cache in use", "worker/version_number": "Weight version" };

  async function load() {
    const data = await get("/api/replicas").catch(() => ({}));
    for (const [name, heading] of Object.entries(kinds)) {
      const roles = Object.keys(data), key = `${name}:${roles.join()}`;
      if (!roles.length) continue;
      if (drawn[name]?.key !== key) {
        drawn[name]?.chart.close();
        drawn[name]?.chart.element.remove();
        drawn[name] = { key, chart: lineChart({ title: heading, time: true, series: roles.slice(0, 16).map((label, place) => ({ label, colour: colour(place), dash: place > 7 ? [6, 4] : undefined })) }) };
        charts.append(drawn[name].chart.element);
      }
      const times = [...new Set(roles.slice(0, 16).flatMap((role) => data[role].times))].sort((a, b) => a - b);
      drawn[name].chart.update([times, ...roles.slice(0, 16).map((role) => {
        const at = new Map(data[role].times.map((time, place) => [time, data[role][name][place]]).filter(([, value]) => value !== null && value >= 0));
        return times.map((time) => at.get(time) ?? null);
      })]);
    }
  }
  load();
  const timer = setInterval(load, 2000);
  function row([name, role]) {
    const m = role.metrics, dead = role.is_silent, s = role.shares;
    const failed = Object.entries(m).filter(([key]) => key.startsWith("rollout/failures_")).reduce((sum, [, value]) => sum + value, 0);
    const idle = Object.entries(s).filter(([key]) => key.startsWith("idle")).reduce((sum, [, value]) => sum + value, 0);
    return { class: dead ? "dead" : "", cells: [name, dead ? `✕ silent for ${duration(role.silent_seconds)}${role.last_error ? `; last error: ${role.last_error}` : ""}` : role.state,
      m["worker/version_number"] < 0 ? "unknown" : show(m["worker/version_number"]), show(m["engine/running"]), show(m["engine/waiting"]), show(m["worker/open_trajectories"]),
      percent(m["engine/kv_use_ratio"]), show(m["engine/generated_tokens"]), show(m["worker/finished_trajectories"]), show(failed), show(m["worker/aborted_trajectories"]), show(m["worker/moved_trajectories"] ?? 0), show(m["worker/guest_trajectories"] ?? 0),
      show(m["worker/engine_restarts"]), percent(s.decode ?? 0), percent(idle)] };
  }
  return {
    onState: (state) => {
      const { running, wanted } = state.run.workers;
      count.textContent = state.run.is_alive && wanted ? `${running} of ${wanted} wanted workers are running` : "";
      replicas.set(Object.entries(state.roles).filter(([name]) => name.startsWith("rollout-")).map(row));
    },
    close: () => clearInterval(timer),
  };
}
