"""The chain of relays: who takes weights from whom, in which pieces, and which version next.

Invariants: a hop takes only from a master or from a hop that joined before it, so there is never a circle, whatever each hop
knows of the others; a newcomer is last; leaving out a dead hop changes the upstream of nobody but its successors.
Does not know transports, clocks or stores.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from laminar.types import WeightVersion

MIN_CHUNK_BYTES = 256 * 1024
"""Smaller pieces cost more in messages than they save in waiting."""

MAX_CHUNK_BYTES = 16 * 1024**2
"""Larger pieces make a resumed hop repeat too much, and its buffers too large."""

_CHUNK_UNIT = 64 * 1024
"""Pieces are whole multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One relay, as the others see it.

    Attributes:
        node_id: the machine.
        joined: its place: hops that joined earlier come earlier; a restarted hop keeps its place.
        is_master: whether the trainer publishes into its store; it takes from nobody.
        is_blocked: whether it can receive nothing now (every slot is leased), and so pass nothing on.
    """

    node_id: str
    joined: float
    is_master: bool = False
    is_blocked: bool = False


def order_hops(hops: Iterable[Hop]) -> list[Hop]:
    """Masters first, the latest before others (a moved trainer's), then by time of joining."""
    return sorted(hops, key=lambda hop: (not hop.is_master, -hop.joined if hop.is_master else hop.joined, hop.node_id))


def upstream_of(node_id: str, joined: float, hops: Iterable[Hop], avoided: Collection[str] = ()) -> Hop | None:
    """Whom a hop that is no master takes weights from: the nearest living hop before it that has something to pass on.

    Splicing out a dead hop is this same choice without it.

    Args:
        node_id: the hop that asks; it need not be among `hops`.
        joined: its place.
        hops: all hops that live.
        avoided: hops that lately failed this one.

    Returns:
        None if there is nobody before it.
    """
    me = (False, joined, node_id)
    before = [
        hop
        for hop in order_hops(hops)
        if hop.node_id != node_id and (hop.is_master or (False, hop.joined, hop.node_id) < me)
    ]
    usable = [hop for hop in before if not hop.is_blocked and hop.node_id not in avoided]
    ordinary = [hop for hop in usable if not hop.is_master]
    return ordinary[-1] if ordinary else next(iter(usable), None)


def pick_offer(
    held: Collection[WeightVersion], *, newer_than: WeightVersion | None, resuming: WeightVersion | None
) -> WeightVersion | None:
    """Which version an upstream offers: what the other has begun is finished, then the newest goes next.

    Those between are skipped. Without the first half, a trainer that publishes faster than the chain is long would leave the
    last hop for ever without a complete version.

    Args:
        held: complete and arriving versions of the upstream.
        newer_than: the newest complete version of the one that asks.
        resuming: the version it has begun.
    """
    if resuming is not None and resuming in held and (newer_than is None or resuming > newer_than):
        return resuming
    return max((version for version in held if newer_than is None or version > newer_than), default=None)


def broadcast_seconds(
    *, num_machines: int, num_chunks: int, file_bytes: int, seconds_per_byte: float, start_seconds: float
) -> float:
    """T(p, k) = (p + k - 2)(M/k * T_byte + T_start): the last of `num_machines` (the master counts) has everything.

    Source: the pipeline model of the Laminar paper (arXiv 2510.12633), relay broadcast.

    Args:
        num_machines: p, 2 or more.
        num_chunks: k, 1 or more.
        file_bytes: M.
        seconds_per_byte: T_byte, of one hop.
        start_seconds: T_start, what a piece costs a hop besides its bytes.
    """
    return (num_machines + num_chunks - 2) * (file_bytes / num_chunks * seconds_per_byte + start_seconds)


def best_chunk_bytes(*, num_machines: int, file_bytes: int, seconds_per_byte: float, start_seconds: float) -> int:
    """Length of the pieces for which `broadcast_seconds` is least, within `MIN_CHUNK_BYTES` and `MAX_CHUNK_BYTES`.

    T has its minimum at k = sqrt((p - 2) M T_byte / T_start). With one hop every k above 1 only adds starts, so the
    largest pieces are taken. Arguments as `broadcast_seconds`; both times must be positive.

    Returns:
        Bytes, a multiple of 64 KiB.
    """
    waits = (num_machines - 2) * file_bytes * seconds_per_byte
    num_chunks = max(1.0, math.sqrt(max(0.0, waits) / start_seconds))
    units = math.ceil(file_bytes / num_chunks / _CHUNK_UNIT)
    return min(max(units * _CHUNK_UNIT, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
