"""An episode that the user's own agent plays: it calls the gateway as any model, and its calls are the trajectory.

Invariants as in `rollout.episode`: whatever goes wrong in the agent is a failure with its kind, in bounded time, and no
process of it is left. An agent that stops because a budget was used up is judged as it stands.
It does not know HTTP, leases or weights.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from laminar.config.root import LaminarConfig
from laminar.config.sizes import longest_evaluation_tokens, longest_row_tokens
from laminar.plugins import resolve, validate_options
from laminar.seeds import trajectory_seed
from laminar.types import (
    ClaimedGroup,
    FailureKind,
    FinishReason,
    Prompt,
    Purpose,
    SamplingParameters,
    Trajectory,
    trajectory_id,
)
from rollout.boundary import EpisodeError, guard
from rollout.clock import EpisodeClock
from rollout.conversations import Conversations
from rollout.drivers import AgentDriver, Driver
from rollout.drivers import Task as Task
from rollout.environments import ENVIRONMENTS
from rollout.environments.agent import Agent
from rollout.environments.verifiers import Verifiers
from rollout.gateway import Gateway, Session
from rollout.generation import Generator
from rollout.rewards.base import RewardContext
from rollout.rewards.scorer import RewardScorer, Score, finite_number, summed
from rollout.tokens import Tokenizer
from rollout.tools.calls import PARSERS
from rollout.verifiers_driver import VerifiersDriver


@dataclass(slots=True)
class AgentPlayer:
    """Plays trajectories with one agent.

    Attributes:
        options: which agent.
        tokenizer, scorer: as for other episodes; without rewards the agent must give one.
        max_turns, max_tokens, strict_template, wall_seconds: budgets and strictness, as for other episodes.
        max_evaluation_tokens: `max_tokens` of a trajectory that is not trained.
        driver: how the agent is run; made from the options unless it is given.
        gateway: where agents call.
    """

    options: Agent.Options | Verifiers.Options
    tokenizer: Tokenizer
    scorer: RewardScorer
    wall_seconds: float
    max_turns: int | None = None
    max_tokens: int | None = None
    max_evaluation_tokens: int | None = None
    strict_template: bool = False
    driver: Driver | None = None
    gateway: Gateway = field(default_factory=Gateway)

    def __post_init__(self) -> None:
        if self.driver is None:
            assert isinstance(self.options, Agent.Options)
            self.driver = AgentDriver(self.options)

    async def close(self) -> None:
        """Let go of what serves the agents."""
        assert self.driver is not None
        await self.driver.close()
        await self.gateway.close()

    async def play(
        self,
        engine: Generator,
        group: ClaimedGroup,
        member: int,
        attempt: int,
        *,
        sampling: SamplingParameters,
        run_seed: int,
        purpose: Purpose = Purpose.TRAIN,
        worker: str = "",
    ) -> Trajectory:
        """Let the agent play one member of a group to a reward or a failure; arguments as of `play_episode`."""
        await self.gateway.start()
        identity = trajectory_id(group.group_id, member)
        sampling = replace(sampling, seed=trajectory_seed(run_seed, identity, attempt))
        longest = self.max_evaluation_tokens if purpose is Purpose.EVALUATION else self.max_tokens
        calls = Conversations(engine, self.tokenizer, sampling, self.max_turns, longest, self.strict_template)
        assert self.driver is not None
        async with AsyncExitStack() as place:
            await place.enter_async_context(self.driver.place())
            session = Session(calls, PARSERS[self.options.call_format], EpisodeClock(self.wall_seconds))
            score, reason = await self._run(session, group.prompt, identity, place)
        return Trajectory(
            trajectory_id=identity,
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            member=member,
            attempt=attempt,
            purpose=purpose,
            sampling=sampling,
            chains=calls.chains(),
            finish_reason=reason,
            reward=score.reward,
            reward_terms=dict(score.terms),
            failure=score.failure,
            turns=calls.turns(),
            timings=session.clock.timings(),
            worker=worker,
            counts={name: count for name, count in calls.counts.items() if count},
        )

    async def _run(
        self, session: Session, prompt: Prompt, identity: str, place: AsyncExitStack
    ) -> tuple[Score, FinishReason | None]:
        """The boundary where an agent's episode ends: a score or a failure, and why it ended; `place` is left in between."""
        calls = session.conversations
        try:
            with self.gateway.open(session) as key:
                task = Task(prompt, f"{self.gateway.url}/v1", key, seconds=session.clock.remaining_seconds)
                await self._finish(session, task)
            await place.aclose()
            turns = calls.turns()
            if not turns:
                raise EpisodeError(FailureKind.USER_BUG, "the agent ended without a call, so there is nothing to train")
            score, last = await self._judge(session, prompt, identity), turns[-1].finish_reason
            return score, last if last is FinishReason.LENGTH else calls.spent or last  # a cut answer stays one (D10)
        except EpisodeError as error:
            timed_out = error.failure.kind is FailureKind.TIMEOUT
            return Score(None, failure=error.failure), FinishReason.WALL_TIME if timed_out else None

    async def _finish(self, session: Session, task: Task) -> None:
        """Run the agent to its end; what it returns counts as posted."""
        driver = self.driver
        assert driver is not None
        try:
            with session.clock.book("environment"):
                value = await guard(
                    lambda: driver.run(task),
                    what="the agent",
                    kind=FailureKind.ENVIRONMENT,
                    seconds=session.clock.remaining_seconds,
                    timeout_kind=FailureKind.TIMEOUT,
                    limit="environment.wall_seconds",
                )
        except EpisodeError as error:
            if session.failure is not None:
                raise session.failure from error  # an agent that fails because its calls do is not to blame
            if session.conversations.spent is None or error.failure.kind is FailureKind.TIMEOUT:
                raise
            value = None
        if session.failure is not None:
            raise session.failure
        terms = value if isinstance(value, Mapping) else {} if value is None else {"agent": value}
        session.rewards |= {str(name): finite_number(number, "the agent") for name, number in terms.items()}

    async def _judge(self, session: Session, prompt: Prompt, identity: str) -> Score:
        """The agent's terms, each of weight 1, and the configured ones."""
        calls, turns = session.conversations, session.conversations.turns()
        context = RewardContext(
            trajectory_id=identity,
            prompt=prompt,
            completion=calls.texts[-1],
            turns=tuple(calls.texts),
            num_prompt_tokens=turns[0].start,
            num_completion_tokens=calls.num_sampled_tokens,
            finish_reason=turns[-1].finish_reason,
        )
        async with session.clock.bound("reward"):
            score = await self.scorer.score(context)
        if score.reward is None:
            return score
        if twice := session.rewards.keys() & score.terms.keys():
            raise EpisodeError(FailureKind.USER_BUG, f"agent and rewards both name a term {min(twice)!r}; rename one")
        if not (session.rewards or score.terms or self.scorer.judges_siblings):
            hint = "catch code context_length_exceeded and return one" if calls.spent else "return or post one"
            raise EpisodeError(FailureKind.USER_BUG, f"neither the agent nor [[rewards]] gave a reward; {hint}")
        return Score(summed((score.reward, *session.rewards.values())), {**score.terms, **session.rewards})


def build_agent_player(config: LaminarConfig, tokenizer: Tokenizer, scorer: RewardScorer) -> AgentPlayer | None:
    """The player that environments `agent` and `verifiers` ask for; None for environments that are stepped.

    Raises:
        ConfigError: its options are wrong.
    """
    environment = config.environment
    kind = resolve(environment.kind, ENVIRONMENTS, "environment.kind")
    if kind not in (Agent, Verifiers):
        return None
    options = validate_options(kind, environment.options, "environment.options")
    assert isinstance(options, Agent.Options | Verifiers.Options)
    driver = VerifiersDriver(options, environment.max_turns) if isinstance(options, Verifiers.Options) else None
    return AgentPlayer(
        options,
        tokenizer,
        scorer,
        wall_seconds=environment.wall_seconds,
        max_turns=environment.max_turns,
        max_tokens=longest_row_tokens(config),
        max_evaluation_tokens=longest_evaluation_tokens(config),
        strict_template=environment.strict_template,
        driver=driver,
    )
