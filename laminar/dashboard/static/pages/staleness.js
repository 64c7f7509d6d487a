// How stale is what is trained, what is under way, and what was let go?
import { el, show } from "../dom.js";
import { bars, colour, lineChart, stacked } from "../charts.js";

export const title = "Staleness";
const MAX_BANDS = 8;

export function open(root) {
  const lead = el("p", { class: "card" });
  const now = bars({ title: "Outstanding groups by age", note: "versions behind the newest", unit: "stage" });
  const place = el("div");
  let shares = null, num = 0;
  const where = lineChart({ title: "Where staleness arises", unit: "versions", note: "means", series: [{ label: "in flight", colour: colour(0) }, { label: "in queue", colour: colour(4) }] });
  const lost = lineChart({ title: "Groups dropped for their age", note: "so far", series: [{ label: "dropped", colour: colour(1) }] });
  const masked = lineChart({ title: "Tokens masked for their age", unit: "tokens", series: [{ label: "masked", colour: colour(3) }] });
  const lengths = bars({ title: "Trained and dropped by length", note: "sampled tokens, at most; the last 100 points", unit: "outcome" });
  root.append(el("h1", {}, title), lead, el("div", { class: "charts" }, now.element, place, where.element, lengths.element, lost.element, masked.element));

  return {
    metrics: ["staleness/*"],
    onState(state) {
      const bound = state.run.bound;
      const held = bound === null ? "There is no bound: only the buffer's capacity limits staleness." : `The bound is ${bound} (policy ${state.run.policy}): a trajectory may be trained on weights at most ${bound} version${bound === 1 ? "" : "s"} newer than its oldest token; groups keep the bound that they were admitted under.`;
      const last = state.step ? `The last step trained trajectories of staleness ${show(state.latest["staleness/versions_mean"], 2)} in the mean and ${show(state.latest["staleness/versions_max"])} at most.` : "No step has ended yet.";
      lead.textContent = `${held} ${last}`;
      const stages = { in_flight: "in flight", ready: "in queue", taken: "being trained" }, ages = state.buffer.ages;
      const most = ages ? Math.max(bound ?? 0, ...Object.values(ages).flatMap((counts) => Object.keys(counts).map(Number))) : 0;
      now.set(ages ? Object.entries(stages).map(([key, label], place) => ({ label, values: [...Array(most + 1).keys()].map((age) => ({ label: String(age), count: ages[key][age] ?? 0, colour: colour([0, 4, 2][place]) })) })) : []);
    },
    onHistory(history, state) {
      const { steps, columns: c, marks } = history, none = steps.map(() => null);
      const ages = Object.keys(c).map((name) => Number(name.match(/^staleness\/histogram_(\d+)$/)?.[1] ?? 0));
      const wanted = Math.min(MAX_BANDS, 1 + Math.max(state.run.bound ?? 0, ...ages));
      if (wanted !== num) {
        shares?.close();
        num = wanted;
        shares = lineChart({ title: "Trained trajectories by staleness", note: "stacked shares", range: [0, 1],
          series: [...Array(num).keys()].reverse().map((age) => ({ label: age === MAX_BANDS - 1 ? `${age} or more` : `${age}`, colour: colour(age), fill: true, stacked: true })) });
        place.replaceChildren(shares.element);
      }
      const counts = [...Array(num).keys()].map(() => steps.map(() => 0));
      for (const [name, column] of Object.entries(c)) {
        const match = name.match(/^staleness\/histogram_(\d+)$/);
        if (match) column.forEach((value, place) => { counts[Math.min(Number(match[1]), num - 1)][place] += value || 0; });
      }
      const totals = steps.map((_, place) => counts.reduce((sum, column) => sum + column[place], 0) || 1);
      shares.update([steps, ...stacked(counts.map((column) => column.map((value, place) => value / totals[place]))).reverse()], marks);
      where.update([steps, c["staleness/in_flight_versions_mean"] ?? none, c["staleness/in_queue_versions_mean"] ?? none], marks);
      lost.update([steps, c["staleness/dropped_groups"] ?? none], marks);
      masked.update([steps, c["staleness/masked_tokens"] ?? none], marks);
      const sum = (kind) => Object.fromEntries(Object.entries(c).filter(([name]) => name.startsWith(`staleness/${kind}_length_`))
        .map(([name, column]) => [name.split("_").pop(), Math.round(column.slice(-100).reduce((total, value) => total + (value || 0), 0) * history.steps_per_point)]));
      const trained = sum("trained"), dropped = sum("dropped");
      const buckets = [...new Set([...Object.keys(trained), ...Object.keys(dropped)])].sort((a, b) => (Number(a) || 1e12) - (Number(b) || 1e12));
      lengths.set(buckets.length ? [["trained", trained, 0], ["dropped", dropped, 1]].map(([label, counts_, tint]) => ({ label, values: buckets.map((bucket) => ({ label: bucket, count: counts_[bucket] ?? 0, colour: colour(tint) })) })) : []);
    },
  };
}
