"""What one worker has done so far, as numbers; and when nearly everything it did has failed.

It does not know how groups are played or engines are kept alive.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from laminar.config.rollout import RolloutConfig
from laminar.errors import RunFailedError
from laminar.types import FailureKind, Trajectory
from rollout.engines.wire import EngineLoad
from rollout.failures import FailureWindow
from rollout.journal import Journal
from rollout.replica import Replica

logger = logging.getLogger("laminar.rollout.worker")

DECODE, PREFILL = "time/state_decode_seconds", "time/state_prefill_seconds"


class WorkerCounts:
    """Counts of one worker's life.

    Args:
        rollout: settings.
        clock: seconds, rising.
    """

    def __init__(self, rollout: RolloutConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_outcomes = FailureWindow(rollout.max_failure_ratio)
        self._failures: Counter[str] = Counter()
        self._num_ended = self._resumed_tokens = 0
        self._full_since: float | None = None
        self._producer_wait_seconds = 0.0
        self._tokens_of_dead_engines = self._engine_tokens = 0
        self._generating_seconds = self._prefill_seconds = 0.0
        self._engine_seconds = (0.0, 0.0)
        self.num_aborted = 0
        self.num_moved = 0

    def note_full_buffer(self, is_full: bool) -> None:
        """Count the time in which nothing could be claimed because the buffer's bytes were all reserved."""
        now = self._clock()
        if self._full_since is not None:
            self._producer_wait_seconds += now - self._full_since
        self._full_since = now if is_full else None

    def end_record(self, journal: Journal | None) -> None:
        """Count what needed not be sampled again; nothing more is put by."""
        if journal is not None:
            journal.close()
            self._resumed_tokens += journal.resumed_tokens

    def note_failure(self, trajectory: Trajectory) -> FailureKind | None:
        """Count and log a failed attempt; its kind, or None if it did not fail."""
        if trajectory.failure is None:
            return None
        self._failures[trajectory.failure.kind] += 1
        logger.warning("%s: %s: %s", trajectory.trajectory_id, trajectory.failure.kind, trajectory.failure.text)
        return trajectory.failure.kind

    def end(self, trajectory: Trajectory) -> None:
        """Count an outcome.

        Raises:
            RunFailedError: nearly all of the last ones failed for good.
        """
        self._num_ended += 1
        self._last_outcomes.note(trajectory.failure)
        if excess := self._last_outcomes.excess():
            raise RunFailedError(excess)

    def alarm(self) -> str:
        """News that many of the last trajectories failed for one reason; empty if there are none."""
        return self._last_outcomes.alarm()

    def engine_died(self) -> None:
        """Keep the dead engine's tokens in the sum."""
        self._tokens_of_dead_engines, self._engine_tokens = self._tokens_of_dead_engines + self._engine_tokens, 0

    def split_generating(self, states: Mapping[str, float], load: EngineLoad | None) -> dict[str, float]:
        """The clock's seconds with `decode` split into `prefill` and `decode`; the sum stays.

        Both share an engine's steps, so the engine's own seconds since the last call split the time in which it generated.
        """
        generating = states.get(DECODE, 0.0)
        if load is not None:
            before, self._engine_seconds = self._engine_seconds, (load.prefill_seconds, load.decode_seconds)
            prefill, decode = (max(0.0, now - then) for now, then in zip(self._engine_seconds, before, strict=True))
            if prefill + decode > 0:
                self._prefill_seconds += (generating - self._generating_seconds) * prefill / (prefill + decode)
            self._generating_seconds = generating
        return {**states, PREFILL: self._prefill_seconds, DECODE: generating - self._prefill_seconds}

    def metrics(self, replica: Replica, load: EngineLoad | None) -> dict[str, float]:
        """Everything as declared metrics; `load` is None while the engine does not answer."""
        metrics: dict[str, Any] = {
            "worker/open_trajectories": len(replica.berths.occupants),
            "worker/guest_trajectories": sum(occupant.is_guest for occupant in replica.berths.occupants),
            "worker/finished_trajectories": self._num_ended,
            "worker/aborted_trajectories": self.num_aborted,
            "worker/moved_trajectories": self.num_moved,
            "worker/version_number": -1 if replica.version is None else replica.version.number,
            "experience/producer_wait_seconds": self._producer_wait_seconds,
            "worker/resumed_tokens": self._resumed_tokens,
            "worker/engine_restarts": replica.restarts,
            "worker/rejected_weights": replica.quarantine.num_rejections,
            "weights/swap_seconds": replica.last_swap_seconds,
            **{f"rollout/failures_{kind}": count for kind, count in self._failures.items()},
        }
        if replica.asked_tokens:
            metrics["engine/prefix_hit_ratio"] = replica.cached_tokens / replica.asked_tokens
        if replica.last_pull is not None:
            seconds, num_bytes = replica.last_pull
            metrics |= {"weights/pull_seconds": seconds, "weights/pull_bytes_per_second": num_bytes / max(seconds, 1e-9)}
        if replica.last_verdict is not None and replica.last_verdict.difference is not None:
            metrics["weights/probe_difference_nats"] = replica.last_verdict.difference
        if load is not None:
            self._engine_tokens = load.generated_tokens
            metrics["engine/running"] = load.running
            metrics["engine/waiting"] = load.waiting
            metrics["engine/preempted_requests"] = load.num_retractions
            metrics["engine/kv_use_ratio"] = load.used_tokens / max(load.capacity_tokens, 1)
        metrics["engine/generated_tokens"] = self._tokens_of_dead_engines + self._engine_tokens
        return metrics
