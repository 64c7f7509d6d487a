"""Who waits for whom, in one sentence, from the states in which roles spend their time (pure).

The shares come from clocks that sum to wall time, so they can be compared: a trainer that waits while rollouts decode lacks
tokens; rollouts that stand still while the trainer trains lack a faster trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shares = Mapping[str, float]
"""State to share of the time, summing to 1."""

MUCH = 0.25
MOST = 0.8
TOP, BOTTOM = 0.75, 0.25
TURNS = (
    "generation and training take turns at staleness.max_staleness = 0; raise it to let them overlap, or keep the wait as "
    "the price of on-policy data"
)


@dataclass(frozen=True, slots=True)
class Filtering:
    """What became of the groups that were played lately.

    Attributes:
        ratio: share of them that was filtered because all their members got the same reward.
        level: where their mean reward lies between the lowest (0) and the highest (1) of the run; None if unknown.
    """

    ratio: float = 0.0
    level: float | None = None


def mean_shares(roles: Sequence[Shares]) -> dict[str, float]:
    """The mean over roles, for equally long windows."""
    states = sorted({state for shares in roles for state in shares})
    return {state: sum(shares.get(state, 0.0) for shares in roles) / len(roles) for state in states} if roles else {}


def bottleneck(
    trainer: Shares,
    rollouts: Sequence[Shares],
    *,
    staleness_mean: float | None,
    bound: int | None,
    is_alive: bool = True,
    is_paused: bool = False,
    filtering: Filtering = Filtering(),
) -> str:
    """What limits the run, or limited it in the end, and what to change.

    Args:
        trainer: rank 0's shares of the last minutes.
        rollouts: each worker's, over the same time; empty of one that has told nothing yet.
        staleness_mean: of the trajectories trained lately; None if unknown.
        bound: K; None if unbounded.
        is_alive: whether the run is.
        is_paused: rollouts admit nothing because somebody asked for it.
        filtering: how much of what is played teaches nothing.
    """
    known = [shares for shares in rollouts if shares]
    if not is_alive:
        limit = f" Its last minutes: {_limit(trainer, known, staleness_mean, bound, filtering)}" if trainer and known else ""
        return f"The run has ended.{limit}"
    if is_paused:
        return "Rollouts are paused: nothing new is admitted until `laminar unpause`."
    if not trainer:
        return "Not enough is known yet: the roles are starting."
    if not known:
        return "No rollout worker is heard of: they are starting, or have ended; see their logs."
    return _limit(trainer, known, staleness_mean, bound, filtering)


def _limit(
    trainer: Shares, rollouts: Sequence[Shares], staleness_mean: float | None, bound: int | None, filtering: Filtering
) -> str:
    replica = mean_shares(rollouts)
    wait, held = trainer.get("wait", 0.0), replica.get("idle_staleness", 0.0)
    if trainer.get("start", 0.0) + trainer.get("restore", 0.0) > 0.5:
        return "The trainer is starting: no step yet."
    if filtering.ratio >= MOST:
        return _no_signal(filtering, wait)
    if wait >= MUCH:
        return f"Trainer waits {percent(wait)} of the time: {_lack_of_tokens(replica, staleness_mean, bound)}."
    overhead = sum(trainer.get(state, 0.0) for state in ("publish", "spool", "checkpoint"))
    if overhead >= MUCH:
        worst = max(("publish", "spool", "checkpoint"), key=lambda state: trainer.get(state, 0.0))
        remedy = {
            "publish": "the weights go out slowly: look at the weights page, and give relay.root memory",
            "spool": "the replay spool is on a slow disk: put run.directory on a faster one",
            "checkpoint": "checkpoints take long: raise checkpoint.every_steps",
        }[worst]
        return f"Trainer spends {percent(overhead)} of the time on {worst}: {remedy}."
    if held >= MUCH and bound == 0:
        return f"Rollouts stand still {percent(held)} of the time: {TURNS}."
    if held >= MUCH:
        return (
            f"Rollouts stand still {percent(held)} of the time, held back by the staleness bound, and the trainer trains "
            f"{percent(trainer.get('train', 0.0))}: training is the slower side; add trainer ranks, or take workers away."
        )
    return (
        f"Balanced: the trainer trains {percent(trainer.get('train', 0.0))} of the time and waits {percent(wait)}; "
        f"rollouts generate {percent(replica.get('decode', 0.0) + replica.get('prefill', 0.0))}."
    )


def _no_signal(filtering: Filtering, wait: float) -> str:
    """More rollouts would only play more groups from which nothing is learned."""
    what = f"{percent(filtering.ratio)} of the groups are filtered, for all their attempts get the same reward"
    waits = f" (trainer waits {percent(wait)} of the time)" if wait >= MUCH else ""
    if filtering.level is not None and filtering.level >= TOP:
        return f"The task is too easy: {what}, a high one{waits}; take harder prompts."
    if filtering.level is not None and filtering.level <= BOTTOM:
        return f"The task is too hard: {what}, a low one{waits}; take easier prompts, or give partial rewards."
    return (
        f"The task is too easy or too hard, prompt by prompt: {what}{waits}; leave out prompts that all or none solve, or "
        "raise rollout.group_size."
    )


def _lack_of_tokens(replica: Shares, staleness_mean: float | None, bound: int | None) -> str:
    def share(*states: str) -> float:
        return sum(replica.get(state, 0.0) for state in states)

    slowest = max(
        (
            ("idle_bytes",),
            ("idle_staleness",),
            ("restart", "start"),
            ("swap", "drain"),
            ("environment",),
            ("decode", "prefill"),
        ),
        key=lambda states: share(*states),
    )
    takes_turns = bound == 0 and slowest[0] in ("decode", "idle_staleness")
    if slowest[0] != "decode" and not takes_turns and share(*slowest) >= MUCH:
        return _remedy(slowest[0], percent(share(*slowest)))
    if share("idle_end_of_data", "idle_not_ready") >= MUCH:
        return "there is nothing to play: the data is at its end, or the run is being restored"
    if takes_turns:
        return TURNS
    text = "add rollouts, or raise the in-flight limit"
    if bound is not None and staleness_mean is not None and staleness_mean <= bound / 2:
        text += f"; staleness (mean {staleness_mean:.1f}) is far below its bound of {bound}"
    return text


def _remedy(state: str, share: str) -> str:
    return {
        "idle_bytes": f"the buffer's bytes hold rollouts back {share}; raise experience.max_bytes",
        "idle_staleness": f"rollouts stand still {share}, held back by the bound; raise staleness.max_staleness",
        "restart": f"engines are being started {share} of the time; read their logs",
        "swap": f"engines take weights {share} of the time; train larger batches, so that versions come less often",
        "environment": f"rollouts wait {share} for environments and rewards; speed those up, or raise the in-flight limit",
    }[state]


def percent(share: float) -> str:
    """`41 %`."""
    return f"{100 * share:.0f} %"
