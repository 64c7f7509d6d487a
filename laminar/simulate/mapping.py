"""Which GPUs train and which generate: HybridFlow's mapping search, with the objective min max(T_train, T_generate).

(HybridFlow, arXiv 2409.19256, section 6.) A split's two times are estimated in closed form; the few best splits are then
played, and the best of those wins. Pure but for the playing.
"""

from dataclasses import dataclass, replace

import numpy as np

from laminar.errors import ConfigError
from laminar.simulate.from_config import Setting
from laminar.simulate.recorder import Outcome
from laminar.simulate.simulation import simulate
from laminar.simulate.workload import Workload

NUM_PLAYED = 3
"""Splits that are played."""
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

        As many requests run as the cache, the engine, the in-flight limit and the staleness bound let; their contexts have
        the mean over a trajectory's life, in which long ones count for longer: prompt + E[L^2] / 2 E[L].
        """
        setting = self._setting
        workload, engine = setting.workload, setting.cluster.engine
        context = workload.given_tokens + self._running
        running = min(
            float(engine.max_running),
            engine.capacity_tokens / context,
            float(setting.system.max_in_flight_groups * workload.group_size),
            setting.most_outstanding * workload.group_size / num_replicas,
        )
        running = max(1.0, running)
        step = engine.step_seconds(running, running * context)
        prefill = workload.given_tokens / workload.group_size / engine.prefill_tokens_per_second
        num = workload.prompts_per_step * workload.group_size / num_replicas
        return num * (self._sampled * step / running + prefill)


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


def best_split(setting: Setting, num_gpus: int) -> tuple[Split, Outcome, list[Split]]:
    """The split with the highest played throughput among the best estimates, what it came to, and all splits."""
    splits = all_splits(setting, num_gpus)
    played = []
    for split in spread(splits):
        outcome = play(setting.with_split(split.train_gpus, split.num_replicas).with_even_shares())
        played.append((outcome.tokens_per_second, split, outcome))
    _, split, outcome = max(played, key=lambda entry: entry[0])
    return split, outcome, splits


def spread(splits: list[Split]) -> list[Split]:
    """The best estimate, and splits with about a tenth of the replicas more and fewer: estimates know no tails."""
    best = splits[0]
    step = max(1, round(best.num_replicas * 0.1))
    wanted = {best.num_replicas + delta * step for delta in range(-(NUM_PLAYED // 2), NUM_PLAYED // 2 + 1)}
    return [split for split in splits if split.num_replicas in wanted]


def play(setting: Setting) -> Outcome:
    """The setting's simulation."""
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
