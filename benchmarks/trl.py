"""Ours beside TRL: `python -m benchmarks.trl [--quick] [--models tiny,smollm2] [--python INTERPRETER]`.

The same task, model, rewards, batch and loss (4 prompts of 8, tiny: 8; one update a step, clipped ratio, token mean, no KL;
uninformative groups are trained by both) on the same two cores: TRL 1.16.0's `GRPOTrainer`, unmodified, one process of two
threads on `transformers.generate`; ours, one worker's engine and one trainer of one thread each, `max_staleness` 4. Each
trains for a fixed time; start-up (until the model is loaded; ours: until the first group is claimed) is told apart.

`tiny` is the 76k-parameter model, `smollm2` SmolLM2-135M on few-shot sums, both with answers of a few tokens;
`smollm2_tails` has 5 % of prompts whose answers go on for 64 tokens. Rewards are noted by one function on both sides.

Value: trained trajectories/s, ours over TRL, with tails. Bar: above 1, there and in the time to a mean reward of
`TARGET` over the last `WINDOW` sums.
"""

import argparse
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

from benchmarks.trl_task import COLUMNS, LONG_SHARE, with_long_tails

ROOT = Path(__file__).resolve().parents[1]
TARGET, WINDOW = 0.6, 64
STOP_SECONDS = 240.0
"""For start-up, the last step and the end, beside the training time."""


@dataclass(frozen=True, slots=True)
class Task:
    """What both train."""

    name: str
    model: str
    rows: str
    max_new_tokens: int
    learning_rate: float
    stop_token_ids: tuple[int, ...]
    prompts_per_step: int = 4
    group_size: int = 8
    has_tails: bool = False


SMOLLM2 = {
    "model": "models/smollm2-135m", "rows": "models/addition/train.jsonl", "learning_rate": 1e-5,
    "stop_token_ids": (198, 1116),
}  # fmt: skip
TASKS = {
    "tiny": Task("tiny", "models/tiny", "models/tiny/train.jsonl", 8, 3e-3, (14,), prompts_per_step=8),
    "smollm2": Task("smollm2", max_new_tokens=6, **SMOLLM2),  # type: ignore[arg-type]
    "smollm2_tails": Task("smollm2_tails", max_new_tokens=64, has_tails=True, **SMOLLM2),  # type: ignore[arg-type]
}


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
        rows = read_jsonl(ROOT / self.task.rows)
        rows = with_long_tails(rows, LONG_SHARE if self.task.has_tails else 0.0, self.seed)
        path = self.folder / "rows.jsonl"
        full = [{"prompt": row["prompt"], **dict.fromkeys(COLUMNS, ""), **row, "log": str(self.notes)} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in full))
        return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Its lines."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- TRL ---------------------------------------------------------------------------------------------------------------


def run_trl(arm: Arm, python: str) -> dict[str, Any]:
    """Train with TRL; what both sides report.

    Its model folder is ours but for the ids that end an answer, which TRL reads from `generation_config.json`.
    """
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
        "threads": 2, "clip_high": 0.28, "prompts_per_step": arm.task.prompts_per_step, "group_size": arm.task.group_size,
        "max_new_tokens": arm.task.max_new_tokens, "learning_rate": arm.task.learning_rate,
    }  # fmt: skip
    (arm.folder / "task.json").write_text(json.dumps(task))
    begun = time.time()
    run_process([python, "-m", "benchmarks.trl_side", str(arm.folder / "task.json")], arm, {"OMP_NUM_THREADS": "2"})
    steps = [(line["step"], line["at"]) for line in read_jsonl(told)]
    return report("trl", arm, begun, steps[0][1], steps[1:], {0: 1.0})


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
    lines = [line for line in read_jsonl(metrics) if line["kind"] == "step"]
    ages: dict[int, float] = {}
    for line in lines:
        for name, count in line.items():
            if name.startswith("staleness/histogram_"):
                age = int(name.rsplit("_", 1)[1])
                ages[age] = ages.get(age, 0.0) + count
    start = lines[0]["time"] - lines[0]["time/step_seconds"]
    return report("ours", arm, begun, start, [(line["step"], line["time"]) for line in lines], ages)


def run_process(command: Sequence[str], arm: Arm, variables: dict[str, str]) -> None:
    """Run one side to its end; its output goes to a file.

    Raises:
        RuntimeError: it failed; carries its last words.
    """
    output = arm.folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        code = process.wait(arm.seconds + STOP_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise RuntimeError(f"{command[2]} ended with {code}: {output.read_text()[-2000:]}")


# -- what was seen -----------------------------------------------------------------------------------------------------


def report(
    side: str, arm: Arm, begun: float, start: float, steps: Sequence[tuple[int, float]], ages: dict[int, float]
) -> dict[str, Any]:
    """One line of the comparison.

    Args:
        side: whose.
        arm: what ran.
        begun: Unix seconds when its process was started.
        start: when training began.
        steps: number and end of each step.
        ages: trained trajectories by staleness.
    """
    notes = [line for line in read_jsonl(arm.notes) if line["at"] <= steps[-1][1]]
    per_step = arm.task.prompts_per_step * arm.task.group_size
    seconds, samples = reached([line for line in notes if not line["long"]], TARGET, WINDOW)
    trained = len(steps) * per_step
    return {
        "side": side,
        "task": arm.task.name,
        "seed": arm.seed,
        "start_up_seconds": round(start - begun, 1),
        "seconds": round(steps[-1][1] - start, 1),
        "steps": len(steps),
        "trained_per_second": round(trained / (steps[-1][1] - start), 3),
        "seconds_to_reward": None if seconds is None else round(seconds - start, 1),
        "samples_to_reward": samples,
        "reward_first": round(statistics.fmean(line["score"] for line in notes[:WINDOW]), 3),
        "reward_last": round(statistics.fmean(line["score"] for line in notes[-WINDOW:]), 3),
        "untrained_share": round(max(0.0, 1 - trained / len(notes)), 3),
        "staleness_mean": round(sum(age * n for age, n in ages.items()) / sum(ages.values()), 2),
        "staleness_max": max(ages),
    }


def reached(notes: Sequence[dict[str, Any]], target: float, window: int) -> tuple[float | None, int | None]:
    """When, and after how many notes, the mean score of the last `window` first was at least `target`; None if never."""
    for end in range(window, len(notes) + 1):
        if statistics.fmean(note["score"] for note in notes[end - window : end]) >= target:
            return notes[end - 1]["at"], end
    return None, None


def compare(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line: ratios of medians by task, and whether ours is ahead with tails, in both respects."""
    ratios = {}
    for task in dict.fromkeys(arm["task"] for arm in arms):
        of_side = {side: [arm for arm in arms if arm["task"] == task and arm["side"] == side] for side in ("ours", "trl")}
        if all(of_side.values()):
            speed, delay = (
                {side: _median(found, name) for side, found in of_side.items()}
                for name in ("trained_per_second", "seconds_to_reward")
            )
            ratios[task] = {
                "trained_per_second": round(speed["ours"] / speed["trl"], 3),
                "reached_first": "ours"
                if delay["ours"] < delay["trl"]
                else "trl"
                if delay["trl"] < delay["ours"]
                else "nobody",
            }
    tails = ratios.get("smollm2_tails")
    return {
        "name": "trl", "value": tails and tails["trained_per_second"], "bar": 1.0,
        "unit": "trained trajectories/s, ours over TRL, 135M model, long tails",
        "holds": bool(tails and tails["trained_per_second"] > 1 and tails["reached_first"] == "ours"),
        "ratios": ratios, "target": TARGET, "cores": os.cpu_count(), "load": os.getloadavg()[0], "arms": list(arms),
    }  # fmt: skip


def _median(arms: Sequence[dict[str, Any]], name: str) -> float:
    """Of the seeds; one that never got there counts as infinitely late."""
    return statistics.median(float("inf") if arm[name] is None else arm[name] for arm in arms)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Ours beside TRL.")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, tiny 15 s and the others 70 s a side: about 8 minutes"
    )
    parser.add_argument("--models", default="tiny,smollm2,smollm2_tails", help="tasks, with commas")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has trl==1.16.0 and accelerate")
    parser.add_argument("--seconds", type=float, help="training time of a side, instead of the default")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no child is left
    seeds = (0,) if arguments.quick else (0, 1, 2, 3, 4)
    arms: list[dict[str, Any]] = []
    for seed in seeds:
        for place, name in enumerate(arguments.models.split(",")):
            usual = (15.0 if name == "tiny" else 70.0) if arguments.quick else (30.0 if name == "tiny" else 300.0)
            for side in ("trl", "ours") if (place + seed) % 2 == 0 else ("ours", "trl"):
                with tempfile.TemporaryDirectory(prefix="laminar-trl-") as folder:
                    arm = Arm(TASKS[name], seed, arguments.seconds or usual, Path(folder))
                    arms.append(run_trl(arm, arguments.python) if side == "trl" else run_ours(arm))
                print(json.dumps(arms[-1]), flush=True)
    print(json.dumps(compare(arms)))


if __name__ == "__main__":
    main()
