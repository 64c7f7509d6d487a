"""Which sampled tokens are young enough to be trained (DESIGN section 5, policy `mask`).

A token is over age if the number the batch is trained on, less the number of the version that sampled it, exceeds the bound.
Over-age tokens leave numerator and denominator of the loss; their trajectory's reward stays in its group's statistics, for a
reward is not stale. Derived from the segments whenever it is needed, never stored.

Under `wait` and `drop` no token is ever over age, so the same mask costs nothing there, and still holds the bound where a
resumed run has another policy or bound than its groups were admitted under.
"""

from collections.abc import Iterator, Sequence

from laminar.types import BoolArray, Chain, Trajectory


def oldest_trained_number(trained_on: int, max_staleness: int | None) -> int:
    """The smallest version number whose tokens may be trained on `trained_on`; 0 if the bound excludes none."""
    return 0 if max_staleness is None else max(0, trained_on - max_staleness)


def trained_mask(chain: Chain, oldest_trained: int) -> BoolArray:
    """(T,) bool: true where a token was sampled, is trained, and is not over age.

    Args:
        chain: may mix versions.
        oldest_trained: see `oldest_trained_number`.
    """
    mask, start = chain.mask(), 0
    for segment in chain.segments:
        if segment.version is not None and segment.version.number < oldest_trained:
            mask[start : start + len(segment)] = False
        start += len(segment)
    return mask


def num_over_age_tokens(trajectory: Trajectory, oldest_trained: int) -> int:
    """Tokens that only their age keeps out of the loss."""
    return sum(count for number, count in _trained_segments(trajectory) if number < oldest_trained)


def newest_trained_number(group: Sequence[Trajectory]) -> int:
    """The newest version among tokens that may be trained: once it is over age, the group is fully masked.

    Returns:
        -1 if no token may be trained at any age.
    """
    return max((number for member in group for number, count in _trained_segments(member) if count), default=-1)


def _trained_segments(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Number of the version, and count of tokens that are trained at some age, of every sampled segment."""
    for chain in trajectory.chains:
        for segment in chain.segments:
            if segment.version is not None:
                yield segment.version.number, len(segment) - segment.masked_head_tokens
