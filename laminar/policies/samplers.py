"""Samplers: the order in which ready groups are preferred, within the freedom that the staleness rule leaves.

A sampler takes the ready groups and the number the batch is trained on, and returns each group exactly once. It decides
nothing about legality (`laminar.policies.staleness` does) and must be pure: resuming a run asks it again.
"""

from collections.abc import Callable, Mapping, Sequence

from laminar.types import GroupHeader

Sampler = Callable[[Sequence[GroupHeader], int], Sequence[GroupHeader]]


def fifo(ready: Sequence[GroupHeader], trained_on: int) -> Sequence[GroupHeader]:
    """In order of admission."""
    return sorted(ready, key=lambda h: h.admission)


def oldest_first(ready: Sequence[GroupHeader], trained_on: int) -> Sequence[GroupHeader]:
    """The stalest first; among equals by admission."""
    return sorted(ready, key=lambda h: (h.oldest, h.admission))


def freshest_first(ready: Sequence[GroupHeader], trained_on: int) -> Sequence[GroupHeader]:
    """The least stale first; among equals by admission."""
    return sorted(ready, key=lambda h: (-h.oldest, h.admission))


SAMPLERS: Mapping[str, str] = {
    "fifo": "laminar.policies.samplers:fifo",
    "oldest_first": "laminar.policies.samplers:oldest_first",
    "freshest_first": "laminar.policies.samplers:freshest_first",
}
"""`experience.sampler` by name; resolve with `laminar.plugins.resolve`."""
