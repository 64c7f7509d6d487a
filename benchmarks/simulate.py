"""Does the simulator tell what the paper measured? `python -m benchmarks.simulate [--quick]`.

Every point of figure 11 (three models, five systems, five scales), the staleness histogram (figure 10), weight waits (figure
14), repack on and off (table 1), a machine's failure (figure 15), and the time for 1,024 GPUs over 10 steps on one core. The
simulator's fitted constants were fitted on the 32B model alone (`laminar/simulate/README.md`), nothing here. `--quick`
simulates fewer steps a run. Value: median absolute error of figure 11; `holds` is true only if every bar holds.

The 7B model is judged with figure 2's lengths (mean 2,165 tokens). Figure 17's (mean 5,531), which it is said to have, are
played too and printed beside, unjudged: nothing that the simulator knows gives figure 11's times with them. The one-step
system takes 746, 730 and 717 s a step with 48, 96 and 216 GPUs that generate: what does not get shorter with four times the
GPUs is the longest answer, and 717 s for 16,384 tokens are 44 ms a token. The 32B model's longest answer takes 27 ms a
token, the 72B model's 30; figure 4 has 10 ms for the 40 answers that a GPU of the 7B model has. No speed of GPUs or hosts
makes the smallest model the slowest. With figure 2's lengths it takes 18 ms. `one_step_floor` has these figures; `README.md`
has what could explain them otherwise (a path of 64,000 tokens/s that all answers share), and what speaks for figure 17.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.simulate_runs import (
    FAILING,
    FAILURE_SECONDS,
    FIGURE_17,
    JUDGED_LENGTHS,
    KINDS,
    LARGEST,
    NOT_REPACKING,
    NUM_SCALES,
    PAPER,
    POINTS,
    REPACKING,
    STALENESS,
    STALENESS_BESIDE,
    Played,
    Point,
    Run,
    play_all,
    run_of,
    wanted_runs,
)
from laminar.simulate.paper import GROUP_SIZE, MODELS, PROMPTS_PER_STEP, Model, paper_cluster, paper_workload
from laminar.simulate.recorder import Outcome
from laminar.simulate.timings import load_lengths

FITTED_ON: Model = "32B"
MEDIAN_BAR, SPEEDUP_BAR, POINTS_BAR, SECONDS_BAR = 0.15, 0.20, 5.0, 10.0
APART = 1.05
"""Pairs that the paper separates by more must come out in the same order, from `ORDER_GPUS` GPUs on."""
ORDER_GPUS = 128
FLOOR_SCALES = 3
"""Largest scales of figure 11, where the one-step systems' time hardly depends on their GPUs."""


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
    for model, index in itertools.product(MODELS, range(NUM_SCALES)):
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
        "errors_percent": {m: {k: [round(100 * error[m, k, i]) for i in range(NUM_SCALES)] for k in KINDS} for m in MODELS},
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


def table_1(on: Outcome, off: Outcome) -> dict[str, Any]:
    """The 32B model on 128 GPUs with and without repack."""
    paper = PAPER["table_1_repack_32B_128_gpus"]
    gain = 100 * (on.generated_tokens_per_second / off.generated_tokens_per_second - 1)
    paper_gain = 100 * (paper["with"]["generated_tokens_per_second"] / paper["without"]["generated_tokens_per_second"] - 1)
    return {
        "gain_percent": round(gain, 1), "paper_gain_percent": round(paper_gain, 1),
        "gain_holds": abs(gain - paper_gain) <= POINTS_BAR,
        "with": _table_1(on), "without": _table_1(off), "paper": paper,
    }  # fmt: skip


def figure_10(outcome: Outcome) -> dict[str, Any]:
    """The 7B model on 64 GPUs: versions that are published between an answer's first token and its last.

    That is the paper's inherent staleness: a trainer that never waits cannot train a sixth of its answers on the very
    version that sampled them. Ours when trained stands beside it.
    """
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


def figure_15(failing: Outcome) -> dict[str, Any]:
    """One of eight rollout machines is lost for as long as the paper's recovery took."""
    paper = PAPER["figure_15_failure_32B_128_gpus"]
    begin, seconds = FAILURE_SECONDS, float(paper["recovery_seconds"])

    def mean(start: float, end: float) -> float:
        return statistics.fmean(rate for at, rate in failing.curve if start < at <= end)

    before, during = mean(begin - 800, begin), mean(begin, begin + seconds)
    after = mean(begin + seconds + 60, begin + seconds + 860)
    return {
        "before": round(before), "during": round(during), "after": round(after),
        "drop_percent": round(100 * (1 - during / before), 1),
        "paper_drop_percent": round(100 * (1 - paper["during"] / paper["before"]), 1),
    }  # fmt: skip


def one_step_floor(model: Model, lengths: str) -> dict[str, Any]:
    """The paper's one-step system at its largest scales, were its answers of these lengths.

    Returns:
        Seconds a step at each scale, tokens of the longest answer expected in a batch, milliseconds a token of it that the
        shortest step leaves, and the tokens/s of that step.
    """
    workload = paper_workload(model, lengths)
    answers = GROUP_SIZE * PROMPTS_PER_STEP
    tokens = answers * (workload.prompt_tokens + workload.mean_sampled_tokens)
    rates = PAPER["figure_11_tokens_per_second"][model]["one_step"][-FLOOR_SCALES:]
    longest = load_lengths(lengths).quantile(1 - 1 / answers)
    return {
        "seconds_a_step": [round(tokens / rate) for rate in rates],
        "longest_answer_tokens": longest,
        "milliseconds_a_token": round(1000 * tokens / max(rates) / longest, 1),
        "tokens_per_second": max(rates),
    }


def show(found: dict[Point, float], models: Sequence[Model], title: str) -> None:
    """Figure 11 as a table: simulated tokens/s and the error."""
    print(title)
    for model, kind in itertools.product(models, KINDS):
        texts = []
        for index in range(NUM_SCALES):
            point: Point = (model, kind, index)
            texts.append(f"{gpus_of(point):>5}: {found[point]:>8,.0f} ({_off(found[point], point):>6})")
        print(f"{model:>4} {kind:<12}", *texts, flush=True)


def found_with(played: Mapping[Run, Played], lengths: Mapping[Model, str]) -> dict[Point, float]:
    """Simulated tokens/s of every point of figure 11, with these lengths."""
    return {point: played[run_of(point, lengths[point[0]])].outcome.tokens_per_second for point in POINTS}


def judge(played: Mapping[Run, Played]) -> dict[str, Any]:
    """All figures against their bars."""
    judged = judge_figure_11(found_with(played, JUDGED_LENGTHS))
    repack = table_1(played[REPACKING].outcome, played[NOT_REPACKING].outcome)
    staleness = figure_10(played[STALENESS].outcome)
    cpu_seconds = played[LARGEST].cpu_seconds
    bars = {
        "median_error": judged["median_error"] <= MEDIAN_BAR,
        "order": not judged["wrong_order"],
        "speedups": judged["speedups_hold"],
        "staleness": staleness["holds"],
        "repack_gain": repack["gain_holds"],
        "seconds": cpu_seconds < SECONDS_BAR,
    }
    return {
        "name": "simulate", "value": round(judged["median_error"], 3), "unit": "median absolute error, figure 11",
        "bar": MEDIAN_BAR, "holds": all(bars.values()), "bars": bars, "lengths": JUDGED_LENGTHS,
        "figure_11": judged, "table_1": repack, "figure_10": staleness, "figure_14": figure_14(),
        "figure_15": figure_15(played[FAILING].outcome), "cpu_seconds_1024_gpus_10_steps": round(cpu_seconds, 1),
        "unjudged_7B_with_figure_17": {
            "figure_11": judge_figure_11(found_with(played, JUDGED_LENGTHS | {"7B": FIGURE_17})),
            "figure_10": figure_10(played[STALENESS_BESIDE].outcome),
        },
        "one_step_floor": {lengths: one_step_floor(model, lengths) for model, lengths in _floors()},
    }  # fmt: skip


def _floors() -> list[tuple[Model, str]]:
    return [("7B", FIGURE_17), *JUDGED_LENGTHS.items()]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Does the simulator tell what the paper measured?")
    parser.add_argument("--quick", action="store_true", help="fewer steps a run")
    quick, began = parser.parse_args().quick, time.monotonic()
    cores = len(os.sched_getaffinity(0))
    played = play_all(wanted_runs(quick), cores)
    show(found_with(played, JUDGED_LENGTHS), tuple(MODELS), "judged: figure 17's lengths, the 7B model with figure 2's")
    show(found_with(played, JUDGED_LENGTHS | {"7B": FIGURE_17}), ("7B",), "not judged: figure 17's lengths")
    machine = {
        "seconds": round(time.monotonic() - began), "cpu_seconds": round(sum(one.cpu_seconds for one in played.values())),
        "cores": cores, "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(judge(played) | machine))


if __name__ == "__main__":
    main()
