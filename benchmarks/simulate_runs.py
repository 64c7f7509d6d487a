"""The paper's runs that `benchmarks.simulate` needs, each played once, on all cores.

A run that answers two questions (the 7B model on 64 GPUs is a point of figure 11 and all of figure 10) is one run, with the
steps that the more demanding of them takes. It knows the paper's settings, and nothing of what the paper measured with them.
"""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.simulate.cluster import Failure
from laminar.simulate.paper import MODELS, Model, paper_cluster, paper_system, paper_workload
from laminar.simulate.recorder import Outcome
from laminar.simulate.simulation import simulate
from laminar.simulate.system import Kind

PAPER: dict[str, Any] = json.loads((Path(__file__).parent / "paper_figures.json").read_text())
KINDS: tuple[Kind, ...] = ("synchronous", "one_step", "stream", "partial", "laminar")
NUM_SCALES = 5
FIGURE_2, FIGURE_17 = "AIME", "7B_math"
JUDGED_LENGTHS: dict[Model, str] = {model: facts.lengths for model, facts in MODELS.items()} | {"7B": FIGURE_2}
"""Figure 17's, but for the 7B model figure 2's; `benchmarks.simulate` says why."""
Point = tuple[Model, Kind, int]
"""Of figure 11: model, system and index of the scale."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the paper.

    Attributes:
        model, kind: which model, by which system.
        index: of the scale in figure 11 and table 2.
        lengths: name of its answer lengths.
        repack: of ours.
        failures: of replicas.
    """

    model: Model
    kind: Kind
    index: int
    lengths: str
    repack: bool = True
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a run, and the CPU time that playing it took, in seconds of one process."""

    outcome: Outcome
    cpu_seconds: float


def run_of(point: Point, lengths: str | None = None) -> Run:
    """The run of a point of figure 11, with the lengths that are judged, or others."""
    model, kind, index = point
    return Run(model, kind, index, lengths or JUDGED_LENGTHS[model])


POINTS: tuple[Point, ...] = tuple((model, kind, index) for model in MODELS for kind in KINDS for index in range(NUM_SCALES))
STALENESS, STALENESS_BESIDE = (run_of(("7B", "laminar", 2), lengths) for lengths in (FIGURE_2, FIGURE_17))
REPACKING = run_of(("32B", "laminar", 2))
NOT_REPACKING = Run("32B", "laminar", 2, JUDGED_LENGTHS["32B"], repack=False)
LARGEST = run_of(("72B", "laminar", 4))
"""1,024 GPUs."""
FAILURE_SECONDS = 2000.0
"""When figure 15's machine is lost."""
FAILING = Run(
    "32B", "laminar", 2, JUDGED_LENGTHS["32B"],
    failures=(Failure(FAILURE_SECONDS, (0, 1), float(PAPER["figure_15_failure_32B_128_gpus"]["recovery_seconds"])),),
)  # fmt: skip


def wanted_runs(quick: bool) -> dict[Run, tuple[int, int]]:
    """Steps and warm-up of every run.

    A lockstep system's steps are alike; an asynchronous one has to find its rhythm; without repack steps differ twofold.
    """
    lockstep, asynchronous = ((3, 1), (7, 3)) if quick else ((7, 1), (14, 4))
    steps = {run_of(point): asynchronous if point[1] in ("partial", "laminar") else lockstep for point in POINTS}
    steps |= {run_of(point, FIGURE_17): steps[run_of(point)] for point in POINTS if point[0] == "7B"}
    steps |= dict.fromkeys((STALENESS, STALENESS_BESIDE), (11, 3) if quick else (20, 4))
    steps |= dict.fromkeys((REPACKING, NOT_REPACKING), (16, 4) if quick else (40, 4))
    return steps | {FAILING: (9, 2), LARGEST: (10, 3)}


def split(model: Model, kind: Kind, index: int) -> tuple[int, int]:
    """GPUs that train and that generate at the scale of that index (table 2); synchronous: all do both."""
    if kind == "synchronous":
        total = PAPER["figure_11_tokens_per_second"][model]["gpus"][index]
        return total, total
    table = PAPER["table_2_train_and_rollout_gpus"]
    train, rollout = table[kind if kind in ("laminar", "partial") else "lockstep"][model][index]
    return train, rollout


def play(run: Run, num_steps: int, warm_steps: int, seed: int = 0) -> Played:
    """One run; with failures, its generation curve too."""
    began = time.process_time()
    cluster = paper_cluster(run.model, *split(run.model, run.kind, run.index), run.failures)
    system = paper_system(run.kind, cluster.num_replicas, repack=run.repack)
    workload = paper_workload(run.model, run.lengths)
    steps = {"num_steps": num_steps, "warm_steps": warm_steps}
    outcome = simulate(workload, cluster, system, seed=seed, curve=bool(run.failures), **steps)
    return Played(outcome, time.process_time() - began)


def play_all(wanted: dict[Run, tuple[int, int]], cores: int) -> dict[Run, Played]:
    """Every run, in as many processes as there are cores, the long ones first; progress goes to stderr."""
    order = sorted(wanted, key=lambda run: (KINDS.index(run.kind), wanted[run]), reverse=True)
    played: dict[Run, Played] = {}
    with ProcessPoolExecutor(cores) as pool:
        futures = [pool.submit(play, run, *wanted[run]) for run in order]
        for run, future in zip(order, futures, strict=True):
            played[run] = future.result()
            where = f"{len(played)}/{len(order)} {run.model} {run.lengths} {run.kind} {run.index}"
            told = f"{played[run].outcome.tokens_per_second:,.0f} tokens/s in {played[run].cpu_seconds:.1f} s"
            print(f"{where}: {told}", file=sys.stderr, flush=True)
    return played
