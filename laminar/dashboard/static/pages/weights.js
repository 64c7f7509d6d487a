// The way of the weights: publish, relays, swaps.
import { bytes, clock, duration, el, show, table, tile } from "../dom.js";
import { colour, lineChart } from "../charts.js";

export const title = "Weights";

export function open(root) {
  const tiles = { version: tile("Newest version"), bytes: tile("One version"), stall: tile("Publish stall"), skipped: tile("Skipped publishes") };
  const relays = table("Relays, in the order of the chain", [{ title: "machine" }, { title: "node" }, { title: "newest" }, { title: "complete versions" }, { title: "store" }, { title: "heard at" }], "Relays are shown while the run lives.");
  const swaps = table("Replicas", [{ title: "replica" }, { title: "version", num: true }, { title: "behind", num: true }, { title: "last swap", num: true }]);
  const stall = lineChart({ title: "Publish stall", unit: "s", note: "training stood still", series: [{ label: "stall", colour: colour(3) }] });
  const size = lineChart({ title: "Bytes published", unit: "MB", series: [{ label: "MB", colour: colour(0) }] });
  const way = lineChart({ title: "From trainer to engines", unit: "s", note: "the slowest machine and replica", series: [{ label: "broadcast", colour: colour(2) }, { label: "swap", colour: colour(1) }] });
  const mixed = lineChart({ title: "Trajectories of several versions", note: "share of those trained", series: [{ label: "share", colour: colour(4) }] });
  root.append(el("h1", {}, title), el("div", { class: "tiles" }, Object.values(tiles).map((one) => one.element)),
    el("h2", {}, "Relays"), el("div", { class: "card" }, relays.element), el("h2", {}, "Replicas"), el("div", { class: "card" }, swaps.element),
    el("div", { class: "charts" }, stall.element, way.element, size.element, mixed.element));
  return {
    metrics: ["time/publish_stall_seconds", "weights/publish_bytes", "weights/broadcast_seconds", "weights/swap_seconds", "rollout/mixed_version_ratio"],
    onState(state) {
      const now = state.latest, newest = now["weights/trainer_version"];
      tiles.version.set(state.buffer.published ?? show(newest), "lineage.number");
      tiles.bytes.set(bytes(now["weights/publish_bytes"]));
      tiles.stall.set(duration(now["time/publish_stall_seconds"]), "last step");
      tiles.skipped.set(show(now["weights/skipped_publishes"]), "every slot was leased; offered again");
      relays.set(state.relays.map((relay) => ({ cells: [relay.host, relay.node_id, relay.newest || "none", relay.versions.join(", "), relay.store, clock(relay.beat_at)] })));
      swaps.set(Object.entries(state.roles).filter(([name]) => name.startsWith("rollout-")).map(([name, role]) => {
        const number = role.metrics["worker/version_number"];
        return { class: role.is_silent ? "dead" : "", cells: [name, number < 0 ? "unknown" : show(number), number < 0 ? "–" : show(Math.max(0, newest - number)), duration(role.metrics["weights/swap_seconds"])] };
      }));
    },
    onHistory(history) {
      const { steps, columns: c, marks } = history, none = steps.map(() => null);
      stall.update([steps, c["time/publish_stall_seconds"] ?? none], marks);
      way.update([steps, c["weights/broadcast_seconds"] ?? none, c["weights/swap_seconds"] ?? none], marks);
      size.update([steps, (c["weights/publish_bytes"] ?? none).map((value) => (value === null ? null : value / 1e6))], marks);
      mixed.update([steps, c["rollout/mixed_version_ratio"] ?? none], marks);
    },
  };
}
