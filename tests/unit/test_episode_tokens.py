"""The token record of an episode: cases D09 and D12, stop texts, stop reasons."""

import numpy as np
import pytest

from laminar.seeds import trajectory_seed
from laminar.types import ClaimedGroup, FailureKind, FinishReason, Prompt, SamplingParameters, WeightVersion, sampled
from rollout.environments.base import Observation, StepResult
from rollout.environments.single_turn import SingleTurn
from rollout.episode import play_episode
from rollout.generation import Generation
from rollout.rewards.scorer import RewardScorer, Term
from rollout.scripted import CodePointTokenizer, ScriptedEngine
from rollout.transcript import Transcript, first_stop

TOYS = ["", "a", "b", "ab", "c", "bc", "abc", "[obs]", "[/obs]", "[end]"]
GROUP = ClaimedGroup("00000007", 7, Prompt("p", "ca", {"answer": "x"}), (0, 1), 0)


class LongestMatch:
    """Case D09's tokenizer; encoding does not undo decoding."""

    def encode(self, content):
        ids = []
        while content:
            ids.append(max((i for i, toy in enumerate(TOYS) if toy and content.startswith(toy)), key=lambda i: len(TOYS[i])))
            content = content[len(TOYS[ids[-1]]) :]
        return np.asarray(ids, np.int32)

    encode_observation = encode

    def decode(self, token_ids, *, keep_special=False):
        return "".join(TOYS[i] for i in token_ids)


class OneTool:
    """Answers the first turn with a tool's output."""

    def __init__(self):
        self.heard = []

    async def reset(self, prompt):
        return Observation(prompt.content)

    async def step(self, completion):
        self.heard.append(completion)
        return StepResult(done=len(self.heard) == 2, observation=Observation("[obs]c[/obs]"))

    async def close(self):
        pass


async def play(engine, *, environment=SingleTurn, tokenizer=None, max_new_tokens=8, stop=(), attempt=0):
    return await play_episode(
        group=GROUP,
        member=1,
        attempt=attempt,
        engine=engine,
        make_environment=environment,
        scorer=RewardScorer([Term("one", lambda prompt, text: 1.0)]),
        tokenizer=tokenizer or CodePointTokenizer(),
        sampling=SamplingParameters(1.0, max_new_tokens, 0, stop=stop),
        run_seed=5,
        wall_seconds=10,
    )


def part(ids, logprobs, number, reason=FinishReason.ABORT):
    return Generation((sampled(ids, logprobs, WeightVersion(0, number)),), reason)


async def test_sampled_tokens_are_never_encoded_again():
    engine = ScriptedEngine(
        [part([1, 5, 9], [-0.11, -0.22, -0.33], 0, FinishReason.STOP), part([3, 9], [-0.44, -0.55], 0, FinishReason.STOP)]
    )
    environment = OneTool()
    trajectory = await play(engine, environment=lambda: environment, tokenizer=LongestMatch())
    (chain,) = trajectory.chains
    assert engine.requests[1].input_ids == (4, 1, 1, 5, 9, 7, 4, 8)
    assert chain.token_ids().tolist() == [4, 1, 1, 5, 9, 7, 4, 8, 3, 9]
    assert chain.mask().tolist() == [False, False, True, True, True, False, False, False, True, True]
    logprobs = chain.rollout_logprobs()[chain.mask()]
    assert logprobs.tolist() == np.asarray([-0.11, -0.22, -0.33, -0.44, -0.55], np.float32).tolist()
    assert logprobs.astype(np.float64).sum() == pytest.approx(-1.65, abs=1e-6)
    assert environment.heard == ["abc[end]", "ab[end]"]
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [(2, 5), (8, 10)]


@pytest.mark.parametrize("num_empty_parts", [1, 3])
async def test_an_aborted_answer_is_resumed_under_new_weights(num_empty_parts):
    # Case D12; more empty parts are the retry that must not double tokens.
    empty = Generation((), FinishReason.ABORT)
    engine = ScriptedEngine(
        [
            part([11, 12, 13], [-0.1, -0.2, -0.3], 3),
            part([14, 15], [-0.4, -0.5], 4),
            *[empty] * num_empty_parts,
            part([16], [-0.6], 6, FinishReason.STOP),
        ]
    )
    trajectory = await play(engine)
    (chain,) = trajectory.chains
    mask = chain.mask()
    assert chain.token_ids()[mask].tolist() == [11, 12, 13, 14, 15, 16]
    assert chain.rollout_logprobs()[mask].tobytes() == np.asarray([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], np.float32).tobytes()
    assert chain.version_numbers()[mask].tolist() == [3, 3, 3, 4, 4, 6]
    assert [request.sampling.max_new_tokens for request in engine.requests] == [8, 5] + [3] * (num_empty_parts + 1)
    assert engine.requests[-1].input_ids == (ord("c"), ord("a"), 11, 12, 13, 14, 15)
    assert 6 - trajectory.oldest.number == 3
    assert trajectory.finish_reason is FinishReason.STOP
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.STOP]


async def test_every_part_has_the_same_seed_and_its_own_request_id_of_32_characters():
    engine = ScriptedEngine([part([11], [-0.1], 3), part([12], [-0.1], 3, FinishReason.STOP)])
    trajectory = await play(engine, attempt=2)
    assert {request.sampling.seed for request in engine.requests} == {trajectory_seed(5, "00000007-001", 2)}
    assert trajectory.sampling.seed == trajectory_seed(5, "00000007-001", 2)
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == 2
    assert {len(name) for name in ids} == {32}


async def test_an_abort_on_the_last_budgeted_token_ends_by_length():
    engine = ScriptedEngine([part([11, 12], [-0.1, -0.2], 3)])
    trajectory = await play(engine, max_new_tokens=2)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.is_truncated
    assert len(engine.requests) == 1


async def test_an_engine_that_only_aborts_is_given_up(monkeypatch):
    monkeypatch.setattr("rollout.turn._LONGEST_DELAY_SECONDS", 0.0)
    trajectory = await play(ScriptedEngine([Generation((), FinishReason.ABORT)] * 20))
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert "aborted 13 times" in trajectory.failure.text


@pytest.mark.parametrize(
    "answer",
    [Generation((), FinishReason.STOP), part([1, 2, 3], [-1, -1, -1], 0, FinishReason.LENGTH)],
    ids=["no token", "more tokens than asked for"],
)
async def test_an_engine_that_breaks_its_contract_fails_the_episode(answer):
    trajectory = await play(ScriptedEngine([answer]), max_new_tokens=2)
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert trajectory.reward is None


@pytest.mark.parametrize("last", [20, 7])
async def test_truncation_follows_the_stop_reason_not_the_last_id(last):
    # Case D10, rows three and four: the cap is reached, once by an end id and once not.
    reason = FinishReason.STOP if last == 20 else FinishReason.LENGTH
    trajectory = await play(ScriptedEngine([part([5, 6, 7, last], [-1] * 4, 0, reason)]), max_new_tokens=4)
    assert trajectory.is_truncated is (last == 7)
    assert trajectory.chains[0].mask()[2:].tolist() == [True] * 4


async def test_tokens_behind_a_stop_text_are_dropped():
    engine = ScriptedEngine([part([ord(c) for c in "to b"], [-1] * 4, 1), "e END and more"])
    trajectory = await play(engine, max_new_tokens=40, stop=("be EN", "nowhere"))
    (chain,) = trajectory.chains
    assert CodePointTokenizer().decode(chain.token_ids()[2:]) == "to be EN"
    assert trajectory.finish_reason is FinishReason.STOP
    assert chain.version_numbers()[2:].tolist() == [1] * 4 + [0] * 4


@pytest.mark.parametrize(("stop", "kept"), [(("c",), 2), (("bc", "ab"), 1), (("abcab",), 3), (("z",), None), ((), None)])
def test_the_first_token_that_completes_a_stop_text_is_kept(stop, kept):
    # Tokens "ab", "c", "abc": a stop text may end inside a token, which is then kept whole.
    assert first_stop(np.asarray([3, 4, 6], np.int32), stop, LongestMatch().decode) == kept


def test_cutting_keeps_masked_heads_within_the_segment():
    transcript = Transcript()
    transcript.add_given(np.asarray([4], np.int32))
    transcript.add_sampled([sampled([1, 2, 4, 4], [-1, -2, -3, -4], WeightVersion(0, 1), masked_head_tokens=3)])
    assert transcript.cut_at_stop(("ab",), LongestMatch().decode)
    (chain,) = transcript.chains()
    assert chain.token_ids().tolist() == [4, 1, 2]
    assert chain.mask().tolist() == [False, False, False]


async def test_the_budget_is_shared_by_all_turns():
    engine = ScriptedEngine(["abcde", "abc"])
    trajectory = await play(engine, environment=OneTool, max_new_tokens=6)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [6, 1]
    assert trajectory.num_sampled_tokens == 6


async def test_a_spent_budget_ends_an_unfinished_environment_and_is_still_judged():
    trajectory = await play(ScriptedEngine(["abcdefg"]), environment=OneTool, max_new_tokens=6)
    assert trajectory.finish_reason is FinishReason.MAX_TOKENS
    assert trajectory.turns[0].finish_reason is FinishReason.LENGTH
    assert trajectory.reward == 1.0
