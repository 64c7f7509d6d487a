// What was played: search, filters, and one trajectory token by token.
import { clock, duration, el, get, show, table } from "../dom.js";

export const title = "Trajectories";
const SURE = [-0.1, -0.7, -1.6, -3];

export function open(root) {
  const field = (label, attributes) => { const input = el("input", attributes); return { input, element: el("label", {}, label, input) }; };
  const choice = (label, name, options) => { const input = el("select", { name }, options.map(([value, text]) => el("option", { value }, text))); return { input, element: el("label", {}, label, input) }; };
  const fields = [
    field("Text, id, worker, failure", { type: "search", name: "text" }),
    field("Reward from", { type: "number", step: "any", name: "min_reward" }), field("Reward to", { type: "number", step: "any", name: "max_reward" }),
    field("Tokens from", { type: "number", min: 0, name: "min_tokens" }), field("Tokens to", { type: "number", min: 0, name: "max_tokens" }),
    field("Staleness from", { type: "number", min: 0, name: "min_staleness" }),
    choice("Outcome", "outcome", [["any", "any"], ["trained", "trained"], ["untrained", "not trained"], ["failed", "failed"]]),
    choice("Order", "order", [["newest", "newest"], ["reward_low", "lowest reward"], ["reward_high", "highest reward"], ["longest", "longest"], ["shortest", "shortest"], ["stalest", "stalest"]]),
  ];
  const form = el("form", { class: "row", role: "search", "aria-label": "Find trajectories" }, fields.map((one) => one.element), el("button", { type: "submit" }, "Find"));
  const count = el("p", { class: "soft", role: "status" });
  const rows = table("Trajectories", [{ title: "trajectory" }, { title: "ended" }, { title: "reward", num: true }, { title: "tokens", num: true }, { title: "versions" },
    { title: "step", num: true }, { title: "staleness", num: true }, { title: "end" }, { title: "answer" }]);
  const list = el("section", {}, el("div", { class: "card" }, form), count, el("div", { class: "card" }, rows.element));
  const detail = el("section", { hidden: true });
  root.append(el("h1", {}, title), list, detail);

  async function find() {
    const query = new URLSearchParams(fields.map(({ input }) => [input.name, input.value.trim()]).filter(([, value]) => value !== ""));
    try {
      const found = await get(`/api/trajectories?${query}`);
      count.textContent = found.num_kept ? `${show(found.num_found)} of ${show(found.num_kept)} kept trajectories` : "No trajectory is kept: metrics.trajectory_rate says what share of groups is.";
      rows.set(found.rows.map((row) => ({ class: row.failure ? "dead" : "", cells: [
        el("a", { href: `#/trajectories/${encodeURIComponent(row.trajectory_id)}` }, row.trajectory_id), clock(row.time), show(row.reward), show(row.num_sampled_tokens),
        row.oldest < 0 ? "–" : row.oldest === row.newest ? String(row.oldest) : `${row.oldest} to ${row.newest}`, show(row.step), show(row.staleness), row.failure || row.finish_reason, row.text] })));
    } catch (error) { count.textContent = String(error.message); }
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); find(); });
  form.addEventListener("change", find);

  async function show_(id) {
    list.hidden = Boolean(id); detail.hidden = !id;
    if (!id) { find(); return; }
    detail.replaceChildren(el("p", {}, "…"));
    try { detail.replaceChildren(...view(await get(`/api/trajectories/${encodeURIComponent(id)}`))); }
    catch (error) { detail.replaceChildren(el("p", { class: "bad" }, String(error.message)), back()); }
  }
  return { show: show_ };
}

const back = () => el("p", {}, el("a", { href: "#/trajectories" }, "← all trajectories"));

function view(record) {
  const facts = [["Reward", show(record.reward)], ...Object.entries(record.reward_terms).map(([name, value]) => [`term ${name}`, show(value)]),
    ["Failure", record.failure ? `${record.failure.kind}: ${record.failure.text}` : "none"], ["Prompt", record.prompt_id], ["Worker", record.worker], ["Attempt", show(record.attempt)],
    ["Sampled tokens", show(record.num_sampled_tokens)], ["Ended by", record.finish_reason ?? "–"],
    ["Versions", record.oldest === record.newest ? show(record.oldest) : `${record.oldest} to ${record.newest}`],
    ["Trained in step", show(record.step)], ["Staleness", show(record.staleness)],
    ["Time", `${duration(record.timings.total)}: generate ${duration(record.timings.generate)}, environment ${duration(record.timings.environment)}, reward ${duration(record.timings.reward)}`]];
  const text = el("div", { class: "tokens", id: "tokens" }), legend = el("div", { class: "legend" }), buttons = el("div", { class: "row", role: "group", "aria-label": "Colour tokens by" });
  const versions = [...new Set(record.chains.flat().map((segment) => segment.version).filter(Boolean))];
  const paint = (mode) => {
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    text.replaceChildren(...record.chains.flatMap((chain, number) => [
      record.chains.length > 1 ? el("h2", {}, `Chain ${number + 1}`) : null,
      ...chain.flatMap((segment) => segment.tokens.map((token, place) => {
        const given = segment.version === null, masked = given || place < segment.masked_head_tokens, logprob = segment.logprobs?.[place];
        const classes = [given ? "given" : ""];
        if (mode === "version" && !given) classes.push(`fill${versions.indexOf(segment.version) % 6}`);
        if (mode === "logprob" && !given) classes.push(`sure${SURE.filter((limit) => (logprob ?? 0) < limit).length}`);
        if (mode === "mask") classes.push(masked ? "masked" : "fill2");
        return el("span", { class: classes.join(" ").trim(), title: given ? "given" : `version ${segment.version}, log-prob ${logprob}, id ${segment.token_ids[place]}${masked ? ", masked" : ""}` }, token);
      }))].filter(Boolean)));
    const entries = { version: versions.map((name, place) => [`fill${place % 6}`, `version ${name}`]), mask: [["fill2", "enters the loss"], ["masked", "does not"]],
      logprob: [["sure0", "above −0.1"], ["sure1", "−0.1 to −0.7"], ["sure2", "−0.7 to −1.6"], ["sure3", "−1.6 to −3"], ["sure4", "below −3"]] }[mode];
    legend.replaceChildren(el("span", { class: "soft" }, "grey: given, not sampled"), ...entries.map(([name, label]) => el("span", { class: "tokens" }, el("span", { class: name }, label))));
  };
  buttons.append(...[["version", "Version"], ["logprob", "Log-prob"], ["mask", "Mask"]].map(([mode, label]) => el("button", { type: "button", "data-mode": mode, onclick: () => paint(mode) }, label)));
  paint("version");
  return [back(), el("h2", {}, record.trajectory_id), el("div", { class: "card" }, el("table", {}, el("tbody", {}, facts.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))))),
    el("div", { class: "card" }, buttons, legend, text)];
}
