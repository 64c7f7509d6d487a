"""Writes a sample of what a worker played into the run's folder, for people to read (`laminar.trajectories` reads it).

Invariants: playing never waits for it: what comes faster than it can be written is left out, and counted; groups are sampled
whole, by a hash of their id, so siblings can be compared; a full disk costs records, never the run.
"""

import asyncio
import gzip
import json
import logging
import math
from collections import deque
from pathlib import Path

import xxhash

from laminar.trajectories import FORMAT_VERSION, Record
from laminar.types import Chain, Segment, Trajectory
from laminar.whole_file import append_whole
from rollout.tokens import Tokenizer

logger = logging.getLogger("laminar.rollout.trajectories")

WRITE_SECONDS = 1.0
MAX_WAITING = 512
FILE_BYTES = 4 * 1024**2


class TrajectoryLog:
    """One worker's records.

    Args:
        folder: of the run's records.
        worker: names the files.
        tokenizer: turns ids into text.
        rate: share of groups that are kept, 0 to 1.
        max_bytes: of all this worker's files; the oldest are deleted.

    Attributes:
        left_out: trajectories that came too fast.
    """

    def __init__(self, folder: Path, worker: str, tokenizer: Tokenizer, *, rate: float, max_bytes: int) -> None:
        self._folder, self._worker, self._tokenizer = folder, worker, tokenizer
        self._rate, self._max_bytes = rate, max_bytes
        self._waiting: deque[Trajectory] = deque()
        self.left_out = 0

    def add(self, trajectory: Trajectory) -> None:
        """Keep a trajectory, if its group is in the sample."""
        if not is_sampled(trajectory.group_id, self._rate):
            return
        if len(self._waiting) >= MAX_WAITING:
            self.left_out += 1
            return
        self._waiting.append(trajectory)

    async def run(self) -> None:
        """Write what was added, until cancelled.

        Consumes: added trajectories. Produces: gzip members. Waits for: the next moment to write.
        """
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            if self._waiting:
                await asyncio.to_thread(self.write)

    def write(self) -> None:
        """Write what is waiting."""
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        lines = "".join(json.dumps(as_record(trajectory, self._tokenizer)) + "\n" for trajectory in batch)
        try:
            self._folder.mkdir(exist_ok=True)
            append_whole(self._file(), gzip.compress(lines.encode(), compresslevel=5))
            self._prune()
        except OSError as error:
            self.left_out += len(batch)
            logger.warning("trajectory records cannot be written (%s); %d left out so far", error, self.left_out)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._worker}-[0-9]*.jsonl.gz"))

    def _file(self) -> Path:
        """The newest file, or the next one if that is full."""
        files = self._files()
        number = int(files[-1].name.removesuffix(".jsonl.gz").rpartition("-")[2]) if files else 0
        if files and files[-1].stat().st_size >= min(FILE_BYTES, self._max_bytes // 4):
            number += 1
        return self._folder / f"{self._worker}-{number:05d}.jsonl.gz"

    def _prune(self) -> None:
        files = self._files()
        while len(files) > 1 and sum(file.stat().st_size for file in files) > self._max_bytes:
            files.pop(0).unlink()


def is_sampled(group_id: str, rate: float) -> bool:
    """Whether a group belongs to the sample: always the same answer, for all its members."""
    return xxhash.xxh3_64_intdigest(group_id.encode()) < rate * 2**64


def as_record(trajectory: Trajectory, tokenizer: Tokenizer) -> Record:
    """The trajectory as JSON values; log-probs to four digits."""
    oldest, newest, timings = trajectory.oldest, trajectory.newest, trajectory.timings
    failure = trajectory.failure
    return {
        "format_version": FORMAT_VERSION,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "attempt": trajectory.attempt,
        "purpose": trajectory.purpose,
        "worker": trajectory.worker,
        "time": round(timings.started_at + timings.total_seconds, 3),
        "reward": trajectory.reward,
        "reward_terms": trajectory.reward_terms,
        "failure": None if failure is None else {"kind": failure.kind, "text": failure.text},
        "finish_reason": trajectory.finish_reason,
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "oldest": -1 if oldest is None else oldest.number,
        "newest": -1 if newest is None else newest.number,
        "sampling": {"temperature": trajectory.sampling.temperature, "seed": trajectory.sampling.seed},
        "timings": {
            "generate": round(timings.generate_seconds, 4),
            "environment": round(timings.environment_seconds, 4),
            "reward": round(timings.reward_seconds, 4),
            "total": round(timings.total_seconds, 4),
        },
        "turns": [[turn.chain, turn.start, turn.end, turn.finish_reason] for turn in trajectory.turns],
        "chains": [_chain(chain, tokenizer) for chain in trajectory.chains],
    }


def _chain(chain: Chain, tokenizer: Tokenizer) -> list[Record]:
    return [_segment(segment, tokenizer) for segment in chain.segments]


def _segment(segment: Segment, tokenizer: Tokenizer) -> Record:
    logprobs = (
        None if segment.logprobs is None else [round(x, 4) if math.isfinite(x) else None for x in segment.logprobs.tolist()]
    )
    return {
        "version": None if segment.version is None else str(segment.version),
        "tokens": [tokenizer.decode([token_id], keep_special=True) for token_id in segment.token_ids.tolist()],
        "token_ids": segment.token_ids.tolist(),
        "logprobs": logprobs,
        "masked_head_tokens": segment.masked_head_tokens,
    }
