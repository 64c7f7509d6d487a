"""How many groups a worker plays at once: fewer under pressure, slowly more otherwise. Pure.

Additive increase, multiplicative decrease, as for any shared resource whose size nobody knows (Chiu and Jain, 1989).
"""

PRESSURE_KV_SHARE = 0.95
"""A cache that is fuller than this while requests wait will soon preempt."""
DECREASE = 0.75


def next_limit(limit: int, *, ceiling: int, in_flight: int, kv_share: float, num_waiting: int, num_retracted: int) -> int:
    """The limit for the time up to the next look.

    Args:
        limit: the present one.
        ceiling: the highest that is allowed.
        in_flight: groups being played.
        kv_share: of the engine's cache in use.
        num_waiting: requests that the engine has not begun.
        num_retracted: requests that it preempted since the last look.

    Returns:
        At least 1, at most `ceiling`. Under pressure it falls below what is in flight, so that nothing new is claimed.
    """
    if num_retracted or (num_waiting and kv_share > PRESSURE_KV_SHARE):
        return max(1, int(min(limit, ceiling, in_flight) * DECREASE))
    if in_flight >= limit and not num_waiting:
        return min(ceiling, limit + 1)
    return min(ceiling, limit)
