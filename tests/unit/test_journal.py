"""The journal of a running trajectory: batches, ends, resuming."""

import numpy as np
import pytest

from laminar.errors import EngineError
from laminar.experience.partial import AppendOutcome, Partial, joined_turns
from laminar.seeds import trajectory_seed
from laminar.types import ClaimedGroup, FinishReason, Prompt, SamplingParameters, WeightVersion, sampled
from rollout.environments.base import Observation, StepResult
from rollout.environments.single_turn import SingleTurn
from rollout.episode import play_episode
from rollout.generation import Generation
from rollout.journal import Journal
from rollout.rewards.scorer import RewardScorer, Term
from rollout.scripted import CodePointTokenizer, ScriptedEngine

GROUP = ClaimedGroup("00000007", 7, Prompt("p", "ca", {"answer": "x"}), (0, 1), 1, claim=3)
CONTEXT = np.asarray([1, 2], np.int32)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Engines that fail are asked again at once."""
    monkeypatch.setattr("rollout.turn._LONGEST_DELAY_SECONDS", 0.0)


def part(ids, number=0, masked=0):
    return sampled(ids, [-i / 4 for i in ids], WeightVersion(0, number), masked)


class Store:
    """Takes every batch, as the server would."""

    def __init__(self):
        self.turns, self.offsets = [], []

    def __call__(self, journal):
        piece = journal.batch()
        assert (piece.group_id, piece.member, piece.attempt, piece.claim) == ("00000007", 1, 4, 3)
        self.offsets.append(piece.offset)
        self.turns += piece.turns
        journal.settle(piece, AppendOutcome.APPENDED)

    def partial(self):
        return Partial(4, joined_turns(self.turns))

    def ids(self):
        return [i for turn in self.turns for segment in turn.segments for i in segment.token_ids.tolist()]


def journal(store, batch_tokens=3, saved=None, attempt=4):
    return Journal(GROUP, 1, attempt, batch_tokens=batch_tokens, on_batch=store, saved=saved)


def test_tokens_are_put_by_in_batches_without_the_newest_part():
    store = Store()
    book = journal(store)
    book.begin_turn(CONTEXT)
    for token in range(1, 9):
        book.note(part([token]))
    assert store.ids() == [1, 2, 3, 4, 5, 6]
    assert store.offsets == [0, 3]
    assert [len(turn.segments) for turn in store.turns] == [1, 1]  # parts of one version become one segment


def test_a_turns_last_tokens_are_put_by_with_its_end_only():
    store = Store()
    book = journal(store)
    book.begin_turn(CONTEXT)
    book.note(part([1, 2, 3]))
    assert store.turns == []
    book.end_request((part([1, 2, 3]),), FinishReason.STOP)
    (turn,) = store.turns
    assert (store.ids(), turn.finish_reason) == ([1, 2, 3], FinishReason.STOP)


def test_what_was_not_streamed_is_put_by_from_the_answer():
    store = Store()
    book = journal(store)
    book.begin_turn(CONTEXT)
    book.note(part([1, 2]))
    book.note(part([3], 1, masked=1))
    book.end_request((part([1, 2]), part([3, 4, 5], 1, masked=1)), None)
    assert store.ids() == [1, 2, 3, 4, 5]
    masks = [(s.version.number, s.masked_head_tokens) for turn in store.turns for s in turn.segments]
    assert masks == [(0, 0), (1, 1)]


def test_no_memory_keeps_a_batch_and_a_refusal_ends_the_journal():
    answers = [AppendOutcome.NO_MEMORY, AppendOutcome.APPENDED, AppendOutcome.LOST]
    seen = []

    def on_batch(book):
        piece = book.batch()
        seen.append((piece.offset, sum(turn.num_tokens for turn in piece.turns)))
        book.settle(piece, answers[len(seen) - 1])

    book = journal(on_batch, batch_tokens=2)
    book.begin_turn(CONTEXT)
    for token in range(12):
        book.note(part([token]))
    assert seen == [(0, 2), (0, 3), (3, 2)]
    assert book.batch() is None


def test_a_trajectory_may_end_while_its_batch_is_under_way():
    book = journal(lambda _: None, batch_tokens=1)
    book.begin_turn(CONTEXT)
    book.end_request((part([1, 2, 3]),), FinishReason.STOP)
    piece = book.batch()
    book.close()
    book.settle(piece, AppendOutcome.APPENDED)
    assert book.batch() is None


def test_a_heir_in_another_context_starts_afresh_and_leaves_what_is_stored_alone():
    store = Store()
    book = journal(store)
    book.begin_turn(CONTEXT)
    book.end_request((part([1, 2, 3]),), None)
    heir = journal(Store(), saved=store.partial())
    assert heir.begin_turn(np.asarray([1, 3], np.int32)).segments == ()
    heir.end_request((part([4, 5, 6]),), None)
    assert heir.batch() is None
    assert heir.resumed_tokens == 0


async def play(engine, book, *, environment=SingleTurn, max_new_tokens=8, stop=()):
    return await play_episode(
        group=GROUP,
        member=1,
        attempt=4,
        engine=engine,
        make_environment=environment,
        scorer=RewardScorer([Term("one", lambda prompt, text: 1.0)]),
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, max_new_tokens, 0, stop=stop),
        run_seed=5,
        wall_seconds=10,
        journal=book,
    )


async def test_case_d12_across_workers_the_heir_keeps_what_was_sampled_and_asks_for_the_rest():
    store = Store()
    aborted = [
        Generation((part([11, 12, 13], 3),), FinishReason.ABORT),
        Generation((part([14, 15], 4),), FinishReason.ABORT),
    ]
    first = await play(ScriptedEngine(aborted), journal(store, batch_tokens=1))  # its engine's script ends: it dies
    assert first.failure is not None
    for _ in range(2):  # resumed twice from the same partial: still six tokens, not eight
        engine = ScriptedEngine([Generation((), FinishReason.ABORT), Generation((part([16], 6),), FinishReason.STOP)])
        trajectory = await play(engine, journal(Store(), saved=store.partial()))
        (chain,) = trajectory.chains
        assert chain.token_ids().tolist() == [ord("c"), ord("a"), 11, 12, 13, 14, 15, 16]
        assert chain.version_numbers()[2:].tolist() == [3, 3, 3, 4, 4, 6]
        expected = np.asarray([-i / 4 for i in range(11, 17)], np.float32)
        assert chain.rollout_logprobs()[2:].tobytes() == expected.tobytes()
        assert chain.mask().tolist() == [False] * 2 + [True] * 6
        assert [request.sampling.max_new_tokens for request in engine.requests] == [3, 3]
        assert {request.sampling.seed for request in engine.requests} == {trajectory_seed(5, "00000007-001", 4)}
        assert 6 - trajectory.oldest.number == 3
        assert trajectory.finish_reason is FinishReason.STOP


async def test_an_answer_that_had_ended_is_only_judged_again():
    store = Store()
    await play(ScriptedEngine(["abcd"]), journal(store, batch_tokens=1))
    engine = ScriptedEngine([])
    trajectory = await play(engine, journal(Store(), saved=store.partial()))
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, FinishReason.STOP)
    assert engine.requests == []
    assert CodePointTokenizer().decode(trajectory.chains[0].token_ids()) == "caabcd"


async def test_a_stop_text_within_what_was_kept_ends_the_turn_there():
    store = Store()
    book = journal(store, batch_tokens=1)
    book.begin_turn(CodePointTokenizer().encode("ca"))
    for character in "to END more":
        book.note(part([ord(character)]))
    engine = ScriptedEngine([])
    trajectory = await play(engine, journal(Store(), saved=store.partial()), max_new_tokens=40, stop=("END",))
    assert trajectory.finish_reason is FinishReason.STOP
    assert CodePointTokenizer().decode(trajectory.chains[0].token_ids()) == "cato END"


async def test_a_spent_budget_asks_for_nothing():
    store = Store()
    book = journal(store, batch_tokens=1)
    book.begin_turn(CodePointTokenizer().encode("ca"))
    book.end_request((part([5, 6]),), None)
    trajectory = await play(ScriptedEngine([]), journal(Store(), saved=store.partial()), max_new_tokens=2)
    assert trajectory.finish_reason is FinishReason.LENGTH


class Echo:
    """Two turns; deterministic, so another worker may replay it."""

    resumable = True

    def __init__(self):
        self.heard = []

    async def reset(self, prompt):
        return Observation(prompt.content)

    async def step(self, completion):
        self.heard.append(completion)
        return StepResult(done=len(self.heard) == 2, observation=Observation(f"[{completion}]"))

    async def close(self):
        pass


async def test_a_resumable_environment_is_replayed_with_the_answers_that_were_kept():
    store, environment = Store(), Echo()
    broken = ScriptedEngine(["abc", Generation((part([ord("x"), ord("y")]),), FinishReason.ABORT)])
    assert (await play(broken, journal(store, batch_tokens=1), environment=Echo)).failure is not None
    engine = ScriptedEngine(["z"])
    trajectory = await play(engine, journal(Store(), saved=store.partial()), environment=lambda: environment)
    assert environment.heard == ["abc", "xyz"]
    assert CodePointTokenizer().decode(trajectory.chains[0].token_ids()) == "caabc[abc]xyz"
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [(2, 5), (10, 13)]
    assert engine.requests[0].sampling.max_new_tokens == 8 - 5


async def test_an_engine_that_fails_before_a_token_is_a_failure_and_one_that_fails_behind_some_is_asked_again():
    fresh = await play(ScriptedEngine([EngineError("gone")]), journal(Store()))
    assert "the engine failed: gone" in fresh.failure.text
    behind = ScriptedEngine([Generation((part([1, 2]),), FinishReason.ABORT), EngineError("gone"), "c"])
    trajectory = await play(behind, journal(Store()))
    assert trajectory.chains[0].token_ids()[2:].tolist() == [1, 2, ord("c")]
    for_ever = ScriptedEngine([Generation((part([1, 2]),), FinishReason.ABORT)] + [EngineError("gone")] * 14)
    assert "13 times in a row without a new token: gone" in (await play(for_ever, journal(Store()))).failure.text


async def test_an_answer_that_is_refused_after_parts_of_it_were_put_by_is_never_mixed_with_the_next_one():
    class Breaking(ScriptedEngine):
        async def generate(self, input_ids, sampling, request_id, on_segment=None):
            if len(self.requests) == 1:
                for token in (21, 22, 23):
                    on_segment(part([token]))
            return await super().generate(input_ids, sampling, request_id, on_segment)

    aborted = Generation((part([11]),), FinishReason.ABORT)
    engine = Breaking(
        [aborted, EngineError("a log-prob is not finite"), Generation((part([31, 32, 33, 34], 1),), FinishReason.STOP)]
    )
    store = Store()
    trajectory = await play(engine, journal(store, batch_tokens=1))
    assert trajectory.chains[0].token_ids()[2:].tolist() == [11, 31, 32, 33, 34]
    assert store.ids() == [11, 21, 22]  # of one answer; the heir of it asks for the rest
    assert store.turns[-1].finish_reason is None
