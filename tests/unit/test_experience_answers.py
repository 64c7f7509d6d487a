"""What the data module answers: counters as stored, the frontier in JSON."""

import json

import msgspec
import pytest

from laminar.experience.answers import Counters, Frontier


def test_counters_are_read_from_their_stored_form():
    flat = [b"admitted", b"21", b"running", b"1", b"buffered", b"2", b"taken", b"3", b"trained", b"4", b"filtered", b"5"]
    flat += [b"evicted", b"3", b"evicted:stale", b"2", b"evicted:orphaned", b"1", b"failed", b"3", b"failed:tool", b"3"]
    counters = Counters.from_flat([*flat, "refused:bytes", 7, "waited_for_memory_ms", "1500"])
    assert (counters.evicted, counters.failed, counters.refused_claims) == (
        {"orphaned": 1, "stale": 2},
        {"tool": 3},
        {"bytes": 7},
    )
    assert (counters.num_evicted, counters.num_failed, counters.waited_for_memory_seconds) == (3, 3, 1.5)
    assert counters.is_balanced


def test_counters_that_lost_a_trajectory_are_not_balanced():
    assert not Counters.from_flat(["admitted", 3, "running", 1, "trained", 1]).is_balanced


def test_frontier_survives_json():
    frontier = Frontier(1, 5, 2, 40, 99, ((1, 39, 0), (2, 3, 2)), ("admitted", "99"))
    assert Frontier.from_json(json.loads(json.dumps(frontier.to_json()))) == frontier


def test_malformed_frontier_is_refused():
    with pytest.raises(msgspec.ValidationError):
        Frontier.from_json({"number": "five"})
