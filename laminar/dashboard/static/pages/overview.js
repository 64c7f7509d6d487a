// Is it learning, how stale is it, who waits for whom, what should be changed?
import { clock, duration, el, show, table, tile } from "../dom.js";
import { colour, cutPeaks, lineChart } from "../charts.js";

export const title = "Overview";
const whole = (value) => (value === undefined ? value : Math.round(value));

export function open(root) {
  const sentence = el("p", { class: "card sentence", id: "bottleneck" }, "…");
  const tiles = Object.fromEntries(["Step", "Reward", "Loss", "Trained", "Generated", "Staleness", "Buffer", "Weights"].map((name) => [name, tile(name)]));
  const reward = lineChart({ title: "Reward", note: "mean of what was played; held-out accuracy as points", series: [
    { label: "reward", colour: colour(0) }, { label: "held-out", colour: colour(1), width: 0, points: true }] });
  const loss = lineChart({ title: "Loss", series: [{ label: "loss", colour: colour(0) }] });
  const speed = lineChart({ title: "Throughput", unit: "tokens/s", series: [{ label: "generated", colour: colour(2) }, { label: "trained", colour: colour(0) }] });
  const stale = lineChart({ title: "Staleness", unit: "versions", note: "of trained trajectories, against the bound", series: [
    { label: "bound", colour: colour(1), dash: [8, 5] }, { label: "max", colour: colour(3) }, { label: "p95", colour: colour(5) }, { label: "mean", colour: colour(0) }] });
  const depth = lineChart({ title: "Buffer", unit: "groups", series: [{ label: "ready", colour: colour(0) }, { label: "being played", colour: colour(4) }] });
  const parts = lineChart({ title: "Step time", unit: "s", note: "rare peaks are cut", range: cutPeaks, series: [{ label: "step", colour: colour(7) }, { label: "wait for a batch", colour: colour(1) },
    { label: "forward, backward", colour: colour(0) }, { label: "publish stall", colour: colour(3) }] });
  const versions = table("Weight versions", [{ title: "role" }, { title: "state" }, { title: "version", num: true }, { title: "behind", num: true }]);
  const marks = table("Marks", [{ title: "time" }, { title: "step", num: true }, { title: "what happened" }], "Nothing so far: restarts, changed settings and notices stand here.");
  root.append(el("h1", {}, title), sentence, el("div", { class: "tiles" }, Object.values(tiles).map((one) => one.element)),
    el("div", { class: "charts" }, [reward, loss, speed, stale, depth, parts].map((chart) => chart.element)),
    el("h2", {}, "Weight versions"), el("div", { class: "card" }, versions.element),
    el("h2", {}, "Marks"), el("div", { class: "card" }, marks.element));

  function onState(state) {
    const now = state.latest, buffer = state.buffer;
    sentence.textContent = state.bottleneck;
    const recent = state.recent, left = now["time/left_seconds"];
    tiles.Step.set(`${show(state.step)} of ${show(state.run.max_steps)}`, state.run.is_alive && left > 0 ? `about ${duration(left)} left` : state.run.reason);
    tiles.Reward.set(show(now["reward/finished_mean"] ?? now["reward/mean"]), `trained ones ${show(now["reward/mean"])}`);
    tiles.Loss.set(show(now["train/loss"], 4), `mismatch KL ${show(now["mismatch/kl"])}`);
    tiles.Trained.set(show(whole(recent["throughput/trained_tokens_per_second"])), "tokens/s, the last 20 steps");
    tiles.Generated.set(show(whole(recent["throughput/generated_tokens_per_second"])), "tokens/s, the last 20 steps");
    tiles.Staleness.set(`${show(now["staleness/versions_max"])} of ${state.run.bound ?? "∞"}`, `mean ${show(now["staleness/versions_mean"], 2)}, policy ${state.run.policy}`);
    tiles.Buffer.set(show(now["experience/ready_groups"]), `groups ready; ${show(now["experience/open_groups"])} being played`);
    tiles.Weights.set(buffer.published ?? show(now["weights/trainer_version"]), `publish stall ${duration(now["time/publish_stall_seconds"])}`);
    const newest = now["weights/trainer_version"];
    versions.set(Object.entries(state.roles).filter(([, role]) => "worker/version_number" in role.metrics).map(([name, role]) => {
      const number = role.metrics["worker/version_number"];
      return { class: role.is_silent ? "dead" : "", cells: [name, role.is_silent ? "silent" : role.state, number < 0 ? "unknown" : show(number), number < 0 ? "–" : show(Math.max(0, newest - number))] };
    }));
  }
  function onHistory(history, state) {
    const { steps, columns: c, marks: all } = history;
    const empty = steps.map(() => null);
    const points = [...empty];
    for (const line of history.evaluations) {
      const place = steps.findIndex((step) => step >= line.step);
      if (place >= 0) points[place] = line["eval/accuracy"];
    }
    const column = (name) => c[name] ?? empty;
    reward.update([steps, c["reward/finished_mean"] ?? column("reward/mean"), points], all);
    loss.update([steps, column("train/loss")], all);
    speed.update([steps, column("throughput/generated_tokens_per_second"), column("throughput/trained_tokens_per_second")], all);
    stale.update([steps, steps.map(() => state.run.bound), column("staleness/versions_max"), column("staleness/versions_p95"), column("staleness/versions_mean")], all);
    depth.update([steps, column("experience/ready_groups"), column("experience/open_groups")], all);
    parts.update([steps, column("time/step_seconds"), column("time/sample_wait_seconds"), column("time/forward_backward_seconds"), column("time/publish_stall_seconds")], all);
    marks.set(all.slice(-30).reverse().map((mark) => ({ cells: [clock(mark.time), show(mark.step), mark.text] })));
  }
  return { onState, onHistory, metrics: ["reward/finished_mean", "reward/mean", "train/loss", "throughput/*", "staleness/versions_*", "experience/ready_groups",
    "experience/open_groups", "time/step_seconds", "time/sample_wait_seconds", "time/forward_backward_seconds", "time/publish_stall_seconds"] };
}
