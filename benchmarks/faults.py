"""Is anything lost or trained twice when processes die? `python -m benchmarks.faults [--rounds N] [--seed S] [--quick]`.

A round is one run of the tiny recipe to its end, in which one or two processes are killed with SIGKILL: worker, engine,
trainer, relay or Redis server, at random moments, also while it is being restarted. Then the run's committed history
(checkpoints and replay spool) is audited. The printed value is the number of prompts lost or trained twice, of steps missing
in `metrics.jsonl` or told twice, and of runs that did not end or left something behind. Bar: 0. `--quick`: as many rounds as
end within 55 s, at least one.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.run_audit import history_problems
from benchmarks.run_processes import ROLES, ROOT, kill_role, make_tiny_model, told_roles, told_steps
from laminar.run_folder import RunFolder

MAX_STEPS = 30
STEP_TRAJECTORIES = 8 * 8
SETTINGS = (
    f"run.max_steps={MAX_STEPS}",
    "checkpoint.every_steps=4",
    "rollout.lease_seconds=4",
    "trainer.algorithm.options.filter_zero_variance=false",
    "eval.path=''",
)
RUN_SECONDS = 300.0
APPEAR_SECONDS = 30.0
"""A role that is to be killed while it is being started is waited for so long."""
QUICK_SECONDS = 55.0


class Round:
    """One run under fire."""

    def __init__(self, directory: Path, rng: random.Random, kills: int) -> None:
        self._directory, self._rng = directory, rng
        self._marks = sorted((rng.randrange(MAX_STEPS - 4), rng.choice(ROLES), rng.random()) for _ in range(kills))
        self.killed: list[str] = []
        self.problems: list[str] = []
        self.seconds = 0.0

    def run(self) -> None:
        """Start it, kill, wait for its end, audit it."""
        started = time.monotonic()
        command = [sys.executable, "-m", "laminar.cli.main", "run", "deploy/recipes/tiny.toml", *SETTINGS]
        command.append(f"run.directory={self._directory}")
        output = self._directory / "output.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with output.open("w") as file:
            run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            for step, role, delay in self._marks:
                if self._wait_for_step(step, run, started):
                    time.sleep(delay)
                    self._kill(role)
            code: int | None = run.wait(max(1.0, started + RUN_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        self.seconds = time.monotonic() - started
        if code != 0:
            last = output.read_text().strip().splitlines()[-3:]
            self.problems.append(f"the run {'did not end' if code is None else f'ended with {code}'}: {' / '.join(last)}")
        self._audit()

    @property
    def _folder(self) -> RunFolder | None:
        paths = [path for path in self._directory.iterdir() if path.is_dir()]
        return RunFolder(paths[0]) if paths else None

    def _wait_for_step(self, step: int, run: "subprocess.Popen[bytes]", started: float) -> bool:
        """Whether the run got there; at step 0, whether its trainer was started."""
        while run.poll() is None and time.monotonic() < started + RUN_SECONDS:
            folder = self._folder
            if folder is not None and (
                "trainer-0" in told_roles(folder) if step == 0 else max(told_steps(folder), default=0) >= step
            ):
                return True
            time.sleep(0.02)
        return False

    def _kill(self, role: str) -> None:
        folder = self._folder
        assert folder is not None
        if kill_role(folder, role, APPEAR_SECONDS):
            self.killed.append(role)

    def _audit(self) -> None:
        folder = self._folder
        if folder is None:
            return
        rows = (ROOT / "models" / "tiny" / "train.jsonl").read_text().splitlines()
        self.problems += history_problems(folder, len(rows), num_steps=MAX_STEPS, step_trajectories=STEP_TRAJECTORIES)


def main() -> int:
    """Print one JSON line last; exit code 0 whatever the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="as many rounds as end within 55 s")
    arguments = parser.parse_args()
    rng, started, longest = random.Random(arguments.seed), time.monotonic(), 0.0
    make_tiny_model()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="laminar-faults-") as scratch:
        while len(rounds) < arguments.rounds:
            if arguments.quick and rounds and time.monotonic() - started + longest > QUICK_SECONDS:
                break
            directory = Path(scratch) / f"round-{len(rounds)}"
            directory.mkdir()
            rounds.append(Round(directory, rng, kills=1 if arguments.quick else rng.choice((1, 2))))
            rounds[-1].run()
            longest = max(longest, rounds[-1].seconds)
            last = rounds[-1]
            print(f"round {len(rounds)}: killed {', '.join(last.killed) or 'nobody'}; {last.seconds:.0f} s", flush=True)
            for problem in last.problems:
                print(f"  {problem}", flush=True)
    print(json.dumps(summary(rounds, time.monotonic() - started)))
    return 0


def summary(rounds: list[Round], seconds: float) -> dict[str, Any]:
    """The closing line."""
    problems = [problem for one in rounds for problem in one.problems]
    return {
        "name": "faults",
        "value": len(problems),
        "unit": "prompts lost or trained twice, steps missing or told twice, runs that did not end",
        "bar": 0,
        "holds": not problems,
        "rounds": len(rounds),
        "kills": Counter(role for one in rounds for role in one.killed),
        "problems": problems[:20],
        "seconds_per_round": [round(one.seconds, 1) for one in rounds],
        "seconds": round(seconds, 1),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
