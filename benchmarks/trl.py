"""Ours beside TRL: `python -m benchmarks.trl [--quick] [--models tiny,smollm2] [--python INTERPRETER]`.

The same task, model, rewards, batch and loss (4 prompts of 8, tiny: 8; one update a step, clipped ratio, token mean, no KL;
uninformative groups are trained by both) on the same two cores: TRL 1.16.0's `GRPOTrainer`, unmodified, one process of two
threads on `transformers.generate`; TRL's `AsyncGRPOTrainer` on our engine, with shims (`trl_async_side`), one thread each;
ours, one worker's engine and one trainer of one thread each. Both asynchronous ones have `max_staleness` 4, and keep caches
when weights change. Each trains for a fixed time; start-up (until models are loaded and engines listen; ours: until the
first group is claimed) is told apart.

`tiny` is the 76k-parameter model, `smollm2` SmolLM2-135M on few-shot sums, both with answers of a few tokens;
`smollm2_tails` has 5 % of prompts whose answers go on for 64 tokens. Rewards are noted by one function on both sides.

Value: trained trajectories/s, ours over the better of the two, with tails, the median of the seeds' ratios. Bar: above 1,
and first at a mean reward of 0.6 over the last 256 sums (`trl_figures`). Trained tokens/s stand beside it: a trainer that
lets late answers go trains the short ones, which are quick.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trl_figures import Seen, Task, compare, merge_ages, report
from benchmarks.trl_task import COLUMNS, LONG_SHARE, with_long_tails
from laminar.json_lines import read_lines

ROOT = Path(__file__).resolve().parents[1]
TRL_SIDES = {"trl": ("benchmarks.trl_side", 2), "trl_async": ("benchmarks.trl_async_side", 1)}
"""Module and torch threads of each; the asynchronous one has an engine process of one thread beside it."""
QUICK_SECONDS = {"tiny": 15.0, "smollm2": 60.0, "smollm2_tails": 150.0}
FULL_SECONDS = {"tiny": 30.0, "smollm2": 300.0, "smollm2_tails": 300.0}
STOP_SECONDS = 240.0
"""For start-up, the last step and the end, beside the training time."""


SMOLLM2 = {
    "model": "models/smollm2-135m", "rows": "models/addition/train.jsonl", "learning_rate": 1e-5,
    "stop_token_ids": (198, 1116),
}  # fmt: skip
TASKS = {
    "tiny": Task("tiny", "models/tiny", "models/tiny/train.jsonl", 8, 3e-3, (14,), prompts_per_step=8),
    "smollm2": Task("smollm2", max_new_tokens=6, **SMOLLM2),  # type: ignore[arg-type]
    "smollm2_tails": Task("smollm2_tails", max_new_tokens=64, has_tails=True, **SMOLLM2),  # type: ignore[arg-type]
}


class SideError(Exception):
    """A side told nothing that could be compared."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One training of one side, and where it writes."""

    task: Task
    seed: int
    seconds: float
    folder: Path

    @property
    def notes(self) -> Path:
        """What the reward noted."""
        return self.folder / "notes.jsonl"

    def write_rows(self) -> Path:
        """The data, with every column in every row."""
        rows = read_lines(ROOT / self.task.rows)
        rows = with_long_tails(rows, LONG_SHARE if self.task.has_tails else 0.0, self.seed)
        path = self.folder / "rows.jsonl"
        full = [{"prompt": row["prompt"], **dict.fromkeys(COLUMNS, ""), **row, "log": str(self.notes)} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in full))
        return path


# -- TRL ---------------------------------------------------------------------------------------------------------------


def run_trl(arm: Arm, python: str, side: str) -> dict[str, Any]:
    """Train with TRL, side `trl` or `trl_async`; what all sides report.

    Its model folder is ours but for the ids that end an answer, which TRL reads from `generation_config.json`.
    """
    module, threads = TRL_SIDES[side]
    model = arm.folder / "model"
    model.mkdir()
    for file in (ROOT / arm.task.model).iterdir():
        (model / file.name).symlink_to(file.resolve())
    ends = json.loads((model / "generation_config.json").read_text())
    own = ends.get("eos_token_id")
    ends["eos_token_id"] = [*([own] if isinstance(own, int) else own or []), *arm.task.stop_token_ids]
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text(json.dumps(ends))
    told = arm.folder / "told.jsonl"
    task = {
        "model": str(model), "rows": str(arm.write_rows()), "told": str(told), "seconds": arm.seconds, "seed": arm.seed,
        "threads": threads, "clip_high": 0.28, "stop_token_ids": arm.task.stop_token_ids,
        "prompts_per_step": arm.task.prompts_per_step, "group_size": arm.task.group_size,
        "max_new_tokens": arm.task.max_new_tokens, "learning_rate": arm.task.learning_rate,
    }  # fmt: skip
    (arm.folder / "task.json").write_text(json.dumps(task))
    begun = time.time()
    run_process([python, "-m", module, str(arm.folder / "task.json")], arm, {"OMP_NUM_THREADS": str(threads)})
    lines = read_lines(told)
    steps = [(line["step"], line["at"]) for line in lines if "step" in line]
    ages = [
        (line["sample/staleness_mean"], line["sample/staleness_max"]) for line in lines if "sample/staleness_max" in line
    ]
    tokens = [line["sample/trained_tokens_mean"] for line in lines if "sample/trained_tokens_mean" in line]
    if len(steps) < 2 or not tokens:
        raise SideError(f"{module} ended without a step")
    seen = Seen(
        side, begun, steps[0][1], steps[1:], *(merge_ages(ages) if ages else (0.0, 0)), mean_tokens=statistics.fmean(tokens)
    )
    return report(arm.task, arm.seed, seen, read_lines(arm.notes))


# -- ours --------------------------------------------------------------------------------------------------------------


def ours_config(arm: Arm, rows: Path) -> str:
    """The run as TOML."""
    task = arm.task
    longest = 64 + task.max_new_tokens
    return f"""
[run]
name = "ours"
directory = "{arm.folder}"
max_steps = 100000
max_train_seconds = {arm.seconds}
seed = {arm.seed}
[model]
path = "{ROOT / task.model}"
[data]
path = "{rows}"
max_prompt_tokens = 64
seed = {arm.seed}
[[rewards]]
kind = "trl_task:score"
[rollout]
group_size = {task.group_size}
max_new_tokens = {task.max_new_tokens}
[rollout.sampling]
stop_token_ids = {list(task.stop_token_ids)}
[rollout.engine]
swap = "in_place"
max_running = 64
max_cached_tokens = {64 * longest}
[trainer]
prompts_per_step = {task.prompts_per_step}
learning_rate = {task.learning_rate}
[trainer.algorithm.options]
filter_zero_variance = false
[staleness]
max_staleness = 4
[checkpoint]
every_steps = 100000
keep = 1
[metrics]
trajectory_rate = 0.0
panel = "off"
"""


def run_ours(arm: Arm) -> dict[str, Any]:
    """Train with ours."""
    file = arm.folder / "run.toml"
    file.write_text(ours_config(arm, arm.write_rows()))
    shutil.copy(ROOT / "benchmarks" / "trl_task.py", arm.folder)
    begun = time.time()
    run_process([sys.executable, "-m", "laminar.cli.main", "run", str(file)], arm, {"OMP_NUM_THREADS": "1"})
    (metrics,) = arm.folder.glob("*/metrics.jsonl")
    lines = [line for line in read_lines(metrics) if line["kind"] == "step"]
    task, ages = arm.task, dict[int, float]()
    for line in lines:
        for name, count in line.items():
            if name.startswith("staleness/histogram_"):
                age = int(name.rsplit("_", 1)[1])
                ages[age] = ages.get(age, 0.0) + count
    seen = Seen(
        "ours", begun, lines[0]["time"] - lines[0]["time/step_seconds"], [(line["step"], line["time"]) for line in lines],
        sum(age * count for age, count in ages.items()) / sum(ages.values()), max(ages),
        sum(line["train/tokens"] for line in lines) / len(lines) / (task.prompts_per_step * task.group_size),
    )  # fmt: skip
    return report(arm.task, arm.seed, seen, read_lines(arm.notes))


def run_process(command: Sequence[str], arm: Arm, variables: dict[str, str]) -> None:
    """Run one side to its end; its output goes to a file.

    Raises:
        SideError: it failed, or was not done in time; carries its last words.
    """
    output = arm.folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, **variables}, start_new_session=True
        )
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(arm.seconds + STOP_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        end = "was not done in time" if code is None else f"ended with {code}"
        raise SideError(f"{command[2]} {end}: {output.read_text()[-1000:]}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Ours beside TRL.")
    parser.add_argument("--quick", action="store_true", help="one seed, and fewer seconds a side")
    parser.add_argument("--sides", default="trl,ours,trl_async", help="who trains, with commas")
    parser.add_argument("--models", default="tiny,smollm2,smollm2_tails", help="tasks, with commas")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has trl==1.16.0 and accelerate")
    parser.add_argument("--seeds", type=int, help="how many: 5, with --quick 1")
    parser.add_argument("--seconds", type=float, help="training time of a side, instead of the default")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no child is left
    seeds = range(arguments.seeds or (1 if arguments.quick else 5))
    sides = arguments.sides.split(",")
    arms: list[dict[str, Any]] = []
    for seed in seeds:
        for place, name in enumerate(arguments.models.split(",")):
            usual = (QUICK_SECONDS if arguments.quick else FULL_SECONDS)[name]
            for side in sides if (place + seed) % 2 == 0 else sides[::-1]:
                with tempfile.TemporaryDirectory(prefix="laminar-trl-") as folder:
                    arm = Arm(TASKS[name], seed, arguments.seconds or usual, Path(folder))
                    try:
                        arms.append(run_ours(arm) if side == "ours" else run_trl(arm, arguments.python, side))
                    except SideError as error:
                        arms.append({"side": side, "task": name, "seed": seed, "failed": str(error)})
                print(json.dumps(arms[-1]), flush=True)
    print(json.dumps(compare(arms)))


if __name__ == "__main__":
    main()
