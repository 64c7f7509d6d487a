"""A worker's standing parts for playing episodes: tokenizer, environments, rewards, how tokens are drawn.

It knows the config, not groups' leases, weights or engines' processes.
"""

from collections.abc import Sequence

from laminar.config.root import LaminarConfig
from laminar.config.sizes import longest_evaluation_tokens, longest_row_tokens
from laminar.types import ClaimedGroup, Purpose, SamplingParameters, Trajectory
from rollout.agents import build_agent_player
from rollout.environments.factory import build_environment_factory
from rollout.episode import play_episode
from rollout.generation import Generator
from rollout.journal import Journal
from rollout.rewards.scorer import build_scorer
from rollout.siblings import Judge, judge_siblings
from rollout.tokens import load_tokenizer


class Player:
    """Plays one member of a group at a time, as often as asked.

    Attributes:
        tokenizer: the model's.
    """

    def __init__(self, config: LaminarConfig, worker: str) -> None:
        self._config, self._worker = config, worker
        self.tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        self._scorer = build_scorer(config.rewards)
        self._agent = build_agent_player(config, self.tokenizer, self._scorer)
        self._make_environment = None if self._agent else build_environment_factory(config.environment)

    async def play(
        self,
        engine: Generator,
        group: ClaimedGroup,
        member: int,
        attempt: int,
        purpose: Purpose,
        journal: Journal | None = None,
    ) -> Trajectory:
        """Play one member to a reward or a failure; see `play_episode`."""
        run_seed = self._config.run.seed
        sampling = sampling_for(self._config, purpose, self.tokenizer.end_token_id)
        if self._make_environment is None:
            assert self._agent is not None
            return await self._agent.play(
                engine, group, member, attempt, sampling=sampling, run_seed=run_seed, purpose=purpose, worker=self._worker
            )
        return await play_episode(
            group=group,
            member=member,
            attempt=attempt,
            engine=engine,
            make_environment=self._make_environment,
            scorer=self._scorer,
            tokenizer=self.tokenizer,
            sampling=sampling,
            run_seed=run_seed,
            wall_seconds=self._config.environment.wall_seconds,
            max_turns=self._config.environment.max_turns,
            max_tokens=longest_for(self._config, purpose),
            strict_template=self._config.environment.strict_template,
            purpose=purpose,
            worker=self._worker,
            journal=journal,
        )

    async def close(self) -> None:
        """Let go of what serves agents."""
        if self._agent is not None:
            await self._agent.close()

    def judge_of(self, group: ClaimedGroup) -> Judge | None:
        """What gives a group's good members their group rewards (`judge_siblings`); None if no reward compares them."""

        async def judge(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
            attempts = self._config.rollout.max_attempts
            return await judge_siblings(self._scorer, self.tokenizer, group.prompt, trajectories, attempts)

        return judge if self._scorer.judges_siblings else None


def longest_for(config: LaminarConfig, purpose: Purpose) -> int:
    """Most tokens of a trajectory of this purpose."""
    return longest_evaluation_tokens(config) if purpose is Purpose.EVALUATION else longest_row_tokens(config)


def sampling_for(config: LaminarConfig, purpose: Purpose, end_token_id: int | None = None) -> SamplingParameters:
    """How tokens are drawn for a purpose; the episode sets the seed. Evaluation has its own, without filters.

    The tokenizer's own end id ends an answer as well: chat templates write it, and engines know those of the model's config
    only, which may be others (case D10).
    """
    sampling = config.rollout.sampling
    ends = {*sampling.stop_token_ids, *([] if end_token_id is None else [end_token_id])}
    evaluating = purpose is Purpose.EVALUATION
    temperature = config.eval.temperature if evaluating else sampling.temperature
    return SamplingParameters(
        temperature=0.0 if purpose is Purpose.GREEDY_BASELINE else temperature,
        max_new_tokens=(config.eval.max_new_tokens if evaluating else None) or config.rollout.max_new_tokens,
        seed=0,
        top_p=1.0 if evaluating else sampling.top_p,
        top_k=-1 if evaluating else sampling.top_k,
        stop_token_ids=tuple(sorted(ends)),
        stop=tuple(sampling.stop),
    )
