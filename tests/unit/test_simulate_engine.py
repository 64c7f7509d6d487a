"""The simulated engine and lockstep systems against sums done by hand."""

from dataclasses import replace

import numpy as np
import pytest
from simpy import Environment

from laminar.simulate.cluster import Cluster, Engine, Trainer, Transfers
from laminar.simulate.engine import SimulatedEngine
from laminar.simulate.requests import Group, Request
from laminar.simulate.simulation import simulate
from laminar.simulate.system import System
from laminar.simulate.timings import Lengths, StepTimes
from laminar.simulate.workload import Workload

FLAT = StepTimes(np.array([1.0, 1000.0]), np.array([0.010, 0.010]), 1000.0)
"""10 ms a step, whatever runs."""
GROWING = StepTimes(np.array([1.0, 3.0, 5.0]), np.array([0.010, 0.014, 0.018]), 1000.0)
"""10 ms, and 2 ms more for each further request at 1,000 tokens of context."""


def constant(tokens):
    return Lengths(np.array([0.0, 1.0]), np.array([float(tokens), float(tokens)]))


def engine(times=FLAT, **changes):
    values = {"num_gpus": 1, "capacity_tokens": 10**6, "max_running": 64, "prefill_tokens_per_second": 1e12}
    return Engine(times, **values | changes)


def request(length, context=0.0):
    group = Group(0, 0, None)
    return Request(group, float(length), (float(length),), float(context), float(context))


def play(kind, requests):
    env, ended = Environment(), []
    simulated = SimulatedEngine(env, kind, lambda r: ended.append((r, env.now)))
    simulated.add(requests)
    env.run()
    simulated.settle()
    return simulated, ended


def test_one_request_takes_a_step_a_token():
    simulated, [(_, when)] = play(engine(), [request(100)])
    assert when == pytest.approx(1.0)
    assert simulated.generated == pytest.approx(100)


def test_a_step_grows_with_the_context_as_the_sum_over_single_steps_says():
    requests = [request(200, context=50), request(120, context=300), request(120, context=10)]
    _, ended = play(engine(GROWING), requests)
    contexts, seconds = [50.0, 300.0, 10.0], 0.0
    for token in range(200):
        running = [0, 1, 2] if token < 120 else [0]
        seconds += GROWING.step_seconds(len(running), 0) + (0.0 if len(running) == 1 else sum(contexts) * 4e-3 / 3000)
        for index in running:
            contexts[index] += 1
    assert ended[-1][1] == pytest.approx(seconds, rel=1e-6)


def test_prefill_comes_first_and_the_hosts_overhead_is_part_of_every_step():
    kind = engine(prefill_tokens_per_second=1000.0, overhead_seconds=0.002, request_overhead_seconds=0.003)
    _, ended = play(kind, [request(10, context=500)])
    assert ended[0][1] == pytest.approx(0.5 + 10 * 0.015)


def test_more_than_max_running_wait_their_turn():
    _, ended = play(engine(max_running=2), [request(100), request(100), request(100)])
    assert [when for _, when in ended] == pytest.approx([1.0, 1.0, 2.0])


def test_the_youngest_goes_back_when_the_cache_is_full_and_nothing_is_lost():
    requests = [request(1000, context=10), request(1000, context=10)]
    simulated, ended = play(engine(capacity_tokens=1500), requests)
    assert [r for r, _ in ended] == requests
    assert simulated.num_retracted == 1
    assert simulated.generated == pytest.approx(2000)
    assert simulated.context == 0


def test_a_request_taken_out_keeps_what_it_has_sampled():
    env = Environment()
    simulated = SimulatedEngine(env, engine(), lambda r: None)
    moved = request(100, context=5)
    simulated.add([moved, request(50)])
    env.run(until=0.25)
    simulated.take_out([moved])
    assert (moved.sampled, moved.context) == (pytest.approx(25), pytest.approx(30))
    env.run()
    assert simulated.generated == pytest.approx(75)


def workload(lengths, **changes):
    values = {"prompt_tokens": 0, "max_new_tokens": 10**6, "group_size": 2, "prompts_per_step": 4}
    return Workload(lengths, **values | changes)


def cluster(num_replicas=1, step_seconds=(2.0,), **changes):
    return Cluster(engine(**changes), num_replicas, Trainer(1, 1.0, step_seconds=step_seconds), Transfers())


def test_synchronous_throughput_is_the_batch_over_generating_and_training():
    """8 answers of 100 tokens side by side take 1 s, a step 2 s."""
    outcome = simulate(workload(constant(100)), cluster(), System("synchronous"), num_steps=4, warm_steps=1)
    assert outcome.tokens_per_second == pytest.approx(800 / 3.0)
    assert outcome.trainer_idle_share == pytest.approx(1 / 3)
    assert outcome.staleness == {0: 1.0}


@pytest.mark.parametrize(("step", "expected"), [(2.0, 2.0), (0.25, 1.0)])
def test_one_step_apart_the_slower_of_generating_and_training_counts(step, expected):
    outcome = simulate(workload(constant(100)), cluster(step_seconds=(step,)), System("one_step"), num_steps=5, warm_steps=2)
    assert outcome.tokens_per_second == pytest.approx(800 / expected)
    assert outcome.staleness == {1: 1.0}


def test_lockstep_waits_for_the_longest_of_the_batch():
    """One of 8 answers has 1,000 tokens instead of 10, on average; each batch takes as long as its longest."""
    lengths = Lengths(np.array([0.0, 0.875, 0.8750001, 1.0]), np.array([10.0, 10.0, 1000.0, 1000.0]))
    outcome = simulate(workload(lengths), cluster(step_seconds=(0.5,)), System("synchronous"), num_steps=40, warm_steps=0)
    for seconds in outcome.step_seconds:
        assert seconds == pytest.approx(10.5, abs=1e-6) or seconds == pytest.approx(0.6, abs=1e-6)
    assert max(outcome.step_seconds) == pytest.approx(10.5)


def test_streaming_trains_mini_batches_while_the_tail_is_generated():
    """Half the answers take 1 s, half 3 s; half a batch trains in 1 s: 4 s instead of 5 for the first batch."""
    lengths = Lengths(np.array([0.0, 0.5, 0.5000001, 1.0]), np.array([100.0, 100.0, 300.0, 300.0]))
    many = workload(lengths, group_size=1, prompts_per_step=16)
    base = cluster(step_seconds=(2.0,))
    streaming = Cluster(base.engine, 1, Trainer(1, 1.0, mini_batches=2, step_seconds=(2.0,)), base.transfers)
    first = simulate(many, streaming, System("stream"), num_steps=1, warm_steps=0).seconds
    apart = simulate(many, base, System("one_step"), num_steps=1, warm_steps=0).seconds
    assert first < apart


def test_weights_cost_what_their_bytes_take():
    transfers = Transfers(model_bytes=60e9, publish_bytes_per_second=100e9, load_bytes_per_second=120e9)
    assert (transfers.publish_seconds, transfers.load_seconds) == (pytest.approx(0.6), pytest.approx(0.5))
    assert transfers.arrival_seconds(0) < transfers.arrival_seconds(9)
    grown = transfers.global_sync_seconds(64 * 8) / transfers.global_sync_seconds(4 * 8)
    assert grown == pytest.approx(1 + 4 * transfers.sync_level_share)


def test_what_a_step_costs_follows_from_the_engine_it_is_of():
    """10 ms alone and 2 ms for each further request at 1,000 tokens; 3 requests: 4 ms over 3,000 tokens."""
    fixed, by_token = engine(GROWING, max_running=3).step_costs
    assert fixed == pytest.approx([0.010] * 4)
    assert by_token == pytest.approx([0.0, 0.0, 1e-6, 4e-3 / 3000])
    slower = replace(engine(GROWING, max_running=3), overhead_seconds=0.005)
    assert slower.step_costs[0] == pytest.approx([0.015] * 4)


@pytest.mark.parametrize(
    ("spans", "oldest"), [([], 7), ([(8, 0.0)], 8), ([(8, 0.0), (9, 5.0)], 8), ([(8, 0.0), (6, 5.0)], 6)]
)
def test_the_oldest_version_of_an_answer_is_the_least_that_sampled_it_or_its_claim(spans, oldest):
    answer = Request(Group(0, 7, None), 10.0, (10.0,), 0.0, 0.0, spans=spans)
    assert answer.oldest == oldest
