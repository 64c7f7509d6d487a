"""One engine with continuous batching, advanced from event to event: between two of them all its requests decode together.

A step of n requests whose contexts sum up to c takes p(n) + q(n) c seconds, and c grows by n each step, so k steps take
k (p + q c) + q n k (k - 1) / 2: no step is played singly, and nothing is rounded.

Invariants: the cache never holds more than its capacity (but for a request that is alone); admission is first in, first out;
when the cache is full the youngest requests go back to the head of the queue and are computed anew, as in SGLang.
It knows neither groups' fate, nor versions, nor other engines.
"""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from simpy import Environment, Event

from laminar.simulate.cluster import Engine
from laminar.simulate.requests import Request

ADMISSION_STEPS = 128
"""Steps of everybody that must fit before a request is let in: engines plan ahead, lest they send back at once."""
ROOM_STEPS = 32
"""Steps that are made room for when the cache is full."""
_NEARLY = 1e-6


class SimulatedEngine:
    """See the module.

    Args:
        env: the simulation.
        engine: what it is like.
        on_turn_end: told of every request whose turn has ended, after it has left.

    Attributes:
        running: in the order of admission.
        waiting: not yet begun, or sent back.
        context: tokens in the cache.
        generated: tokens sampled so far.
        recomputed: context tokens computed so far.
        num_retracted: requests sent back because the cache was full.
        busy_seconds: in which requests ran, prefill included.
        kv_seconds: integral of the share of the cache in use.
    """

    def __init__(self, env: Environment, engine: Engine, on_turn_end: Callable[[Request], None]) -> None:
        self._env, self._engine, self._on_turn_end = env, engine, on_turn_end
        self._fixed, self._by_token = engine.step_costs
        self._ends: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._steps, self._debt, self._since, self._planned = 0.0, 0.0, 0.0, 0.0
        self._generation = 0
        self._is_paused = False
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.context = self.generated = self.recomputed = self.busy_seconds = self.kv_seconds = 0.0
        self.num_retracted = 0

    @property
    def num_open(self) -> int:
        """Requests running and waiting."""
        return len(self.running) + len(self.waiting)

    @property
    def requests(self) -> list[Request]:
        """All of them, their progress up to date."""
        self.settle()
        for request in self.running:
            self._sync(request)
        return [*self.running, *self.waiting]

    def sampled_tokens(self) -> list[float]:
        """Of each running request, in the order of admission, as of the last `settle`."""
        return [request.turn_ends[request.turn] - request.end_step + self._steps for request in self.running]

    def add(self, requests: list[Request]) -> None:
        """Queue requests."""
        self.settle()
        self.waiting.extend(requests)
        self._go_on()

    def take_out(self, requests: list[Request]) -> None:
        """Let requests go with what they have sampled."""
        self.settle()
        gone = set(requests)
        for request in requests:
            if request in self.running:
                self._leave(request)
        if self.waiting:
            self.waiting = deque(request for request in self.waiting if request not in gone)
        self._go_on()

    def pause(self) -> None:
        """Stand still until `resume`."""
        self.settle()
        self._is_paused = True
        self._generation += 1

    def resume(self, *, recompute: bool = False) -> None:
        """Go on.

        Args:
            recompute: the cache is void; running requests are computed anew first.
        """
        self.settle()
        self._is_paused = False
        if recompute:
            self._prefill(self.context)
        self._go_on()

    def settle(self, *, planned: bool = False) -> None:
        """Bring everything up to the present.

        Args:
            planned: what was planned has come to pass undisturbed, so the number of steps is known.
        """
        elapsed = self._env.now - self._since
        self._since = self._env.now
        if self._is_paused or not self.running or elapsed <= 0:
            return
        self.busy_seconds += elapsed
        share = self.context / self._engine.capacity_tokens
        paid = min(self._debt, elapsed)
        self._debt -= paid
        steps = self._planned if planned else self._steps_in(elapsed - paid)
        self._planned -= steps
        self.kv_seconds += elapsed * share + (elapsed - paid) * steps * len(self.running) / 2 / self._engine.capacity_tokens
        self._advance(steps)

    def _advance(self, steps: float) -> None:
        tokens = steps * len(self.running)
        self._steps += steps
        self.context += tokens
        self.generated += tokens

    def _sync(self, request: Request) -> None:
        """Write down what a running request has sampled."""
        done = request.turn_ends[request.turn] - (request.end_step - self._steps)
        grown = done - request.sampled
        request.context += grown
        request.sampled = done

    def _leave(self, request: Request) -> None:
        self._sync(request)
        del self.running[request]
        self.context -= request.context
        if not self.running:
            self.context, self._debt = 0.0, 0.0

    def _go_on(self) -> None:
        """End what has ended, make room, let in, and wait for the next thing to happen."""
        if self._is_paused:
            return
        ended = []
        while (end := self._next_end()) is not None and end <= self._steps + _NEARLY:
            request = heappop(self._ends)[2]
            self._leave(request)
            ended.append(request)
        self._make_room()
        self._admit()
        self._arm()
        for request in ended:
            self._on_turn_end(request)

    def _next_end(self) -> float | None:
        """The step at which the first running request ends its turn; entries of those that left are passed over."""
        while self._ends:
            end, _, request = self._ends[0]
            if request in self.running and request.end_step == end:
                return end
            heappop(self._ends)
        return None

    def _make_room(self) -> None:
        while len(self.running) > 1 and self.context + len(self.running) > self._engine.capacity_tokens:
            goal = self._engine.capacity_tokens - ROOM_STEPS * len(self.running)
            while len(self.running) > 1 and self.context > goal:
                youngest = next(reversed(self.running))
                self._leave(youngest)
                youngest.uncached = youngest.context
                self.waiting.appendleft(youngest)
                self.num_retracted += 1

    def _admit(self) -> None:
        capacity = self._engine.capacity_tokens
        while self.waiting and len(self.running) < self._engine.max_running:
            request = self.waiting[0]
            room = ADMISSION_STEPS * (len(self.running) + 1)
            if self.running and self.context + request.context + room > capacity:
                return
            self.waiting.popleft()
            self._prefill(request.uncached)
            request.uncached = 0.0
            request.end_step = self._steps + request.turn_ends[request.turn] - request.sampled
            self.running[request] = None
            self.context += request.context
            heappush(self._ends, (request.end_step, next(self._numbers), request))

    def _prefill(self, tokens: float) -> None:
        self._debt += tokens / self._engine.prefill_tokens_per_second
        self.recomputed += tokens

    def _arm(self) -> None:
        self._generation += 1
        if not self.running:
            return
        n, end = len(self.running), self._next_end()
        assert end is not None
        steps = max(0.0, end - self._steps)
        if n > 1:
            steps = min(steps, max(0.0, math.floor((self._engine.capacity_tokens - self.context) / n)) + 1)
        self._planned = steps
        timer = self._env.timeout(self._debt + self._seconds_for(steps), self._generation)
        assert timer.callbacks is not None
        timer.callbacks.append(self._on_timer)

    def _on_timer(self, event: Event) -> None:
        if event.value == self._generation:
            self.settle(planned=True)
            self._go_on()

    def _seconds_for(self, steps: float) -> float:
        first, growth = self._costs()
        return steps * (first + growth * steps)

    def _steps_in(self, seconds: float) -> float:
        first, growth = self._costs()
        return 2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)) if seconds > 0 else 0.0

    def _costs(self) -> tuple[float, float]:
        """K steps from here take k (first + growth k)."""
        n = len(self.running)
        growth = self._by_token[n] * n / 2
        return self._fixed[n] + self._by_token[n] * self.context - growth, growth
