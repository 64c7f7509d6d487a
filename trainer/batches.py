"""Planning of a step: which rank computes which rows, in which micro-batches. Pure and deterministic, on plain numbers.

Invariants:
- every row is in exactly one micro-batch; no micro-batch exceeds the token budget, padding included;
- all ranks run the same number of micro-batches; an empty one weighs 0;
- mini-batches are cut between groups, ranks anywhere (24 rows on 5 ranks is fine).

The cost of a micro-batch is what it computes, by its `Layout`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from laminar.errors import ConfigError, InvariantError

PASS_OVERHEAD_TOKENS = 64
"""What one more pass costs, in tokens: weights are read and gradients written once more (SmolLM2-135M on one core: 0.8 s,
and 12 ms a token). It decides when padding is worth splitting off."""
MOST_FOLDED_TOKENS = 512
"""Of a folded micro-batch: attention computes tokens x tokens there, whoever sees whom (there: a fifth of the time)."""


class Layout(Enum):
    """How the rows of a micro-batch lie, and so how many tokens are computed.

    - `PADDED`: whole rows; computed are rows x longest row.
    - `PACKED`: whole rows one behind the other; the sum of their lengths.
    - `SHARED`: each distinct prompt once, then the responses; prompts x longest prompt + rows x longest response.
    - `FOLDED`: the same in one row without padding, a prefix tree, in which a token sees its path from the root; at most the
      sum of prompts and responses, for what responses begin with alike is computed once. Above `MOST_FOLDED_TOKENS` as
      `SHARED`.
    """

    PADDED = "padded"
    PACKED = "packed"
    SHARED = "shared"
    FOLDED = "folded"

    @property
    def shares_prompts(self) -> bool:
        """Whether rows of one prompt compute it once."""
        return self in (Layout.SHARED, Layout.FOLDED)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What planning knows of a row (a chain of a trajectory).

    Attributes:
        name: trajectory id, for messages.
        prompt: rows with the same value begin with the same `prompt_tokens` tokens.
        prompt_tokens: given tokens at the start, at least 1.
        response_tokens: all tokens after them, sampled or given.
    """

    name: str
    prompt: int
    prompt_tokens: int
    response_tokens: int

    @property
    def num_tokens(self) -> int:
        """Length of the row in tokens."""
        return self.prompt_tokens + self.response_tokens


MicroBatch = tuple[int, ...]
"""Indices of its rows; empty if the rank has nothing left to do while others have."""

RankPlan = tuple[tuple[MicroBatch, ...], ...]
"""Micro-batches of one mini-batch by rank: plan[rank][i]."""


def split_mini_batches(num_groups: int, mini_batches: int) -> list[range]:
    """Equal shares of the groups, in order; the first ones take the remainder; fewer groups give fewer mini-batches."""
    if num_groups < 1 or mini_batches < 1:
        raise InvariantError(f"{num_groups} groups in {mini_batches} mini-batches: both must be 1 or more")
    share, rest = divmod(num_groups, mini_batches)
    sizes = [share + (index < rest) for index in range(mini_batches)]
    starts = [sum(sizes[:index]) for index in range(mini_batches)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True) if size]


def plan_micro_batches(
    rows: Sequence[RowShape],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    layout: Layout = Layout.PADDED,
) -> RankPlan:
    """Deal the rows of one mini-batch to ranks and micro-batches.

    Two orders are tried, rows of a prompt together and all rows by length; the one with the less busy busiest rank is taken.

    Args:
        rows: the rows; a micro-batch names them by index.
        max_tokens: budget of a micro-batch, padding included.
        num_ranks: ranks to deal to.
        layout: how the rows of a micro-batch lie.

    Raises:
        ConfigError: if one row alone exceeds the budget; it names the trajectory.
    """
    refuse_oversize(rows, max_tokens)
    by_length = sorted(range(len(rows)), key=lambda i: (-_own_tokens(rows[i], layout), -rows[i].prompt_tokens, i))
    orders = [by_length]
    if layout.shares_prompts:
        longest: dict[int, int] = {}
        for index in by_length:
            longest.setdefault(rows[index].prompt, len(longest))
        orders.append(sorted(by_length, key=lambda i: longest[rows[i].prompt]))
    plans = [_deal(rows, order, max_tokens, num_ranks, layout) for order in orders]
    return min(plans, key=lambda plan: max(_rank_cost(rows, batches, layout) for batches in plan))


def computed_tokens(rows: Iterable[RowShape], layout: Layout) -> int:
    """Cost of computing the rows in one pass, padding included."""
    rows = list(rows)
    *_, cost = (cost for _, cost in _costs_backwards(rows, range(len(rows)), len(rows), layout)) if rows else (0,)
    return cost


def refuse_oversize(rows: Iterable[RowShape], max_tokens: int) -> None:
    """Refuse a row that fits no micro-batch, before any work.

    Raises:
        ConfigError: it names the trajectory.
    """
    for row in rows:
        if row.num_tokens > max_tokens:
            raise ConfigError(
                f"trajectory {row.name} has a row of {row.num_tokens} tokens, but trainer.max_tokens_per_micro_batch is "
                f"{max_tokens}: raise it, or lower rollout.max_new_tokens or data.max_prompt_tokens"
            )


def _own_tokens(row: RowShape, layout: Layout) -> int:
    return row.response_tokens if layout.shares_prompts else row.num_tokens


def _deal(rows: Sequence[RowShape], order: Sequence[int], max_tokens: int, num_ranks: int, layout: Layout) -> RankPlan:
    """Cut the order into one run of rows a rank, near-equal in tokens, then each run into micro-batches."""
    batches = [_cut_micro_batches(rows, run, max_tokens, layout) for run in _cut_ranks(rows, order, num_ranks, layout)]
    num_micro_batches = max(len(batch) for batch in batches)
    return tuple(tuple(batch) + ((),) * (num_micro_batches - len(batch)) for batch in batches)


def _cut_ranks(rows: Sequence[RowShape], order: Sequence[int], num_ranks: int, layout: Layout) -> list[list[int]]:
    costs, seen, share = [], set(), layout.shares_prompts
    for index in order:
        first = rows[index].prompt not in seen
        seen.add(rows[index].prompt)
        costs.append(_own_tokens(rows[index], layout) + (rows[index].prompt_tokens if share and first else 0))
    total = sum(costs)
    runs: list[list[int]] = [[] for _ in range(num_ranks)]
    done = 0
    for index, cost in zip(order, costs, strict=True):
        middle = done + cost / 2
        runs[min(num_ranks - 1, int(middle * num_ranks / max(total, 1)))].append(index)
        done += cost
    return runs


def _cut_micro_batches(rows: Sequence[RowShape], run: Sequence[int], max_tokens: int, layout: Layout) -> list[MicroBatch]:
    """Cut a run into consecutive micro-batches with the least padded tokens plus overhead, by dynamic programming."""
    best = [0] + [0] * len(run)
    start_of = [0] * (len(run) + 1)
    for end in range(1, len(run) + 1):
        options = []
        for start, cost in _costs_backwards(rows, run, end, layout):
            if cost > max_tokens:
                break
            options.append((best[start] + cost + PASS_OVERHEAD_TOKENS, start))
        best[end], start_of[end] = min(options)
    batches: list[MicroBatch] = []
    end = len(run)
    while end:
        batches.append(tuple(run[start_of[end] : end]))
        end = start_of[end]
    return batches[::-1]


def _costs_backwards(rows: Sequence[RowShape], run: Sequence[int], end: int, layout: Layout) -> Iterable[tuple[int, int]]:
    """Cost of run[start:end] for start = end - 1, end - 2, ..., each in constant time."""
    prompts: set[int] = set()
    longest_prompt = longest = unpadded = 0
    share = layout.shares_prompts
    for start in range(end - 1, -1, -1):
        row = rows[run[start]]
        unpadded += _own_tokens(row, layout) + (row.prompt_tokens if share and row.prompt not in prompts else 0)
        prompts.add(row.prompt)
        longest_prompt = max(longest_prompt, row.prompt_tokens)
        longest = max(longest, _own_tokens(row, layout))
        is_folded = layout is Layout.FOLDED and unpadded <= MOST_FOLDED_TOKENS
        if layout is Layout.PACKED or is_folded:
            yield start, unpadded
        else:
            yield start, (end - start) * longest + (len(prompts) * longest_prompt if share else 0)


def _rank_cost(rows: Sequence[RowShape], batches: Sequence[MicroBatch], layout: Layout) -> int:
    costs = (computed_tokens((rows[i] for i in batch), layout) for batch in batches if batch)
    return sum(cost + PASS_OVERHEAD_TOKENS for cost in costs)
