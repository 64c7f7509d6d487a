"""Over-provisioning: more groups are begun than a step needs, and the slow tail is let go when its batch is complete. Pure.

Admission (`staleness`) allows (K + 1) * B groups, so with K > 0 more than a step's B are in flight anyway; those that come
in late hold back their replicas' next weights and grow stale. With a ratio r up to (r - 1) * B of them are recycled with
each batch: evicted, and their prompts issued again at the newest weights. What they had sampled is lost, and long answers
are hit more often than short ones (`staleness/dropped_length_*` shows it), so it is off unless asked for, and always at K =
0, where a batch is exactly what was admitted.
"""

from collections.abc import Collection, Sequence

from laminar.types import GroupHeader, GroupState


def tail_of_batch(
    headers: Sequence[GroupHeader], chosen: Collection[str], *, ratio: float, prompts_per_step: int
) -> tuple[str, ...]:
    """Groups in flight that a complete batch has overtaken, the longest-running first, at most (ratio - 1) * B.

    Args:
        headers: all outstanding groups.
        chosen: ids of the batch.
        ratio: r, 1 or more.
        prompts_per_step: B, in groups.
    """
    newest = max((header.admission for header in headers if header.group_id in chosen), default=-1)
    overtaken = [header for header in headers if header.state is GroupState.IN_FLIGHT and header.admission < newest]
    overtaken.sort(key=lambda header: header.admission)
    most = int((ratio - 1) * prompts_per_step + 1e-9)
    return tuple(header.group_id for header in overtaken[:most])
