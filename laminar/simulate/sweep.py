"""Simulations of one config under several settings: `staleness.max_staleness=0,1,2,4` and numbers of GPUs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.simulate.from_config import Setting, setting_of
from laminar.simulate.mapping import Split, best_bound, best_split, play
from laminar.simulate.recorder import Outcome

MAX_SETTINGS = 200
DEFAULT_BOUNDS: tuple[int | None, ...] = (0, 1, 2, 4, 8)
BOUND = "staleness.max_staleness"


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated setting.

    Attributes:
        label: what was set, as on the command line; empty: the config as it is.
        setting: what was simulated.
        outcome: what it came to.
    """

    label: str
    setting: Setting
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set.

    Attributes:
        num_gpus: for which.
        split: of them.
        bound: of staleness; None: unbounded.
        max_in_flight_groups: of a replica: no more than its share, so that nobody goes short.
        outcome: with both.
        reason: in words.
    """

    num_gpus: int
    split: Split
    bound: int | None
    max_in_flight_groups: int
    outcome: Outcome
    reason: str


def overrides_of(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values of `section.key=a,b,c`, as overrides of a config.

    Raises:
        ConfigError: if a sweep has another form, or there are too many combinations.
    """
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        parts = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not key.strip() or not parts:
            raise ConfigError(f"--sweep {sweep}: write it as section.key=a,b,c, such as {BOUND}=0,1,2,4")
        axes.append([f"{key.strip()}={value}" for value in parts])
    combinations = list(itertools.product(*axes))
    if len(combinations) > MAX_SETTINGS:
        raise ConfigError(f"--sweep asks for {len(combinations)} settings; at most {MAX_SETTINGS} are simulated")
    return combinations


def simulate_rows(
    load: Callable[[Sequence[str]], LaminarConfig],
    combinations: Sequence[tuple[str, ...]],
    totals: Sequence[int],
    adapt: Callable[[Setting], Setting],
) -> list[Row]:
    """Simulate every combination, with the config's own split, or with the best one for each number of GPUs.

    Args:
        load: the config with some overrides.
        combinations: of overrides.
        totals: numbers of GPUs; empty: the config's own split.
        adapt: of a setting, such as to a real run.
    """
    rows = []
    for overrides in combinations:
        setting = adapt(setting_of(load(overrides)))
        label = " ".join(overrides)
        if not totals:
            rows.append(Row(label, setting, play(setting)))
        for num_gpus in totals:
            split, outcome, _ = best_split(setting, num_gpus)
            played = setting.with_split(split.train_gpus, split.num_replicas).with_even_shares()
            rows.append(Row(label, played, outcome))
    return rows


def advise(load: Callable[[Sequence[str]], LaminarConfig], num_gpus: int, adapt: Callable[[Setting], Setting]) -> Advice:
    """The split and the staleness bound for so many GPUs, with the reason."""
    setting = adapt(setting_of(load(())))
    split, _, splits = best_split(setting, num_gpus)
    outcomes: dict[int | None, Outcome] = {}
    shares: dict[int | None, Setting] = {}
    for bound in DEFAULT_BOUNDS:
        bounded = adapt(setting_of(load((f"{BOUND}={bound}",)))).with_split(split.train_gpus, split.num_replicas)
        shares[bound] = bounded.with_even_shares()
        outcomes[bound] = play(shares[bound])
    bound = best_bound({bound: outcome.tokens_per_second for bound, outcome in outcomes.items()})
    in_flight = shares[bound].system.max_in_flight_groups
    return Advice(num_gpus, split, bound, in_flight, outcomes[bound], _reason(setting, split, splits, outcomes, bound))


def _reason(
    setting: Setting, split: Split, splits: list[Split], outcomes: dict[int | None, Outcome], bound: int | None
) -> str:
    each = setting.cluster.engine.num_gpus
    slower = "training" if split.train_seconds >= split.generate_seconds else "generating"
    neighbours = [s for s in splits if abs(s.num_replicas - split.num_replicas) == 1]
    texts = [
        f"{split.train_gpus} GPUs train a step in {split.train_seconds:.0f} s while {split.num_replicas} replicas of {each} "
        f"generate one in {split.generate_seconds:.0f} s: {slower} sets the pace"
    ]
    texts += [
        f"with {s.num_replicas} replicas it would be {s.train_seconds:.0f} s and {s.generate_seconds:.0f} s"
        for s in sorted(neighbours, key=lambda s: s.num_replicas)
    ]
    best = max(outcome.tokens_per_second for outcome in outcomes.values())
    bounds = ", ".join(f"{k}: {100 * o.tokens_per_second / best:.0f} %" for k, o in outcomes.items())
    texts.append(f"throughput by staleness bound, of the best: {bounds}; {bound} is the smallest that keeps 97 %")
    if bound == DEFAULT_BOUNDS[-1]:
        texts.append("no larger one was tried: answers older than that are seldom worth training on")
    played = outcomes[bound]
    texts.append(
        f"played with it, the trainer waits {100 * played.trainer_idle_share:.0f} % of the time, and replicas are empty "
        f"{100 * played.rollout_idle_share:.0f} %"
    )
    return "; ".join(texts) + "."
