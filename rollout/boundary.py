"""The boundary between an episode and the user's code: whatever escapes that code becomes a failure with its kind.

Invariants: no exception but `EpisodeError` (and our own cancellation) leaves `guard`; it returns or raises within its
deadline, even if the user's coroutine swallows its cancellation. One that blocks the event loop cannot be interrupted.
This module does not know what the called code is for.
"""

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.errors import LaminarError
from laminar.types import Failure, FailureKind

logger = logging.getLogger("laminar.rollout")

_CANCEL_GRACE_SECONDS = 1.0
"""How long a timed-out coroutine may take to clean up before it is abandoned, at most as long as its deadline."""


class EpisodeError(LaminarError):
    """An episode ends without a reward. User code may raise it to name the kind of failure itself."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.failure = Failure(kind, text)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a piece of user code came to: a value or what it raised."""

    value: Any = None
    error: BaseException | None = None


async def guard(
    call: Callable[[], Awaitable[Any]],
    *,
    what: str,
    kind: FailureKind,
    seconds: float,
    timeout_kind: FailureKind,
    limit: str,
) -> Any:
    """Await the user's code under a deadline.

    Args:
        call: starts the user's code.
        what: its name in messages, such as `reward 'exact_match'`.
        kind: kind of failure if it raises.
        seconds: the deadline.
        timeout_kind: kind of failure if it takes longer.
        limit: the setting that bounds it, for the remedy.

    Returns:
        What the code returned, unchecked.

    Raises:
        EpisodeError: it raised, was not awaitable, or took too long.
    """
    task = asyncio.ensure_future(_outcome(call))
    try:
        await asyncio.wait({task}, timeout=max(seconds, 0.0))
    finally:
        timed_out = not task.done()
        if timed_out:  # or the caller is being cancelled
            task.cancel()
            await asyncio.wait({task}, timeout=min(_CANCEL_GRACE_SECONDS, max(seconds, 0.0)))
    if timed_out:
        raise EpisodeError(timeout_kind, f"{what} took longer than {seconds:.4g} s; mend it or raise {limit}")
    if task.cancelled():
        raise EpisodeError(kind, f"{what} cancelled itself; it must return a value or raise an error")
    outcome = task.result()
    if outcome.error is not None:
        raise as_episode_error(outcome.error, what, kind) from outcome.error
    return outcome.value


async def _outcome(call: Callable[[], Awaitable[Any]]) -> _Outcome:
    try:
        awaitable: Any = call()
        if not inspect.isawaitable(awaitable):
            return _Outcome(error=EpisodeError(FailureKind.USER_BUG, "is not a coroutine; write it with `async def`"))
        return _Outcome(await awaitable)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary: SystemExit would end the loop, a panic of Rust the worker
        return _Outcome(error=error)


def as_episode_error(error: BaseException, what: str, kind: FailureKind) -> EpisodeError:
    """What user code raised, as a failure with its kind and place."""
    if isinstance(error, EpisodeError):
        return EpisodeError(error.failure.kind, f"{what}: {error.failure.text}")
    logger.debug("%s raised", what, exc_info=error)
    if kind is FailureKind.USER_BUG and isinstance(
        error, OSError
    ):  # TimeoutError included: a judge is out of reach, not a bug
        kind = FailureKind.VERIFIER
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = " ".join(str(error).split())[:300]
    return EpisodeError(kind, f"{what} raised {type(error).__name__}{place}: {message or 'no message'}")


class DaemonThreads:
    """Runs blocking user functions in daemon threads, at most `max_running` at once.

    A thread cannot be killed. One whose caller stopped waiting gives its place back, so that it starves nobody. It is stuck
    if it is still alive after its deadline: an evicted caller stops waiting for a function that would return in time. When
    `max_stuck` are stuck, further calls are refused rather than letting threads pile up.
    """

    def __init__(self, *, max_running: int = 32, max_stuck: int = 8) -> None:
        self.places = asyncio.Semaphore(max_running)
        self._max_stuck = max_stuck
        self._given_up: list[tuple[threading.Thread, float]] = []

    async def run(self, function: Callable[..., Any], *arguments: Any, deadline: float = 0.0) -> Any:
        """The function's value, or what it raised. Hold one of `places` meanwhile, taken before any deadline starts.

        Args:
            function: what to run.
            arguments: what it is given.
            deadline: the loop's time from when on it is stuck if nobody waits for it any more.

        Raises:
            EpisodeError: earlier calls are still stuck.
        """
        loop = asyncio.get_running_loop()
        self._given_up = [(thread, due) for thread, due in self._given_up if thread.is_alive()]
        num_stuck = sum(due <= loop.time() for _, due in self._given_up)
        if num_stuck >= self._max_stuck:
            raise EpisodeError(
                FailureKind.VERIFIER, f"{num_stuck} earlier calls never returned; the function must bound its own time"
            )
        future: asyncio.Future[_Outcome] = loop.create_future()
        thread = threading.Thread(target=_run_in_thread, args=(loop, future, function, arguments), daemon=True)
        thread.start()
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._given_up.append((thread, deadline))
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


def _run_in_thread(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[_Outcome]",
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        outcome = _Outcome(function(*arguments))
    except (KeyboardInterrupt, GeneratorExit) as error:  # the user's own, which must not end the loop's thread
        outcome = _Outcome(error=RuntimeError(type(error).__name__))
    except BaseException as error:  # noqa: BLE001 - same boundary, in another thread
        outcome = _Outcome(error=error)
    with suppress(RuntimeError):  # the loop has ended; nobody waits any more
        loop.call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[_Outcome]", outcome: _Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
