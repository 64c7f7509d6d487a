"""The benchmarks that start whole systems, in their shortest forms: what must hold whatever the machine's speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def last_line(*arguments, seconds):
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_systems_that_are_compared_are_as_stale_as_their_names_say():
    arms = last_line("benchmarks.systems", "--quick", "--time-factor=60", "--only=synchronous,one_step,ours_k1", seconds=400)
    by_name = {arm["system"]: arm for arm in arms}
    assert by_name["synchronous"]["staleness_shares"] == {"0": 1.0}
    assert by_name["one_step"]["staleness_shares"] == {"1": 1.0}
    assert by_name["ours_k1"]["staleness_max"] <= 1
    assert all(arm["evicted"] == arm["failed"] == 0 for arm in arms)


def test_a_short_soak_loses_nothing():
    told = last_line("benchmarks.soak", "--minutes=0.5", seconds=400)
    assert told["problems"] == []
    assert told["trained"] > 0


def test_ours_and_trl_train_the_tiny_task_side_by_side():
    pytest.importorskip("trl", reason="`make setup` installs it")
    told = last_line("benchmarks.trl", "--quick", "--models=tiny", "--seconds=4", seconds=500)
    by_side = {arm["side"]: arm for arm in told["arms"]}
    assert set(by_side) == {"ours", "trl", "trl_async"}
    assert all(arm["steps"] >= 1 and arm["start_up_seconds"] > 0 for arm in by_side.values())
    assert by_side["trl"]["staleness_max"] == 0
    assert max(by_side["ours"]["staleness_max"], by_side["trl_async"]["staleness_max"]) <= 4
