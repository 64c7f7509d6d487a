"""Which GPUs train and which generate: HybridFlow's mapping search, with the objective min max(T_train, T_generate).

(HybridFlow, arXiv 2409.19256, section 6.) A split's two times are estimated in closed form; the best splits are then played,
and on while the best of those is the outermost. Pure but for the playing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from laminar.errors import ConfigError
from laminar.simulate.from_config import Setting
from laminar.simulate.recorder import Outcome
from laminar.simulate.simulation import StandstillError, simulate
from laminar.simulate.workload import Workload

FEW = 16
"""So many splits are all played."""
STEP = 0.1
"""Of more, replicas between two that are played, and how much longer an estimate may be that is as good, as a share."""
SPREAD = 5
"""So many of the estimates that are as good as the best are played first."""
BISECTIONS = 50
GOOD_ENOUGH = 0.97
"""Share of the best throughput for which the smallest staleness bound is taken."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to divide the GPUs.

    Attributes:
        train_gpus, num_replicas: the division.
        train_seconds: of a step on the trainer alone.
        generate_seconds: of a step's trajectories on the replicas alone, without tails.
    """

    train_gpus: int
    num_replicas: int
    train_seconds: float
    generate_seconds: float

    @property
    def seconds(self) -> float:
        """Of a step, if both go on side by side."""
        return max(self.train_seconds, self.generate_seconds)


class Estimates:
    """Both times of a setting's splits in closed form.

    Args:
        setting: whose split does not matter.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._sampled, self._running = mean_lengths(setting.workload)

    def split(self, train_gpus: int, num_replicas: int) -> Split:
        """A split with its times."""
        return Split(train_gpus, num_replicas, self.train_seconds(train_gpus), self.generate_seconds(num_replicas))

    def train_seconds(self, num_gpus: int) -> float:
        """Of one step, the publishing stall included."""
        workload, cluster = self._setting.workload, self._setting.cluster
        tokens = workload.prompts_per_step * workload.group_size * (self._sampled + workload.given_tokens)
        return replace(cluster.trainer, num_gpus=num_gpus).seconds(tokens, 0) + cluster.transfers.publish_seconds

    def generate_seconds(self, num_replicas: int) -> float:
        """Of one step's trajectories on replicas that are never short of work.

        As many requests run as the cache, the engine, the in-flight limit and the staleness bound let, where the last two
        count those in their environments, too; contexts have the mean over a trajectory's life, in which long ones count for
        longer: prompt + E[L^2] / 2 E[L].
        """
        setting = self._setting
        workload, engine = setting.workload, setting.cluster.engine
        context = workload.given_tokens + self._running
        members = workload.members_per_group
        most_open = members * min(setting.system.max_in_flight_groups, setting.most_outstanding / num_replicas)
        running = min(
            max(1.0, min(engine.max_running, engine.capacity_tokens / context)),
            self._running_of(max(1.0, most_open), context),
        )
        step = engine.step_seconds(running, running * context)
        prefill = workload.given_tokens / members / engine.prefill_tokens_per_second
        num = workload.prompts_per_step * members / num_replicas
        return num * (self._sampled * step / running + prefill)

    def _running_of(self, most_open: float, context: float) -> float:
        """How many of so many open trajectories run: the share of their life that they are not in their environments.

        Each runs for sampled tokens x step seconds, and the step grows with those that run, less than in proportion.
        """
        away, engine = self._setting.workload.mean_away_seconds, self._setting.cluster.engine
        if not away:
            return most_open
        lowest, highest = 0.0, most_open
        for _ in range(BISECTIONS):
            running = (lowest + highest) / 2
            seconds = self._sampled * engine.step_seconds(running, running * context)
            if running * (seconds + away) < most_open * seconds:
                lowest = running
            else:
                highest = running
        return highest


def mean_lengths(workload: Workload) -> tuple[float, float]:
    """Mean sampled tokens of a trajectory, and of one that is looked at at a random moment of its life, E[L^2] / 2 E[L]."""
    shares = (np.arange(4000) + 0.5) / 4000
    lengths = np.minimum(workload.lengths.quantiles(shares), workload.max_new_tokens)
    return float(lengths.mean()), float((lengths**2).mean() / (2 * lengths.mean()))


def all_splits(setting: Setting, num_gpus: int) -> list[Split]:
    """Every division of so many GPUs into whole replicas and at least one trainer GPU, best estimate first.

    Raises:
        ConfigError: if there is none.
    """
    each, estimates = setting.cluster.engine.num_gpus, Estimates(setting)
    splits = [estimates.split(num_gpus - n * each, n) for n in range(1, (num_gpus - 1) // each + 1)]
    if not splits:
        raise ConfigError(f"{num_gpus} GPUs are too few: a replica needs {each}, and the trainer at least one")
    return sorted(splits, key=lambda split: (split.seconds, split.num_replicas))


@dataclass(frozen=True, slots=True)
class Played:
    """A split, and what it came to; None: no step of it ended in time."""

    split: Split
    outcome: Outcome | None

    @property
    def tokens_per_second(self) -> float:
        """Its throughput."""
        return self.outcome.tokens_per_second if self.outcome is not None else 0.0


def best_split(
    setting: Setting, num_gpus: int, say: Callable[[str], None] = lambda _: None
) -> tuple[Split, Outcome, list[Played]]:
    """The split with the highest played throughput, what it came to, and all that were played, by replicas.

    Args:
        setting: whose split does not matter.
        num_gpus: to be divided.
        say: told what is being played, before each.

    Raises:
        ConfigError: if there is no split.
        StandstillError: if under none of them a step ends in time.
    """
    splits = {split.num_replicas: split for split in all_splits(setting, num_gpus)}
    reasons: list[StandstillError] = []

    def play_split(num_replicas: int) -> Played:
        split = splits[num_replicas]
        say(f"playing {num_gpus} GPUs: {num_replicas} replicas, {split.train_gpus} GPUs train")
        try:
            return Played(split, play(setting.with_split(split.train_gpus, num_replicas).with_even_shares()))
        except StandstillError as error:
            reasons.append(error)
            return Played(split, None)

    played = search(list(splits), _first_played(list(splits.values())), play_split)
    best = max(played, key=lambda entry: entry.tokens_per_second)
    if best.outcome is None:
        raise reasons[0]
    return best.split, best.outcome, played


def _first_played(splits: list[Split]) -> list[int]:
    """Replicas of all splits if they are few, else of some whose estimates are about as good as the best."""
    if len(splits) <= FEW:
        return [split.num_replicas for split in splits]
    near = sorted(split.num_replicas for split in splits if split.seconds <= (1 + STEP) * splits[0].seconds)
    return list(dict.fromkeys(near[round(place * (len(near) - 1) / (SPREAD - 1))] for place in range(SPREAD)))


def search(numbers: list[int], first: list[int], play_number: Callable[[int], Played]) -> list[Played]:
    """Play numbers of replicas until the best lies between two that are worse; estimates know no tails.

    Args:
        numbers: of replicas that are possible, without gaps.
        first: those to begin with.
        play_number: plays one.

    Returns:
        What was played, by number of replicas.
    """
    lowest, highest, wanted = min(numbers), max(numbers), first
    played: dict[int, Played] = {}
    while wanted:
        played |= {number: play_number(number) for number in wanted}
        best = max(played, key=lambda number: played[number].tokens_per_second)
        step = max(1, round(best * STEP))
        below, above = max(lowest, best - step), min(highest, best + step)
        wanted = []
        if not any(below <= number < best for number in played) and below < best:
            wanted.append(below)
        if not any(best < number <= above for number in played) and above > best:
            wanted.append(above)
    return [played[number] for number in sorted(played)]


def play(setting: Setting) -> Outcome:
    """The setting's simulation.

    Raises:
        StandstillError: no step ends in time.
    """
    warm = max(1, setting.num_steps * 3 // 10)
    return simulate(
        setting.workload,
        setting.cluster,
        setting.system,
        seed=setting.seed,
        num_steps=setting.num_steps,
        warm_steps=warm,
    )


def best_bound(throughput_of: dict[int | None, float]) -> int | None:
    """The smallest staleness bound that gives up no more than 3 % of the best throughput; None is unbounded."""
    best = max(throughput_of.values())
    bounds = sorted(throughput_of, key=lambda bound: float("inf") if bound is None else bound)
    return next(bound for bound in bounds if throughput_of[bound] >= GOOD_ENOUGH * best)
