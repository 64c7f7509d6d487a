"""What a person should look at now (pure): each alert says what is wrong and what to do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from laminar.telemetry.clock import SILENT_SECONDS
from laminar.types import EvictionReason

MAX_FAILED_RATIO = 0.1
MAX_TRUNCATED_RATIO = 0.5
MAX_DROPPED_RATIO = 0.3
MIN_FREE_RATIO = 0.05
SLOW_STEPS = 5.0
RECENT_STEPS = 20
"""Steps that a mean of `Facts` goes over."""
EARLIER_STEPS = 50
"""How many steps `Facts.earlier` lies back."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert; `level` is `critical` or `warning`, `subject` tells alerts of one name apart."""

    level: str
    name: str
    text: str
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What alerts are judged by.

    Attributes:
        is_alive: whether the run is; a run that has ended has silent roles and that is right.
        silent: seconds since each role was heard of.
        latest: metrics of the newest step.
        earlier: metrics of a step some time before, for what is counted since the start.
        seconds_since_step: None before the first of this life.
        mean_step_seconds: None before the first.
        free_disk_ratio: of the disk that holds the run folder.
        mismatch_alarm: `trainer.mismatch_alarm`, in nats a token.
        trainer_wait: what the trainer waits for.
    """

    is_alive: bool
    silent: Mapping[str, float]
    latest: Mapping[str, float]
    earlier: Mapping[str, float]
    seconds_since_step: float | None
    mean_step_seconds: float | None
    free_disk_ratio: float
    mismatch_alarm: float
    trainer_wait: str = ""
    is_paused: bool = False


def find_alerts(facts: Facts) -> Sequence[Alert]:
    """All that is wrong, the worst first."""
    found = [alert for rule in (_roles, _progress, _learning, _losses, _disk) for alert in rule(facts)]
    return sorted(found, key=lambda alert: alert.level != "critical")


def _roles(facts: Facts) -> Iterator[Alert]:
    for role, seconds in sorted(facts.silent.items()) if facts.is_alive else ():
        if seconds > SILENT_SECONDS:
            yield Alert(
                "critical",
                "role_silent",
                f"{role} has been silent for {seconds:.0f} s; it is restarted, or see logs/{role}.log",
                role,
            )


def _progress(facts: Facts) -> Iterator[Alert]:
    if not facts.is_alive or facts.is_paused or facts.seconds_since_step is None or not facts.mean_step_seconds:
        return
    if facts.seconds_since_step > max(60.0, SLOW_STEPS * facts.mean_step_seconds):
        waits = f"; the trainer waits for {facts.trainer_wait}" if facts.trainer_wait else ""
        yield Alert(
            "warning",
            "no_progress",
            f"no step has ended for {facts.seconds_since_step:.0f} s, a step took {facts.mean_step_seconds:.1f} s{waits}",
        )


def _learning(facts: Facts) -> Iterator[Alert]:
    kl = facts.latest.get("mismatch/kl_staleness_0", 0.0)  # of older tokens it is large for their age alone
    if kl > facts.mismatch_alarm:
        yield Alert(
            "warning",
            "mismatch",
            f"rollout and trainer log-probs of tokens of the newest weights differ by a KL of {kl:.3g}, above "
            f"trainer.mismatch_alarm = {facts.mismatch_alarm:g}; compare temperature, number type and weights of the two",
        )
    skipped = _since(facts, "train/skipped_steps")
    if skipped:
        yield Alert(
            "warning", "skipped_steps", f"{skipped:.0f} steps were skipped lately; look for NaN in the trainer's log"
        )
    if facts.latest.get("reward/zero_std_ratio", 0.0) >= 1.0:
        yield Alert(
            "warning", "no_signal", "all groups of the last step have equal rewards: nothing is learned; change the task mix"
        )
    truncated = facts.latest.get("rollout/truncated_ratio", 0.0)
    if truncated > MAX_TRUNCATED_RATIO:
        yield Alert(
            "warning",
            "truncated",
            f"{100 * truncated:.0f} % of answers are cut by the length limit; raise rollout.max_new_tokens",
        )


def _losses(facts: Facts) -> Iterator[Alert]:
    admitted = _since(facts, "experience/admitted")
    if admitted <= 0:
        return
    failed = _since(facts, "experience/failed")
    dropped = sum(_since(facts, f"experience/evictions_{reason}") for reason in EvictionReason if reason.is_for_age)
    if failed > MAX_FAILED_RATIO * admitted:
        yield Alert(
            "warning", "failures", f"{failed:.0f} of the last {admitted:.0f} trajectories failed; look at the failed ones"
        )
    if dropped > MAX_DROPPED_RATIO * admitted:
        yield Alert(
            "warning",
            "dropped",
            f"{dropped:.0f} of the last {admitted:.0f} trajectories were evicted for their age; "
            "raise staleness.max_staleness",
        )


def _disk(facts: Facts) -> Iterator[Alert]:
    if facts.free_disk_ratio < MIN_FREE_RATIO:
        yield Alert(
            "critical",
            "disk_low",
            f"only {100 * facts.free_disk_ratio:.1f} % of the run folder's disk is free; checkpoints will fail",
        )


def _since(facts: Facts, name: str) -> float:
    return facts.latest.get(name, 0.0) - facts.earlier.get(name, 0.0)
