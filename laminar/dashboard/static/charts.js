// Charts over steps, drawn by uPlot (vendored). A chart knows metric names and colours, not where data comes from.
import { clock, el, percent, show } from "./dom.js";

export const colour = (index) => css(`--c${((index % 8) + 8) % 8}`);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const open = new Set();
export function redrawAll() { for (const chart of open) chart.rebuild(); }
export function closeAll() { for (const chart of open) chart.close(); }

function axes(unit, time) {
  const base = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid") } };
  const short = (value) => (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(0) : String(Number(value.toFixed(4))));
  const times = time ? { space: 90, values: (_, ticks) => ticks.map(clock) } : {};
  return [{ ...base, size: 34, ...times }, { ...base, size: 62, label: unit || undefined, labelSize: unit ? 18 : 0, values: (_, ticks) => ticks.map(short) }];
}

/* A y axis for what has a few peaks far above the rest: they are cut, so that the rest can be read. */
export function cutPeaks(u, low, high) {
  const values = u.data.slice(1).flat().filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const usual = values[Math.floor(0.98 * (values.length - 1))] ?? high;
  return [Math.min(0, low ?? 0), (high > 3 * usual && usual > 0 ? 1.5 * usual : 1.05 * high) || 1];
}

/* Of sums that `stacked` made, drawn from the topmost down: what a series adds to the one below it. */
const ownShare = (data, place, index) => (index === null || index === undefined ? "–" : percent((data[place]?.[index] ?? 0) - (data[place + 1]?.[index] ?? 0)));

/* Where each column has its last value. */
const lastKnown = (data) => data.map((column) => {
  let place = column.length - 1;
  while (place > 0 && (column[place] === null || column[place] === undefined)) place -= 1;
  return place;
});

/* series: [{label, colour, dash, fill, width}]; data: [x, y0, y1, ...] */
export function lineChart({ title, note = "", unit = "", series, height = 200, time = false, range = null }) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": `${title}: no data yet` });
  const element = el("figure", {}, el("figcaption", {}, title, note ? el("small", {}, `  ${note}`) : null), plot);
  const chart = { element, data: [[], ...series.map(() => [])], marks: [], shown: null };
  const drawMarks = (u) => {
    u.ctx.save();
    u.ctx.strokeStyle = css("--soft");
    u.ctx.setLineDash([3, 4]);
    for (const mark of chart.marks) {
      if (mark.step < u.scales.x.min || mark.step > u.scales.x.max) continue;
      const x = u.valToPos(mark.step, "x", true);
      u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
    }
    u.ctx.restore();
  };
  chart.rebuild = () => {
    chart.shown?.destroy();
    const options = {
      width: Math.max(200, plot.clientWidth || 400), height,
      scales: { x: { time }, y: range ? { range } : {} },
      axes: axes(unit, time),
      legend: { live: true },
      cursor: { drag: { x: true, y: false } },
      hooks: { draw: [drawMarks], setLegend: [(u) => { if ((u.cursor.left ?? -1) < 0 && u.data[0].length) u.setLegend({ idxs: lastKnown(u.data) }, false); }] },
      series: [{ label: time ? "time" : "step", value: (_, value) => (time && value ? clock(value) : show(value)) }, ...series.map((one, place) => ({
        label: one.label, stroke: one.colour ?? colour(place), width: one.width ?? 1.8, dash: one.dash, spanGaps: true,
        fill: one.fill ? one.colour ?? colour(place) : undefined, points: { show: one.points ?? undefined, size: 5 },
        paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        value: (u, value, place, index) => (one.stacked ? ownShare(u.data, place, index) : show(value)),
      }))],
    };
    chart.shown = new uPlot(options, chart.data, plot);
  };
  chart.update = (data, marks = []) => {
    chart.data = data; chart.marks = marks;
    if (!chart.shown) chart.rebuild(); else chart.shown.setData(data);
    const last = data.slice(1).map((column, place) => `${series[place].label} ${show(column[column.length - 1])}`).join(", ");
    plot.setAttribute("aria-label", `${title}: now ${last}`);
  };
  const watcher = new ResizeObserver(() => chart.shown?.setSize({ width: Math.max(200, plot.clientWidth), height }));
  watcher.observe(plot);
  chart.close = () => { watcher.disconnect(); chart.shown?.destroy(); open.delete(chart); };
  open.add(chart);
  return chart;
}

/* Shares that sum to 1, stacked: the last series is drawn first, over all of them, the first one lies at the bottom. */
export function stacked(columns) {
  const sums = [];
  let below = columns[0]?.map(() => 0) ?? [];
  for (const column of columns) { below = below.map((sum, place) => sum + (column[place] || 0)); sums.push(below); }
  return sums;
}

export function bars({ title, note = "", unit = "" }) {
  const body = el("div", { class: "plot" });
  const element = el("figure", {}, el("figcaption", {}, title, note ? el("small", {}, `  ${note}`) : null), body);
  const set = (rows) => {
    const most = Math.max(1, ...rows.flatMap((row) => row.values.map((value) => value.count)));
    const names = el("tr", {}, el("th", { scope: "col" }, unit), rows[0]?.values.map((value) => el("th", { scope: "col" }, value.label)) ?? [], el("th", { scope: "col" }, ""));
    body.replaceChildren(rows.length ? el("table", {}, el("thead", {}, names), el("tbody", {}, rows[0].values.length ? rows.map((row) => el("tr", {},
      el("th", { scope: "row" }, row.label),
      row.values.map((value) => { const bar = meter(value.count / most, value.colour); return el("td", { class: "num" }, show(value.count), bar); }), el("td", {}, ""))) : [])) : el("p", { class: "soft" }, "None."));
  };
  return { element, set };
}

export function meter(share, fill) {
  const inner = el("div");
  inner.style.cssText = `height:7px;border-radius:4px;width:${Math.max(0, Math.min(100, 100 * share))}%;background:${fill}`;
  const outer = el("div", { "aria-hidden": "true" }, inner);
  outer.style.cssText = "background:var(--grid);border-radius:4px;min-width:46px";
  return outer;
}
