"""Logs of others are rotated while they are written; a disk that runs low is told of, not too often."""

import json
import shutil
from collections import namedtuple

from laminar.cluster.housekeeping import LOW_AGAIN_SECONDS, Housekeeper, rotate_logs
from laminar.trajectories import STEPS, append_step


def test_a_log_that_an_appending_writer_keeps_open_is_rotated_and_two_old_ones_are_kept(tmp_path):
    log = tmp_path / "rollout-0-engine.log"
    with log.open("ab", buffering=0) as writer:
        for part in (b"one ", b"two ", b"three ", b"four "):
            writer.write(part * 30)
            assert rotate_logs(tmp_path, 50) == [log]
            assert log.read_bytes() == b""
        writer.write(b"five")
    assert rotate_logs(tmp_path, 50) == []
    kept = {path.name: path.read_bytes().split()[0] for path in tmp_path.iterdir()}
    assert kept == {"rollout-0-engine.log": b"five", "rollout-0-engine.log.1": b"four", "rollout-0-engine.log.2": b"three"}


Usage = namedtuple("Usage", "total used free")


class Telemetry:
    def __init__(self):
        self.texts = []

    async def emit(self, kind, metrics=None, *, fields=None):
        self.texts.append(fields["text"])


async def test_a_disk_that_runs_low_is_told_of_once_an_hour(tmp_path, monkeypatch):
    free = {tmp_path: 40 * 10**9, tmp_path / "shm": 60 * 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**12, 0, free[place]))
    telemetry, said = Telemetry(), []
    keeper = Housekeeper([], list(free), telemetry, said.append)
    for now in (0.0, 10.0, LOW_AGAIN_SECONDS):
        await keeper.watch_disks(now)
    assert telemetry.texts == said == [f"disk low: 40.0 GB of 1000.0 GB are free in {tmp_path}; make room"] * 2


def test_the_list_of_trained_groups_is_bounded_and_keeps_the_newest(tmp_path):
    for step in range(1, 101):
        append_step(tmp_path, step, {"00000001": 8}, max_bytes=1000)
    steps = [json.loads(line)["step"] for line in (tmp_path / STEPS).read_text().splitlines()]
    assert (tmp_path / STEPS).stat().st_size <= 1000
    assert steps == list(range(steps[0], 101))
