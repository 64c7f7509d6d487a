"""Verdicts on an engine's weights, check by check."""

import pytest

from laminar.types import WeightVersion
from relay.manifest import CHUNK_BYTES, Manifest, TensorSpec
from relay.probe import Probe
from rollout.engines.wire import RankReport
from rollout.verification import Check, verify

V1, V2 = WeightVersion(0, 1), WeightVersion(0, 2)
PROBE = Probe((5, 6, 7), (-1.0, -2.0))


class Answers:
    """An engine's client that says what it is told to."""

    def __init__(self, held=V2, ranks=(), scored=(V2, [-1.0, -2.0])):
        self.held, self.ranks, self.scored = held, list(ranks), scored

    async def weight_version(self):
        return self.held

    async def rank_reports(self):
        return self.ranks

    async def score(self, token_ids):
        assert tuple(token_ids) == PROBE.token_ids
        return self.scored


@pytest.fixture
def folder(tmp_path):
    def write(probe, dtype="F32"):
        tensors = {"a": TensorSpec(dtype, (1,), 100, 4)}
        manifest = Manifest(V2, "run", tensors, {}, 104, CHUNK_BYTES, ("0" * 16,), probe)
        (tmp_path / "manifest.json").write_text(manifest.to_json())
        return tmp_path

    return write


async def test_an_engine_that_holds_what_it_should_is_accepted_and_its_difference_told(folder):
    verdict = await verify(Answers(ranks=[RankReport(0, "0.2")], scored=(V2, [-1.004, -2.0])), folder(PROBE), V2, None)
    assert (verdict.is_accepted, verdict.check, verdict.reason) == (True, Check.ALL, "")
    assert verdict.difference == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("answers", "check", "reason"),
    [
        (Answers(held=V1), Check.VERSION, "should hold 0.2 but says it holds 0.1"),
        (Answers(ranks=[RankReport(0, "0.2"), RankReport(1, "0.1")]), Check.RANKS, "rank 1 holds 0.1 instead of 0.2"),
        (Answers(ranks=[RankReport(0, "0.2"), RankReport(1, "0.2", "", "piece 3 is wrong")]), Check.RANKS, "rank 1 read"),
        (Answers(scored=(V1, [-1.0, -2.0])), Check.PROBE, "the probe of 0.2 was answered by 0.1"),
        (Answers(scored=(V2, [-1.1, -2.0])), Check.PROBE, "differ from the trainer's by 0.05 nats a token, above 0.01"),
        (Answers(scored=(V2, [-1.0])), Check.PROBE, "differ from the trainer's by inf"),
    ],
)
async def test_what_is_wrong_is_named_by_the_check_that_found_it(folder, answers, check, reason):
    verdict = await verify(answers, folder(PROBE), V2, None)
    assert (verdict.is_accepted, verdict.check) == (False, check)
    assert reason in verdict.reason


@pytest.mark.parametrize(("dtype", "tolerance"), [("BF16", None), ("F32", 0.2)])
async def test_narrow_types_and_the_setting_allow_more(folder, dtype, tolerance):
    verdict = await verify(Answers(scored=(V2, [-1.2, -2.0])), folder(PROBE, dtype), V2, tolerance)
    assert verdict.is_accepted


async def test_what_cannot_be_checked_is_not_held_against_the_engine(folder, tmp_path):
    (tmp_path / "bare").mkdir()
    for place in (folder(None), tmp_path / "bare"):
        verdict = await verify(Answers(), place, V2, None)
        assert (verdict.is_accepted, verdict.difference) == (True, None)
