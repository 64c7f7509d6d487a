"""Tokens of weights on trial: held back, then passed on in order or dropped."""

import asyncio

import pytest

from laminar.types import FinishReason, WeightVersion, sampled
from rollout.generation import Generation
from rollout.trial import Trial

OLD, NEW = WeightVersion(0, 1), WeightVersion(0, 2)


def part(token, version):
    return sampled([token], [-1.0], version)


def tokens(generation):
    return generation.token_ids().tolist()


async def waits(task):
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return not task.done()


async def test_an_accepted_version_s_tokens_are_passed_on_in_order_and_its_answers_are_whole():
    trial, heard = Trial(), []
    listener = trial.guard(lambda segment: heard.append(int(segment.token_ids[0])))
    listener(part(1, OLD))
    trial.begin(NEW)
    listener(part(2, NEW))
    listener(part(3, NEW))
    answer = asyncio.create_task(trial.settle(Generation((part(1, OLD), part(2, NEW), part(3, NEW)), FinishReason.STOP)))
    assert await waits(answer)
    assert heard == [1]
    trial.end(accepted=True)
    listener(part(4, NEW))
    assert heard == [1, 2, 3, 4]
    assert (tokens(await answer), (await answer).finish_reason) == ([1, 2, 3], FinishReason.STOP)


async def test_a_rejected_version_s_tokens_reach_nobody_also_those_that_come_later():
    trial, heard = Trial(), []
    listener = trial.guard(lambda segment: heard.append(int(segment.token_ids[0])))
    trial.begin(NEW)
    listener(part(2, NEW))
    answer = asyncio.create_task(trial.settle(Generation((part(1, OLD), part(2, NEW)), FinishReason.STOP)))
    assert await waits(answer)
    trial.end(accepted=False)
    listener(part(3, NEW))
    assert heard == []
    assert (tokens(await answer), (await answer).finish_reason) == ([1], FinishReason.ABORT)
    late = await trial.settle(Generation((part(3, NEW),), FinishReason.LENGTH))
    assert (late.segments, late.finish_reason) == ((), FinishReason.ABORT)


@pytest.mark.parametrize("accepted", [True, False])
async def test_an_answer_of_older_weights_waits_for_nothing(accepted):
    trial = Trial()
    trial.begin(NEW)
    answer = Generation((part(1, OLD),), FinishReason.STOP)
    assert await trial.settle(answer) is answer
    trial.end(accepted=accepted)
