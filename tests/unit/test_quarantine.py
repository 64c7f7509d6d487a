"""When a replica whose weights were found wrong is restarted, and when it leaves the rota."""

import pytest

from laminar.types import WeightVersion
from rollout.quarantine import Quarantine
from rollout.verification import Check, Verdict

V1 = WeightVersion(0, 1)
RIGHT, WRONG = Verdict(V1, Check.ALL), Verdict(V1, Check.PROBE, "the probe differs")


@pytest.fixture
def record():
    return Quarantine()


def test_the_third_verdict_against_in_a_row_is_final(record):
    finals = []
    for _ in range(3):
        record.note_swap(WRONG)
        finals.append(record.is_final)
    assert finals == [False, False, True]
    assert record.reason == "the probe differs"


def test_an_accepted_swap_ends_the_row_but_not_the_count(record):
    record.note_swap(WRONG)
    record.note_swap(WRONG)
    record.note_swap(RIGHT)
    record.note_swap(WRONG)
    assert (record.num_in_row, record.num_rejections, record.is_final) == (1, 3, False)


def test_rejected_starts_count_and_accepted_ones_do_not_end_a_row(record):
    """Every swap fails, every restart passes: after three swaps it is enough."""
    record.note_swap(WRONG)
    record.note_rejection(WRONG)
    record.note_swap(WRONG)
    assert record.is_final
