"""When a run evaluates, and what a failing evaluation does to it (D24 d and e): the real schedule, a crew of one."""

import asyncio
import contextlib
import json

import pytest

from laminar.cluster.evaluation import Evaluations
from laminar.cluster.ray_cluster import RoleDiedError
from laminar.config.root import LaminarConfig
from laminar.errors import DeadlineError, EngineError, RunFailedError, first_error
from rollout.evaluation import EvaluationResult

pytestmark = pytest.mark.heavy


class Crew:
    """Answers with the version that was asked for, or a later one; troubles are raised first, one a call."""

    def __init__(self, held=None, troubles=(), rewards=None, failures=None):
        self.asked, self.held, self.troubles = [], held or {}, list(troubles)
        self.rewards, self.failures = rewards or {"a": [1.0], "b": [0.0]}, failures or {"c": "no answer"}
        self.reached = asyncio.Event()
        self.newest = 0

    async def evaluate(self, prompts, min_number, wait_seconds):
        self.asked.append(min_number)
        while self.newest < min_number:
            self.reached.clear()
            await self.reached.wait()
        if self.troubles:
            raise self.troubles.pop(0)
        return EvaluationResult(self.held.get(min_number, min_number), self.rewards, self.failures, 2.5)

    def publish(self, number):
        self.newest = number
        self.reached.set()


class Telemetry:
    def __init__(self):
        self.events = []

    async def emit(self, kind, metrics=None, *, fields=None):
        self.events.append((kind, metrics or {}, fields))


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr("laminar.cluster.evaluation.RETRY_SECONDS", 0.001)

    def make_evaluations(crew, lines=(), **settings):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "eval": settings})
        telemetry, said = Telemetry(), []
        made = Evaluations(config, [b"prompt"], tmp_path / "metrics.jsonl", crew, telemetry, said.append)
        made.telemetry, made.said = telemetry, said
        return made

    return make_evaluations


@contextlib.asynccontextmanager
async def running(evaluations):
    async with asyncio.timeout(5):
        task = asyncio.create_task(evaluations.run())
        yield task
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def evaluated(evaluations):
    return [fields["step"] for kind, _, fields in evaluations.telemetry.events if kind == "evaluation"]


async def test_every_due_version_is_asked_for_before_it_is_there_and_the_last_one_once(make):
    crew = Crew()
    evaluations = make(crew, every_steps=2)
    async with running(evaluations):
        await until(lambda: crew.asked == [2])
        for number in (1, 2):
            crew.publish(number)
        await until(lambda: crew.asked == [2, 4])
        crew.publish(4)
        await evaluations.finish(4)
    assert evaluated(evaluations) == [2, 4]
    assert crew.asked[:2] == [2, 4]
    metrics = evaluations.telemetry.events[0][1]
    assert (metrics["eval/accuracy"], metrics["eval/num_prompts"], metrics["eval/failed"]) == (0.5, 2, 1)
    assert metrics["time/evaluation_seconds"] == 2.5


async def test_an_end_between_two_due_versions_is_evaluated_for_itself(make):
    crew = Crew()
    evaluations = make(crew, every_steps=4)
    async with running(evaluations):
        crew.publish(4)
        await until(lambda: evaluated(evaluations) == [4])
        crew.publish(5)
        await evaluations.finish(5)
    assert evaluated(evaluations) == [4, 5]


async def test_versions_that_were_passed_by_are_not_caught_up_with(make):
    """The worker was at 7 when 2 was due: the next one is 8."""
    crew = Crew(held={2: 7})
    evaluations = make(crew, every_steps=2)
    async with running(evaluations):
        crew.publish(2)
        await until(lambda: crew.asked == [2, 8])
    assert evaluated(evaluations) == [7]


async def test_a_resumed_run_goes_on_behind_what_it_evaluated(make):
    crew = Crew()
    lines = [{"kind": "evaluation", "step": 4}, {"kind": "step", "step": 5}]
    async with running(make(crew, lines, every_steps=2)):
        await until(lambda: crew.asked == [6])


async def test_a_due_version_that_a_kill_left_out_is_made_good_with_the_first_one_after_the_resume(make):
    """Killed at step 5 before 4 was evaluated: workers hold 5 when it is asked for."""
    crew = Crew(held={4: 5})
    lines = [{"kind": "evaluation", "step": 0}, {"kind": "step", "step": 5}]
    evaluations = make(crew, lines, every_steps=4)
    crew.publish(5)
    async with running(evaluations):
        await until(lambda: crew.asked == [4, 8])
    assert evaluated(evaluations) == [5]


async def test_evaluations_that_a_resume_takes_back_are_made_again(make):
    """Evaluated at 4 and 8, restored at 6: 8 is another version now, and 12 is asked for once."""
    crew = Crew()
    evaluations = make(crew, [{"kind": "evaluation", "step": step} for step in (4, 8)], every_steps=4)
    async with running(evaluations):
        await until(lambda: crew.asked == [12])
        evaluations.rewind(6)
        await until(lambda: crew.asked == [12, 8])
        crew.publish(8)
        await until(lambda: evaluated(evaluations) == [8])
        crew.publish(12)
        await until(lambda: evaluated(evaluations) == [8, 12])
    assert crew.asked == [12, 8, 16]


async def test_what_earlier_lives_left_out_is_tried_once_even_if_that_fails(make):
    crew = Crew(troubles=[EngineError("no")])
    evaluations = make(crew, [{"kind": "step", "step": 100}], every_steps=10)
    async with running(evaluations):
        crew.publish(100)
        await until(lambda: evaluations.said)
        await until(lambda: len(crew.asked) == 2)
        assert crew.asked == [10, 110]


async def test_the_last_version_is_evaluated_again_if_a_resume_took_its_evaluation_back(make):
    crew = Crew()
    evaluations = make(crew, [{"kind": "evaluation", "step": step} for step in (4, 8)])
    evaluations.rewind(6)
    crew.publish(8)
    await asyncio.wait_for(evaluations.finish(8), 5)
    assert evaluated(evaluations) == [8]


async def test_a_trainer_that_comes_back_where_it_was_changes_nothing(make):
    crew = Crew()
    evaluations = make(crew, [{"kind": "evaluation", "step": 4}], every_steps=4)
    async with running(evaluations):
        await until(lambda: crew.asked == [8])
        evaluations.rewind(6)
        crew.publish(8)
        await until(lambda: crew.asked == [8, 12])
    assert evaluated(evaluations) == [8]


async def test_version_0_is_not_asked_for_once_a_step_was_trained(make):
    assert not make(Crew(), [{"kind": "step", "step": 1}]).wants_start


async def test_before_step_1_version_0_is_evaluated(make):
    evaluations = make(Crew())
    assert evaluations.wants_start
    await evaluations.evaluate_start()
    assert evaluated(evaluations) == [0]


async def test_a_dead_worker_or_a_version_that_is_late_is_no_failure(make):
    crew = Crew(troubles=[RoleDiedError("rollout-0 ended"), DeadlineError("the engine to hold version number 2", 1.0)])
    evaluations = make(crew, every_steps=2)
    async with running(evaluations):
        crew.publish(2)
        await until(lambda: evaluated(evaluations) == [2])
    assert crew.asked[:3] == [2, 2, 2]
    assert not any(kind == "notice" for kind, *_ in evaluations.telemetry.events)


async def test_a_failing_evaluation_is_told_and_the_run_goes_on(make):
    crew = Crew(troubles=[EngineError("out of memory")])
    evaluations = make(crew, every_steps=2)
    async with running(evaluations):
        crew.publish(2)
        await until(lambda: crew.asked == [2, 4])
        crew.publish(4)
        await until(lambda: evaluated(evaluations) == [4])
    assert "evaluation failed: out of memory" in evaluations.said


async def test_it_stops_the_run_if_that_is_configured(make):
    crew = Crew(troubles=[EngineError("out of memory")])
    evaluations = make(crew, every_steps=2, on_failure="stop")
    crew.publish(2)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(evaluations.run(), 5)
    error = first_error(caught.value)
    assert isinstance(error, RunFailedError)
    assert "out of memory" in str(error)


@pytest.mark.parametrize("on_failure", ["go_on", "stop"])
async def test_an_evaluation_in_which_every_answer_failed_has_failed_and_has_no_accuracy(make, on_failure):
    failures = {"eval-a-000": "the judge is away", "eval-b-000": "the judge sleeps"}
    crew = Crew(rewards={"a": [], "b": []}, failures=failures)
    evaluations = make(crew, on_failure=on_failure)
    crew.publish(4)
    text = "evaluation failed: all 2 answers of version 4 failed; the first: the judge is away"
    with pytest.raises(RunFailedError, match=text) if on_failure == "stop" else contextlib.nullcontext():
        await evaluations.finish(4)
    assert [(kind, fields) for kind, _, fields in evaluations.telemetry.events] == [("notice", {"text": text})]
    assert evaluations.said == [text]


async def test_without_held_out_prompts_or_an_interval_nothing_is_asked(make):
    crew = Crew()
    await asyncio.wait_for(make(crew).run(), 5)
    assert crew.asked == []
