"""Does the simulator tell what the paper measured? `python -m benchmarks.simulate [--quick]`.

Every point of figure 11 (three models, five systems, five scales), the staleness histogram (figure 10), weight waits (figure
14), repack on and off (table 1), a machine's failure (figure 15), and the time for 1,024 GPUs over 10 steps on one core. The
simulator's fitted constants were fitted on the 32B model alone (`laminar/simulate/README.md`), nothing here. `--quick`
simulates fewer steps a point. Value: median absolute error of figure 11; `holds` is true only if every bar holds.

The 7B model is played twice: with figure 17's lengths, which the bars take, and with figure 2's, beside them. With figure
17's the paper contradicts itself: its one-step system needs 730 s a step on 128 GPUs and on 256, so the longest answers, of
16,384 tokens, would take 45 ms a token, beside 40 others on a GPU, where figure 4 has 10 ms.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from laminar.simulate.cluster import Failure
from laminar.simulate.paper import MODELS, Model, paper_cluster, paper_system, paper_workload
from laminar.simulate.recorder import Outcome
from laminar.simulate.simulation import simulate
from laminar.simulate.system import Kind

PAPER = json.loads((Path(__file__).parent / "paper_figures.json").read_text())
KINDS: tuple[Kind, ...] = ("synchronous", "one_step", "stream", "partial", "laminar")
FITTED_ON: Model = "32B"
MEDIAN_BAR, SPEEDUP_BAR, POINTS_BAR, SECONDS_BAR = 0.15, 0.20, 5.0, 10.0
APART = 1.05
"""Pairs that the paper separates by more must come out in the same order, from `ORDER_GPUS` GPUs on."""
ORDER_GPUS = 128
ODD_ONE: Model = "7B"
OTHER_LENGTHS = "AIME"
"""Figure 2's, for the 7B model; see the module."""
Point = tuple[Model, Kind, int]


def split(model: Model, kind: Kind, index: int) -> tuple[int, int]:
    """GPUs that train and that generate at the scale of that index (table 2); synchronous: all do both."""
    if kind == "synchronous":
        total = PAPER["figure_11_tokens_per_second"][model]["gpus"][index]
        return total, total
    table = PAPER["table_2_train_and_rollout_gpus"]
    train, rollout = table[kind if kind in ("laminar", "partial") else "lockstep"][model][index]
    return train, rollout


def play(
    model: Model,
    kind: Kind,
    index: int,
    num_steps: int,
    warm_steps: int,
    *,
    lengths: str | None = None,
    repack: bool = True,
    **more: Any,
) -> Outcome:
    """One point, with the model's lengths or others by name; `more` goes to `simulate`, failures to the cluster."""
    failures: tuple[Failure, ...] = more.pop("failures", ())
    cluster = paper_cluster(model, *split(model, kind, index), failures)
    system = paper_system(kind, cluster.num_replicas, repack=repack)
    return simulate(paper_workload(model, lengths), cluster, system, num_steps=num_steps, warm_steps=warm_steps, **more)


def steps_of(kind: Kind, quick: bool) -> tuple[int, int]:
    """Steps and warm-up: a lockstep system's steps are alike, an asynchronous one has to find its rhythm."""
    if kind in ("partial", "laminar"):
        return (7, 3) if quick else (14, 4)
    return (3, 1) if quick else (7, 1)


def point_tokens_per_second(point: Point, quick: bool, lengths: str | None) -> float:
    """Simulated."""
    model, kind, index = point
    return play(model, kind, index, *steps_of(kind, quick), lengths=lengths).tokens_per_second


def figure_11(models: Sequence[Model], quick: bool, cores: int, lengths: str | None = None) -> dict[Point, float]:
    """Simulated tokens/s of every point of these models."""
    points: list[Point] = [(model, kind, index) for model in models for kind in KINDS for index in range(5)]
    points.sort(key=lambda point: KINDS.index(point[1]), reverse=True)  # the long ones first
    found: dict[Point, float] = {}
    with ProcessPoolExecutor(cores) as pool:
        played = pool.map(point_tokens_per_second, points, itertools.repeat(quick), itertools.repeat(lengths))
        for point, value in zip(points, played, strict=True):
            found[point] = value
            where = f"{len(found)}/{len(points)} {point[0]} {lengths or ''} {point[1]} {gpus_of(point)}"
            print(f"{where}: {value:,.0f} tokens/s ({_off(value, point)})", file=sys.stderr, flush=True)
    return found


def _off(value: float, point: Point) -> str:
    return f"{100 * (value / paper_value(point) - 1):+.0f} %"


def paper_value(point: Point) -> float:
    """Tokens/s in the figure."""
    model, kind, index = point
    return float(PAPER["figure_11_tokens_per_second"][model][kind][index])


def gpus_of(point: Point) -> int:
    """GPUs of the point."""
    return int(PAPER["figure_11_tokens_per_second"][point[0]]["gpus"][point[2]])


def judge_figure_11(found: dict[Point, float]) -> dict[str, Any]:
    """Errors, order and speed-ups."""
    error = {point: value / paper_value(point) - 1 for point, value in found.items()}
    pairs, wrong = 0, []
    for model, index in itertools.product(MODELS, range(5)):
        for first, second in itertools.combinations(KINDS, 2):
            one: Point = (model, first, index)
            other: Point = (model, second, index)
            ratio = paper_value(one) / paper_value(other)
            if gpus_of(one) < ORDER_GPUS or 1 / APART <= ratio <= APART:
                continue
            pairs += 1
            if (found[one] > found[other]) != (ratio > 1):
                wrong.append(f"{model} {gpus_of(one)} {first}/{second}")
    speedups = {}
    for model in MODELS:
        ours: Point = (model, "laminar", 4)
        verl: Point = (model, "synchronous", 4)
        paper = paper_value(ours) / paper_value(verl)
        speedups[model] = {"simulated": round(found[ours] / found[verl], 2), "paper": round(paper, 2)}
    return {
        "median_error": statistics.median(map(abs, error.values())),
        "median_error_by_model": {m: _median(error, lambda point, m=m: point[0] == m) for m in MODELS},
        "median_error_not_fitted": _median(error, lambda point: point[0] != FITTED_ON),
        "median_error_by_system": {k: _median(error, lambda point, k=k: point[1] == k) for k in KINDS},
        "pairs": pairs,
        "wrong_order": wrong,
        "speedups": speedups,
        "speedups_hold": all(abs(s["simulated"] / s["paper"] - 1) <= SPEEDUP_BAR for s in speedups.values()),
        "errors_percent": {m: {k: [round(100 * error[m, k, i]) for i in range(5)] for k in KINDS} for m in MODELS},
    }


def _median(error: dict[Point, float], wanted: Any) -> float:
    return round(statistics.median(abs(value) for point, value in error.items() if wanted(point)), 3)


def figure_14() -> dict[str, Any]:
    """Waits for weights at five scales: what a global broadcast costs, and what a replica of ours stands still."""
    result: dict[str, Any] = {}
    for model in ("32B", "72B"):
        paper = PAPER["figure_14_wait_seconds"]
        transfers = paper_cluster(model, 8, 8).transfers
        synced = [transfers.global_sync_seconds(gpus) for gpus in paper["rollout_gpus"]]
        result[model] = {
            "global_error_percent": _percent(synced, paper[model]["global"]),
            "laminar_error_percent": _percent([transfers.load_seconds] * 5, paper[model]["laminar_mean"]),
        }
    return result


def _percent(found: Sequence[float], paper: Sequence[float]) -> list[int]:
    return [round(100 * (one / other - 1)) for one, other in zip(found, paper, strict=True)]


def table_1(quick: bool) -> dict[str, Any]:
    """The 32B model on 128 GPUs with and without repack; without it steps differ twofold, so many are played."""
    steps = (16, 4) if quick else (40, 4)
    on, off = (play("32B", "laminar", 2, *steps, repack=repack) for repack in (True, False))
    paper = PAPER["table_1_repack_32B_128_gpus"]
    gain = 100 * (on.generated_tokens_per_second / off.generated_tokens_per_second - 1)
    paper_gain = 100 * (paper["with"]["generated_tokens_per_second"] / paper["without"]["generated_tokens_per_second"] - 1)
    return {
        "gain_percent": round(gain, 1), "paper_gain_percent": round(paper_gain, 1),
        "gain_holds": abs(gain - paper_gain) <= POINTS_BAR,
        "with": _table_1(on), "without": _table_1(off), "paper": paper,
    }  # fmt: skip


def figure_10(quick: bool, lengths: str | None = None) -> dict[str, Any]:
    """The 7B model on 64 GPUs: versions that are published between an answer's first token and its last.

    That is the paper's inherent staleness: a trainer that never waits cannot train a sixth of its answers on the very
    version that sampled them. Ours when trained stands beside it.
    """
    outcome = play("7B", "laminar", 2, *((11, 3) if quick else (20, 4)), lengths=lengths)
    share = outcome.staleness_at_end
    histogram = {str(k): 100 * share.get(k, 0.0) for k in range(max(3, *share) + 1)}
    wanted = PAPER["figure_10_staleness_percent"]
    difference = {k: round(histogram[k] - wanted.get(k, 0.0), 1) for k in histogram}
    return {
        "at_end_percent": {k: round(v, 1) for k, v in histogram.items()},
        "difference": difference,
        "holds": all(abs(value) <= POINTS_BAR for value in difference.values()),
        "mean_at_end": round(sum(k * value for k, value in share.items()), 2),
        "mean_when_trained": round(outcome.mean_staleness, 2),
    }


def _table_1(outcome: Outcome) -> dict[str, float]:
    return {
        "latency_mean_seconds": round(outcome.latency_mean_seconds),
        "latency_max_seconds": round(outcome.latency_max_seconds),
        "kv_use": round(outcome.kv_use, 3),
        "generated_tokens_per_second": round(outcome.generated_tokens_per_second),
        "released_replicas": outcome.released_replicas,
    }


def figure_15() -> dict[str, Any]:
    """One of eight rollout machines is lost for as long as the paper's recovery took."""
    paper = PAPER["figure_15_failure_32B_128_gpus"]
    begin, seconds = 2000.0, float(paper["recovery_seconds"])
    failure = Failure(begin, (0, 1), seconds)
    curve = play("32B", "laminar", 2, 9, 2, failures=(failure,), curve=True).curve

    def mean(start: float, end: float) -> float:
        return statistics.fmean(rate for at, rate in curve if start < at <= end)

    before, during = mean(begin - 800, begin), mean(begin, begin + seconds)
    after = mean(begin + seconds + 60, begin + seconds + 860)
    return {
        "before": round(before), "during": round(during), "after": round(after),
        "drop_percent": round(100 * (1 - during / before), 1),
        "paper_drop_percent": round(100 * (1 - paper["during"] / paper["before"]), 1),
    }  # fmt: skip


def seconds_for_1024_gpus() -> float:
    """CPU time of one process for the 72B model on 1,024 GPUs, 10 steps of ours."""
    started = time.process_time()
    play("72B", "laminar", 4, 10, 3)
    return time.process_time() - started


def show(found: dict[Point, float], models: Sequence[Model], title: str) -> None:
    """Figure 11 as a table: simulated tokens/s and the error."""
    print(title)
    for model, kind in itertools.product(models, KINDS):
        texts = []
        for index in range(5):
            point: Point = (model, kind, index)
            texts.append(f"{gpus_of(point):>5}: {found[point]:>8,.0f} ({_off(found[point], point):>6})")
        print(f"{model:>4} {kind:<12}", *texts, flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Does the simulator tell what the paper measured?")
    parser.add_argument("--quick", action="store_true", help="fewer steps a point")
    quick, began = parser.parse_args().quick, time.monotonic()
    cores = len(os.sched_getaffinity(0))
    cpu_seconds = seconds_for_1024_gpus()
    found = figure_11(tuple(MODELS), quick, cores)
    show(found, tuple(MODELS), "lengths of figure 17")
    others = figure_11((ODD_ONE,), quick, cores, OTHER_LENGTHS)
    show(others, (ODD_ONE,), "lengths of figure 2")
    judged, repack, staleness = judge_figure_11(found), table_1(quick), figure_10(quick)
    bars = {
        "median_error": judged["median_error"] <= MEDIAN_BAR,
        "order": not judged["wrong_order"],
        "speedups": judged["speedups_hold"],
        "staleness": staleness["holds"],
        "repack_gain": repack["gain_holds"],
        "seconds": cpu_seconds < SECONDS_BAR,
    }
    result = {
        "name": "simulate", "value": round(judged["median_error"], 3), "unit": "median absolute error, figure 11",
        "bar": MEDIAN_BAR, "holds": all(bars.values()), "bars": bars, "figure_11": judged, "table_1": repack,
        "figure_10": staleness, "figure_14": figure_14(), "figure_15": figure_15(),
        "with_7B_lengths_of_figure_2": {
            "figure_11": judge_figure_11(found | others), "figure_10": figure_10(quick, OTHER_LENGTHS),
        },
        "cpu_seconds_1024_gpus_10_steps": round(cpu_seconds, 1), "seconds": round(time.monotonic() - began),
        "cores": cores, "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
