"""The trajectories that are open on one engine, guests included, and what they weigh. Pure.

It does not know engines, versions or how a trajectory is generated.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from laminar.config.root import LaminarConfig
from laminar.config.sizes import repack_limits
from laminar.policies.repack import expected_remaining


@dataclass(slots=True, eq=False)
class Occupant:
    """One open trajectory on an engine.

    Attributes:
        is_guest: its episode is played by another worker.
        context_tokens: prompt and sampled tokens, as far as they are known.
        sampled_tokens: tokens sampled so far.
        budget_tokens: the most that it may still sample.
    """

    is_guest: bool = False
    context_tokens: int = 0
    sampled_tokens: int = 0
    budget_tokens: int = 0

    def begin(self, context_tokens: int, budget_tokens: int) -> None:
        """A request begins behind so many tokens."""
        self.context_tokens, self.budget_tokens = context_tokens, budget_tokens

    def grow(self, num_tokens: int) -> None:
        """So many tokens were sampled."""
        self.context_tokens += num_tokens
        self.sampled_tokens += num_tokens
        self.budget_tokens = max(0, self.budget_tokens - num_tokens)

    @property
    def expected_tokens(self) -> int:
        """How many it is expected to sample still."""
        return expected_remaining(self.sampled_tokens, self.budget_tokens)


@dataclass(frozen=True, slots=True)
class GuestLimits:
    """What an engine with guests must keep to; see `laminar.policies.repack.RepackLimits`."""

    kv_limit: float
    headroom_tokens: int
    max_requests: int

    def refusal(self, occupants: Iterable[Occupant], context_tokens: int, capacity_tokens: int) -> str:
        """Why one more trajectory of so many tokens has no room; empty if it has."""
        contexts = [occupant.context_tokens for occupant in occupants]
        num_open = len(contexts) + 1
        if num_open > self.max_requests:
            return f"{num_open - 1} of at most {self.max_requests} trajectories are open"
        grown = sum(contexts) + context_tokens + self.headroom_tokens * num_open
        if grown > self.kv_limit * capacity_tokens:
            return f"{grown} tokens, growth included, exceed {self.kv_limit:g} of the cache of {capacity_tokens}"
        return ""


def guest_limits(config: LaminarConfig) -> GuestLimits:
    """What `[rollout.repack]` says."""
    limits = repack_limits(config)
    return GuestLimits(limits.kv_limit, limits.headroom_tokens, limits.max_requests)
