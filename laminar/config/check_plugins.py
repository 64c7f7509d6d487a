"""Judge the config's choices among implementations: is the kind known, are its options right?

The tables are named by import string: this floor imports none of the packages above it. What ships with Laminar is judged
without importing torch; a user's own module is imported.
"""

import importlib.util
import inspect
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from laminar.config.root import LaminarConfig
from laminar.config.section import Section
from laminar.config.system import RewardConfig
from laminar.errors import ConfigError
from laminar.plugins import load_attribute, resolve, validate_options
from laminar.policies.samplers import SAMPLERS

ENVIRONMENTS = "rollout.environments:ENVIRONMENTS"
REWARDS = "rollout.rewards:REWARDS"
ALGORITHMS = "trainer.algorithms:ALGORITHM_OPTIONS"
TRANSPORTS = "relay.transports.base:TRANSPORTS"
ENGINE_KIND = "rollout.engines.launch:engine_kind"

PLAYS = (("reset",), ("step",), ("close",))
JUDGES = (("score", "score_batch", "score_group"),)
LEARNS = (("advantages",), ("policy_loss",))
"""Methods that a class must have to be an environment, a reward, or an algorithm: one of each group."""


def plugin_faults(config: LaminarConfig) -> Iterator[str]:
    """One sentence for every unknown kind, wrong option, or clash of names."""
    environment, algorithm = config.environment, config.trainer.algorithm
    yield from _faults_of("environment", environment.kind, load_attribute(ENVIRONMENTS), environment.options, PLAYS)
    for index, reward in enumerate(config.rewards):
        yield from _faults_of(f"rewards[{index}]", reward.kind, load_attribute(REWARDS), reward.options, JUDGES)
    yield from _faults_of("trainer.algorithm", algorithm.kind, load_attribute(ALGORITHMS), algorithm.options, LEARNS)
    yield from _callable_fault("experience.sampler", config.experience.sampler, SAMPLERS)
    yield from _engine_faults(config)
    yield from _transport_faults(config.relay.transport)
    yield from _reward_faults(config)
    yield from _sink_faults(config)


def algorithm_options(config: LaminarConfig) -> Section | None:
    """The algorithm's options with their defaults; None if they are wrong, or the algorithm takes none."""
    choice = config.trainer.algorithm
    try:
        return validate_options(resolve(choice.kind, load_attribute(ALGORITHMS)), choice.options)
    except ConfigError:
        return None


def algorithm_option_names() -> set[str]:
    """Every option of an algorithm of ours."""
    table = load_attribute(ALGORITHMS)
    return {name for kind in table for name in resolve(kind, table).model_fields}


def reward_options(reward: RewardConfig) -> Section | None:
    """A reward's options with their defaults; None if they are wrong, or it takes none."""
    try:
        return validate_options(resolve(reward.kind, load_attribute(REWARDS)), reward.options)
    except ConfigError:
        return None


def needs_exact_logprobs(kind: str) -> bool:
    """Whether an algorithm compares the trainer's log-probs with the engine's; an unreadable one counts as if it did."""
    if ":" not in kind:
        return True
    try:
        return "rollout_logprobs" in getattr(load_attribute(kind), "needs", ("rollout_logprobs",))
    except ConfigError:
        return True


def _faults_of(
    where: str,
    kind: str,
    table: Mapping[str, str],
    options: Mapping[str, Any],
    methods: Sequence[Sequence[str]] = (),
) -> Iterator[str]:
    """What is wrong with a choice and its options; a user's own class must have one method of each group of `methods`."""
    try:
        attribute = resolve(kind, table, f"{where}.kind")
        validate_options(attribute, options, f"{where}.options")
    except ConfigError as error:
        yield str(error)
        return
    yield from _shape_faults(f"{where}.kind", kind, attribute, methods if kind not in table else ())


def _callable_fault(where: str, kind: str, table: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a choice that has no options."""
    try:
        yield from _shape_faults(where, kind, resolve(kind, table, where))
    except ConfigError as error:
        yield str(error)


def _shape_faults(where: str, kind: str, attribute: Any, methods: Sequence[Sequence[str]] = ()) -> Iterator[str]:
    if not callable(attribute):
        yield f"`{where}` is {kind!r}: that is {attribute!r:.80}, not a class or function"
    elif inspect.isclass(attribute) and not hasattr(attribute, "__getattr__"):
        own = getattr(attribute.__init__, "__code__", None)
        set_later = () if own is None else own.co_names  # `self.score = ...`
        readme = f"{'trainer' if where.startswith('trainer') else 'rollout'}/README.md"
        for names in methods:
            if not any(hasattr(attribute, name) or name in set_later for name in names):
                yield f"`{where}` is {kind!r}: a class without `{'` or `'.join(names)}`; see {readme}"


def _transport_faults(kind: str) -> Iterator[str]:
    """Ours need libraries that only the machines of a run must have; a user's own is imported."""
    table = load_attribute(TRANSPORTS)
    if kind not in table:
        yield from _callable_fault("relay.transport", kind, table)


def _engine_faults(config: LaminarConfig) -> Iterator[str]:
    engine = config.rollout.engine
    try:
        load_attribute(ENGINE_KIND)(engine.kind).flags(engine.options)
    except ConfigError as error:
        yield str(error)


def _sink_faults(config: LaminarConfig) -> Iterator[str]:
    for name, wanted in (("tensorboard", config.metrics.tensorboard), ("wandb", config.metrics.wandb != "off")):
        if wanted and importlib.util.find_spec(name) is None:
            yield f"`metrics.{name}` is on, but the package {name} is not installed: `pip install {name}`, or switch it off"
    try:
        program = (shlex.split(config.alerts.command) or [""])[0]
    except ValueError as error:
        yield f"`alerts.command` cannot be split into words ({error}); mend its quotes"
        return
    if program and shutil.which(program) is None:
        yield f"`alerts.command` names {program!r}, which is no program here; give its path"


def _reward_faults(config: LaminarConfig) -> Iterator[str]:
    table, kind = load_attribute(ENVIRONMENTS), config.environment.kind
    if not config.rewards and kind in table and not getattr(load_attribute(table[kind]), "gives_reward", False):
        yield f"`rewards` is empty: `{config.environment.kind}` gives no reward of its own; add a [[rewards]] table"
    if config.eval.path and config.rewards and not _judges_alone(config):
        yield "`eval.path` is set, but every reward compares siblings: add a [[rewards]] that judges single answers"
    names = [reward.term for reward in config.rewards]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f'`rewards` has {names.count(name)} terms called "{name}": give each a `name` of its own'
    is_ours = kind in table and not getattr(load_attribute(table[kind]), "gives_reward", False)
    for index, reward in enumerate(config.rewards):
        term = getattr(reward_options(reward), "right_term", None)
        if is_ours and term is not None and term not in names:
            yield f'`rewards[{index}].options.right_term` is "{term}", but the terms are {", ".join(names)}: name one'


def option_notes(config: LaminarConfig) -> Iterator[str]:
    """What options of the environment and of rewards name and this machine lacks: variables, and programs to start."""
    yield from _absent("environment.options", config.environment.options)
    for index, reward in enumerate(config.rewards):
        yield from _absent(f"rewards[{index}].options", reward.options)


def _absent(where: str, value: Any) -> Iterator[str]:
    below = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in below:
        place = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}"
        if isinstance(inner, str) and str(key).endswith("_variable") and inner and inner not in os.environ:
            yield f"`{place}` is {inner!r}, not set here: it must be in the environment that the run starts in"
        elif key == "command" and isinstance(inner, list) and inner and shutil.which(str(inner[0])) is None:
            yield f"`{place}` begins with {inner[0]!r}, not here yet as a program: it must be when the run starts"
        else:
            yield from _absent(place, inner)


def comparing_rewards(config: LaminarConfig) -> list[str]:
    """The kinds of reward that judge all siblings of a group together; what cannot be read is not this check's."""
    table, found = load_attribute(REWARDS), []
    for reward in config.rewards:
        with suppress(ConfigError):
            if hasattr(resolve(reward.kind, table), "score_group"):
                found.append(reward.kind)
    return found


def _judges_alone(config: LaminarConfig) -> bool:
    """Whether a single answer, such as one of an evaluation, gets a reward."""
    environments, kind = load_attribute(ENVIRONMENTS), config.environment.kind
    if kind not in environments or getattr(load_attribute(environments[kind]), "gives_reward", False):
        return True
    return len(comparing_rewards(config)) < len(config.rewards)
