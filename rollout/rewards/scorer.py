"""The reward of an answer: the weighted sum of named terms, or a failure; never a number made up for want of one.

Invariants: one score for each trajectory id, whatever order the judges finish in; a term counts only as one finite number.
This module does not know what a term judges, nor what is done with a failure.
"""

import asyncio
import contextlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laminar.config.system import RewardConfig
from laminar.errors import ConfigError, InvariantError
from laminar.plugins import resolve, validate_options
from laminar.types import Failure, FailureKind, Prompt
from rollout.boundary import DaemonThreads, EpisodeError, as_episode_error, guard
from rollout.rewards import REWARDS
from rollout.rewards.base import RewardContext

_MAX_THREADS = 32
"""Calls of one plain judge at once, unless it has an attribute `max_running`; further ones wait, off the clock."""


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one answer: a reward or a failure. `terms` are unweighted."""

    reward: float | None
    terms: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One named reward. `judge` is a reward object or a function of (prompt, completion); see `rollout.rewards.base`.

    An `async` judge with an attribute `max_running` has so many calls at once; further ones wait, off the clock.
    """

    name: str
    judge: Any
    weight: float = 1.0
    timeout_seconds: float = 30.0
    failure_kind: FailureKind = FailureKind.USER_BUG
    threads: DaemonThreads = field(default_factory=DaemonThreads)
    async_places: contextlib.AbstractAsyncContextManager[None] = field(init=False)

    def __post_init__(self) -> None:
        most = getattr(self.judge, "max_running", None)
        object.__setattr__(self, "async_places", contextlib.nullcontext() if most is None else asyncio.Semaphore(most))


class RewardScorer:
    """Scores answers by its terms, all at once, each under its timeout."""

    def __init__(self, terms: Sequence[Term]) -> None:
        names = [term.name for term in terms]
        if len(set(names)) < len(names):
            raise ConfigError(f"reward names {names} are not unique; give each [[rewards]] entry its own `name`")
        self._terms = tuple(term for term in terms if not hasattr(term.judge, "score_group"))
        self._group_terms = tuple(term for term in terms if hasattr(term.judge, "score_group"))

    @property
    def judges_siblings(self) -> bool:
        """Whether a group's rewards are complete only when all its members have ended."""
        return bool(self._group_terms)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Ask every term at start whether it can judge these prompts.

        Raises:
            ConfigError: one cannot, and why.
        """
        terms = (*self._terms, *self._group_terms)
        checks = [(term.name, term.judge.check_prompt) for term in terms if hasattr(term.judge, "check_prompt")]
        for prompt in prompts:
            for name, check_prompt in checks:
                if problem := check_prompt(prompt):
                    raise ConfigError(f"reward {name!r}: {problem}")

    async def score(self, context: RewardContext) -> Score:
        """The verdict on one answer."""
        return (await self.score_batch([context]))[context.trajectory_id]

    async def score_batch(self, contexts: Sequence[RewardContext]) -> dict[str, Score]:
        """The verdict on each answer, by trajectory id.

        Raises:
            InvariantError: two contexts have one id.
        """
        if len({context.trajectory_id for context in contexts}) < len(contexts):
            raise InvariantError("score_batch: two answers have one trajectory id")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_judge_all(term, contexts)) for term in self._terms]
        columns = [task.result() for task in tasks]
        rows = [[column[row] for column in columns] for row in range(len(contexts))]
        return {c.trajectory_id: _combine(self._terms, row) for c, row in zip(contexts, rows, strict=True)}

    async def score_siblings(self, contexts: Sequence[RewardContext]) -> dict[str, Score]:
        """What the group terms add to each sibling, by trajectory id; what fails for one of them fails for all."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_judge_together(t, t.judge.score_group, contexts)) for t in self._group_terms]
        columns = [task.result() for task in tasks]
        failures = (value for column in columns for value in column if isinstance(value, Failure))
        if failure := next(failures, None):
            return {context.trajectory_id: Score(None, failure=failure) for context in contexts}
        rows = [[column[row] for column in columns] for row in range(len(contexts))]
        return {c.trajectory_id: _combine(self._group_terms, row) for c, row in zip(contexts, rows, strict=True)}


def _combine(terms: Sequence[Term], values: Sequence[float | Failure]) -> Score:
    named: dict[str, float] = {}
    for term, value in zip(terms, values, strict=True):
        if isinstance(value, Failure):
            return Score(None, failure=value)
        named[term.name] = value
    try:
        return Score(summed(term.weight * named[term.name] for term in terms), named)
    except EpisodeError as error:
        return Score(None, failure=error.failure)


def summed(parts: Iterable[float]) -> float:
    """A reward of finite parts.

    Raises:
        EpisodeError: of kind `user_bug`: their sum is not finite.
    """
    return finite_number(sum(parts, 0.0), "the sum of the reward terms")


def build_scorer(configs: Sequence[RewardConfig]) -> RewardScorer:
    """The scorer that `[[rewards]]` asks for.

    Raises:
        ConfigError: an unknown kind, wrong options, or two terms of one name.
    """
    return RewardScorer([_build_term(config, index) for index, config in enumerate(configs)])


def finite_number(value: Any, what: str) -> float:
    """One finite float out of what user code returned.

    Raises:
        EpisodeError: it is anything else.
    """
    if isinstance(value, numbers.Real | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    shown = f"a {type(value).__name__}"
    if isinstance(value, str | int | float | list | tuple | None):
        with contextlib.suppress(Exception):  # some have no text: a whole number of 5,000 digits, what the user made himself
            shown = repr(value)[:80]
    raise EpisodeError(FailureKind.USER_BUG, f"{what} returned {shown}; it must return one finite number")


def _build_term(config: RewardConfig, index: int) -> Term:
    attribute: Any = resolve(config.kind, REWARDS, f"rewards.{index}.kind")
    options = validate_options(attribute, config.options, f"rewards.{index}.options")
    judge: Any = attribute
    if isinstance(attribute, type):
        make: Callable[..., Any] = attribute
        judge = make() if options is None else make(options)
        if not any(hasattr(judge, method) for method in ("score", "score_batch", "score_group")):
            raise ConfigError(f"rewards.{index}.kind: class {config.kind!r} has no `score`, `score_batch` or `score_group`")
    elif not callable(attribute):
        raise ConfigError(f"rewards.{index}.kind: {config.kind!r} is {attribute!r:.80}, not a class or function")
    return Term(
        name=config.term,
        judge=judge,
        weight=config.weight,
        timeout_seconds=config.timeout_seconds,
        failure_kind=FailureKind.USER_BUG if ":" in config.kind else FailureKind.VERIFIER,
        threads=DaemonThreads(max_running=getattr(judge, "max_running", _MAX_THREADS)),
    )


async def _judge_all(term: Term, contexts: Sequence[RewardContext]) -> list[float | Failure]:
    """One value or failure for each context, in their order."""
    if hasattr(term.judge, "score_batch"):
        return await _judge_together(term, term.judge.score_batch, contexts)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_judge_one(term, context)) for context in contexts]
    return [task.result() for task in tasks]


def _extra_seconds(term: Term, context: RewardContext) -> float:
    if not hasattr(term.judge, "extra_seconds"):
        return 0.0
    what = f"extra_seconds of reward {term.name!r}"
    try:
        return finite_number(term.judge.extra_seconds(context), what)
    except Exception as error:
        raise as_episode_error(error, what, term.failure_kind) from error


async def _judge_one(term: Term, context: RewardContext) -> float | Failure:
    try:
        if hasattr(term.judge, "score"):
            value = await _call(term, term.judge.score, context, extra_seconds=_extra_seconds(term, context))
        else:
            value = await _call(term, term.judge, context.prompt, context.completion)
        return finite_number(value, f"reward {term.name!r}")
    except EpisodeError as error:
        return error.failure


async def _judge_together(term: Term, judge: Callable[..., Any], contexts: Sequence[RewardContext]) -> list[float | Failure]:
    what = f"reward {term.name!r}"
    try:
        values = await _call(term, judge, contexts)
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        is_list = is_list or (isinstance(values, np.ndarray) and values.ndim > 0)
        if not is_list or len(values) != len(contexts):
            count = f"{len(values)} values" if is_list else f"a {type(values).__name__}"
            raise EpisodeError(
                FailureKind.USER_BUG, f"{what} returned {count} for {len(contexts)} answers; one for each is needed"
            )
    except EpisodeError as error:
        return [error.failure] * len(contexts)
    results: list[float | Failure] = []
    for value in values:
        try:
            results.append(finite_number(value, what))
        except EpisodeError as error:
            results.append(error.failure)
    return results


async def _call(term: Term, function: Callable[..., Any], *arguments: Any, extra_seconds: float = 0.0) -> Any:
    seconds = term.timeout_seconds + extra_seconds

    async def guarded(call: Callable[[], Awaitable[Any]]) -> Any:
        return await guard(
            call,
            what=f"reward {term.name!r}",
            kind=term.failure_kind,
            seconds=seconds,
            timeout_kind=FailureKind.VERIFIER,
            limit="its timeout_seconds",
        )

    if inspect.iscoroutinefunction(function):
        async with term.async_places:
            return await guarded(lambda: function(*arguments))
    async with term.threads.places:
        deadline = asyncio.get_running_loop().time() + seconds
        return await guarded(lambda: term.threads.run(function, *arguments, deadline=deadline))
