"""Simulations of one config under several settings: `staleness.max_staleness=0,1,2,4` and numbers of GPUs."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.simulate.from_config import Setting, setting_of
from laminar.simulate.mapping import GOOD_ENOUGH, Played, Split, best_bound, best_split, play
from laminar.simulate.recorder import Outcome
from laminar.simulate.simulation import StandstillError

MAX_SETTINGS = 200
DEFAULT_BOUNDS = (0, 1, 2, 4, 8)
BOUND = "staleness.max_staleness"
KEEPS_UP = 0.2
"""A trainer that waits for less than this share of the time sets the pace."""


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


@dataclass(slots=True)
class Searches:
    """The best split of one config under some overrides, searched once for each number of GPUs.

    Attributes:
        say: told what is being played, before each, since each may take many seconds.
    """

    say: Callable[[str], None] = lambda _: None
    _found: dict[tuple[tuple[str, ...], int], tuple[Split, Outcome, list[Played]]] = field(default_factory=dict)

    def best(self, overrides: tuple[str, ...], setting: Setting, num_gpus: int) -> tuple[Split, Outcome, list[Played]]:
        """As `best_split`, of the setting that `overrides` lead to."""
        key = (overrides, num_gpus)
        if key not in self._found:
            self._found[key] = best_split(setting, num_gpus, self.say)
        return self._found[key]


def overrides_of(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values of `section.key=a,b,c`, as overrides of a config.

    Raises:
        ConfigError: if a sweep has another form or an earlier one's key, or there are too many combinations.
    """
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        parts = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not key.strip() or not parts:
            raise ConfigError(f"--sweep {sweep}: write it as section.key=a,b,c, such as {BOUND}=0,1,2,4")
        if key.strip() in axes:
            raise ConfigError(f"--sweep {sweep}: {key.strip()} is swept already; give all its values in one --sweep")
        axes[key.strip()] = [f"{key.strip()}={value}" for value in parts]
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) > MAX_SETTINGS:
        raise ConfigError(f"--sweep asks for {len(combinations)} settings; at most {MAX_SETTINGS} are simulated")
    return combinations


def simulate_rows(
    load: Callable[[Sequence[str]], LaminarConfig],
    combinations: Sequence[tuple[str, ...]],
    totals: Sequence[int],
    adapt: Callable[[Setting], Setting],
    searches: Searches,
) -> list[Row]:
    """Simulate every combination, with the config's own split, or with the best one for each number of GPUs.

    Args:
        load: the config with some overrides.
        combinations: of overrides.
        totals: numbers of GPUs; empty: the config's own split.
        adapt: of a setting, such as to a real run.
        searches: of best splits, shared with `advise`.

    Raises:
        ConfigError: naming the combination that does not work.
    """
    rows = []
    for overrides in combinations:
        setting = adapt(setting_of(load(overrides)))
        label = " ".join(overrides)
        try:
            if not totals:
                searches.say(f"playing {label or 'the config as it is'}")
                rows.append(Row(label, setting, play(setting)))
            for num_gpus in totals:
                split, outcome, _ = searches.best(overrides, setting, num_gpus)
                played = setting.with_split(split.train_gpus, split.num_replicas).with_even_shares()
                rows.append(Row(label, played, outcome))
        except StandstillError as error:
            raise StandstillError(f"{label}: {error}" if label else str(error)) from error
    return rows


def advise(
    load: Callable[[Sequence[str]], LaminarConfig],
    num_gpus: int,
    adapt: Callable[[Setting], Setting],
    searches: Searches | None = None,
) -> Advice:
    """The split and the staleness bound for so many GPUs, with the reason.

    Besides the config's own bound those of `DEFAULT_BOUNDS` are tried that the config allows.

    Raises:
        ConfigError: if there is no split.
        StandstillError: if under none a step ends in time.
    """
    config, searches = load(()), searches or Searches()
    split, outcome, played = searches.best((), adapt(setting_of(config)), num_gpus)
    outcomes: dict[int | None, Outcome | None] = {config.staleness.bound: outcome}
    limits: dict[int | None, int] = {}
    for bound in dict.fromkeys((config.staleness.bound, *DEFAULT_BOUNDS)):
        try:
            bounded = load((f"{BOUND}={bound}",)) if bound not in outcomes else config
        except ConfigError:
            continue
        setting = adapt(setting_of(bounded)).with_split(split.train_gpus, split.num_replicas).with_even_shares()
        limits[bound] = setting.system.max_in_flight_groups
        if bound not in outcomes:
            searches.say(f"playing {BOUND}={bound} with {split.num_replicas} replicas, {split.train_gpus} GPUs train")
            outcomes[bound] = _play_or_none(setting)
    throughput = {bound: found.tokens_per_second if found else 0.0 for bound, found in outcomes.items()}
    bound = best_bound(throughput)
    chosen = outcomes[bound] or outcome
    return Advice(num_gpus, split, bound, limits[bound], chosen, _reason(split, played, throughput, bound, chosen))


def _play_or_none(setting: Setting) -> Outcome | None:
    try:
        return play(setting)
    except StandstillError:
        return None


def _reason(
    split: Split, played: list[Played], throughput: dict[int | None, float], bound: int | None, outcome: Outcome
) -> str:
    pace = "training" if outcome.trainer_idle_share < KEEPS_UP else "generating"
    near = sorted(sorted(played, key=lambda entry: abs(entry.split.num_replicas - split.num_replicas))[:5], key=_replicas)
    others = ", ".join(f"{entry.split.num_replicas}: {entry.tokens_per_second:,.0f}" for entry in near)
    best = max(throughput.values())
    tried = sorted(throughput, key=lambda k: math.inf if k is None else k)
    bounds = ", ".join(f"{_named(k)}: {percent(throughput[k] / best)}" for k in tried)
    texts = [
        f"by itself, a step takes {split.train_seconds:.0f} s to train and, without tails, {split.generate_seconds:.0f} s "
        f"to generate; played together it takes {outcome.seconds / outcome.num_steps:.0f} s, of which the trainer waits "
        f"{100 * outcome.trainer_idle_share:.0f} %, while replicas are empty {100 * outcome.rollout_idle_share:.0f} %: "
        f"{pace} sets the pace",
        f"tokens/s by number of replicas, under the config's bound: {others}",
        f"throughput by staleness bound, of the best: {bounds}; {_named(bound)} is the smallest that keeps "
        f"{100 * GOOD_ENOUGH:.0f} %",
    ]
    if bound is not None and bound == tried[-1]:
        texts.append("no larger one was tried: answers older than that are seldom worth training on")
    return "; ".join(texts) + "."


def percent(share: float) -> str:
    """Rounded down, so that no share looks like one that it falls short of."""
    return f"{math.floor(1000 * share) / 10:.1f} %"


def _named(bound: int | None) -> str:
    return "unbounded" if bound is None else str(bound)


def _replicas(entry: Played) -> int:
    return entry.split.num_replicas
