"""Asynchronous systems in the simulator: bounds, conservation, moves, modes, failures."""

from dataclasses import replace

import numpy as np
import pytest

from laminar.errors import ConfigError
from laminar.policies.repack import RepackLimits
from laminar.policies.samplers import freshest_first
from laminar.simulate.cluster import Cluster, Engine, Failure, Trainer, Transfers
from laminar.simulate.simulation import StandstillError, simulate
from laminar.simulate.system import Repack, System
from laminar.simulate.timings import Lengths, StepTimes
from laminar.simulate.workload import Quantiles, Workload, observed_lengths

FLAT = StepTimes(np.array([1.0, 1000.0]), np.array([0.010, 0.010]), 1000.0)
CONSTANT = Lengths(np.array([0.0, 1.0]), np.array([100.0, 100.0]))
TAILED = Lengths(np.array([0.0, 0.9, 1.0]), np.array([20.0, 60.0, 2000.0]))
REPACK = Repack(RepackLimits(kv_high=0.8, kv_limit=0.95, headroom_tokens=10, max_requests=64), interval_seconds=0.2)


def workload(lengths=TAILED, **changes):
    values = {"prompt_tokens": 10, "max_new_tokens": 2000, "group_size": 4, "prompts_per_step": 8}
    return Workload(lengths, **values | changes)


def cluster(num_replicas=4, step=0.5, failures=(), **transfers):
    engine = Engine(FLAT, 1, 20_000, 64, 1e9)
    return Cluster(engine, num_replicas, Trainer(1, 1.0, step_seconds=(step,)), Transfers(**transfers), failures)


def system(**changes):
    return System(**{"max_in_flight_groups": 4, "max_hold_seconds": 1e9} | changes)


def test_where_generation_sets_the_pace_throughput_is_what_the_replicas_sample():
    """2 replicas x 16 answers in flight at 100 tokens/s each: 32 answers of 110 tokens a second."""
    outcome = simulate(
        workload(CONSTANT), cluster(2, step=0.01), system(weight_update="in_flight", max_staleness=4), num_steps=12
    )
    assert outcome.tokens_per_second == pytest.approx(32 * 110, rel=1e-3)
    assert outcome.generated_tokens_per_second == pytest.approx(3200, rel=0.05)


def test_where_training_sets_the_pace_a_step_takes_what_the_trainer_takes():
    outcome = simulate(workload(CONSTANT), cluster(step=3.0, model_bytes=50e9), system(max_staleness=2), num_steps=8)
    assert outcome.step_seconds == pytest.approx([3.5] * 5)
    assert outcome.trainer_idle_share == pytest.approx(0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("mode", ["trajectory", "in_flight"])
def test_under_every_policy_and_mode_no_trained_trajectory_is_staler_than_the_bound(policy, bound, mode):
    outcome = simulate(
        workload(), cluster(), system(policy=policy, max_staleness=bound, weight_update=mode), num_steps=15, warm_steps=0
    )
    assert outcome.max_staleness <= bound
    assert outcome.num_steps == 15


def test_no_trained_trajectory_is_staler_than_the_bound_and_none_is_lost():
    outcome = simulate(workload(), cluster(), system(max_staleness=1), num_steps=8, warm_steps=0)
    assert outcome.max_staleness == 1
    assert outcome.trained == 8 * 32
    assert outcome.admitted == outcome.trained + outcome.evicted + outcome.open


def test_unbounded_staleness_passes_a_bound_that_wait_would_have_held():
    outcome = simulate(workload(), cluster(step=0.05), system(max_staleness=None), num_steps=15, warm_steps=0)
    assert outcome.max_staleness > 2


@pytest.mark.slow
def test_every_trajectory_is_trained_evicted_or_open():
    for policy in ("wait", "drop", "mask"):
        outcome = simulate(workload(), cluster(step=0.1), system(policy=policy), num_steps=15)
        assert outcome.trained == 15 * 32
        assert outcome.admitted == outcome.trained + outcome.evicted + outcome.open


@pytest.mark.slow
def test_drop_evicts_long_answers_and_wait_evicts_nobody():
    dropped = simulate(workload(), cluster(step=0.1), system(policy="drop"), num_steps=15)
    waited = simulate(workload(), cluster(step=0.1), system(policy="wait"), num_steps=15)
    assert dropped.evicted > 0
    assert dropped.wasted_share > 0
    assert waited.evicted == 0
    assert waited.trainer_idle_share > dropped.trainer_idle_share


@pytest.mark.slow
def test_mask_trains_mixed_answers_without_their_old_tokens():
    outcome = simulate(
        workload(), cluster(step=0.1), system(policy="mask", weight_update="in_flight"), num_steps=20, warm_steps=2
    )
    assert outcome.masked_share > 0
    assert outcome.max_staleness <= 1


def test_mask_lets_groups_go_that_have_no_token_young_enough_before_it_takes_a_batch():
    """In mode `trajectory` one version samples all of a group: either all its tokens count, or it is not trained."""
    outcome = simulate(workload(), cluster(step=0.1), system(policy="mask", sampler=freshest_first), num_steps=15)
    assert outcome.masked_share == 0.0
    assert outcome.evicted > 0


def test_answers_that_outlast_the_wait_over_and_over_end_the_simulation_with_the_remedy():
    """Every answer takes 1 s, and is let go after half of it."""
    rules = system(max_staleness=0, max_wait_seconds=0.5, no_progress_seconds=100.0)
    with pytest.raises(StandstillError, match=r"`run.no_progress_seconds` = 100.*max_wait_seconds` = 0.5.*raise these"):
        simulate(workload(CONSTANT), cluster(), rules, num_steps=5)


def test_a_run_whose_steps_end_in_time_is_played_as_without_the_limit():
    limited = simulate(workload(), cluster(step=2.0), system(no_progress_seconds=30.0), num_steps=8)
    assert limited == simulate(workload(), cluster(step=2.0), system(), num_steps=8)
    with pytest.raises(StandstillError):
        simulate(workload(), cluster(step=31.0), system(no_progress_seconds=30.0), num_steps=8)


def test_over_provisioning_lets_go_of_what_a_batch_has_overtaken():
    waited = simulate(workload(), cluster(step=0.1), system(max_staleness=4), num_steps=10)
    recycled = simulate(workload(), cluster(step=0.1), system(max_staleness=4, over_provision=1.5), num_steps=10)
    assert waited.evicted == 0
    assert 0 < recycled.evicted <= 10 * 4 * 4
    assert recycled.admitted == recycled.trained + recycled.evicted + recycled.open
    exact = simulate(workload(), cluster(step=0.1), system(max_staleness=0, over_provision=1.5), num_steps=10)
    assert exact.evicted == 0


def test_a_greedy_answer_is_generated_and_not_trained():
    """Two replicas with 4 groups of 4 + 1 answers each: the trainer gets 4 of 5, at 110 tokens each."""
    rules = system(weight_update="in_flight", max_staleness=4)
    outcome = simulate(workload(CONSTANT, num_greedy=1), cluster(2, step=0.01), rules, num_steps=12)
    assert outcome.tokens_per_second == pytest.approx(32 * 110, rel=1e-3)
    assert outcome.generated_tokens_per_second == pytest.approx(40 * 100, rel=0.05)


def test_repack_releases_replicas_and_generates_more():
    many = cluster(8, step=1.0)
    with_repack = simulate(workload(), many, system(max_staleness=None, repack=REPACK), num_steps=8)
    without = simulate(workload(), many, system(max_staleness=None), num_steps=8)
    assert with_repack.released_replicas > 0
    assert with_repack.moved_trajectories >= with_repack.released_replicas
    assert without.released_replicas == 0
    assert with_repack.generated_tokens_per_second > without.generated_tokens_per_second


def test_a_replica_that_plays_batches_is_freed_of_its_last_answers_though_no_newer_version_waits():
    def released(refills):
        rules = system(max_staleness=None, repack=REPACK, refills=refills)
        return simulate(workload(), cluster(8, step=30.0), rules, num_steps=1, warm_steps=0).released_replicas

    assert released(False) > 0
    assert released(True) == 0


def test_gpus_that_do_both_pay_for_turning_from_one_phase_to_the_other():
    """1 s of generation (100 steps of 10 ms), 0.5 s of training, and 60 GB: at 3 GB/s, or as a load at 100 GB/s."""
    both = system(kind="synchronous")
    slow = simulate(workload(CONSTANT), cluster(model_bytes=60e9, switch_bytes_per_second=3e9), both, num_steps=4)
    assert slow.step_seconds == pytest.approx([21.5])
    plain = simulate(workload(CONSTANT), cluster(model_bytes=60e9), both, num_steps=4)
    assert plain.step_seconds == pytest.approx([2.1])


def test_a_broadcast_stops_everybody_once_a_step():
    """60 GB at 80 GB/s: 0.75 s, in which the trainer and all replicas stand still, after each step of 2 s."""
    outcome = simulate(
        workload(CONSTANT),
        cluster(step=2.0, model_bytes=60e9),
        system(kind="partial", weight_update="in_flight", max_staleness=4),
        num_steps=8,
    )
    assert outcome.step_seconds == pytest.approx([2.75] * 5)
    assert outcome.swap_mean_seconds == pytest.approx(0.75)


def test_an_environment_keeps_a_trajectory_open_and_its_engine_free():
    """3 turns with 5 s between them: an answer of 1 s takes 11 s, and the replicas idle most of that."""
    agentic = workload(
        CONSTANT, num_turns=3, turn_seconds=Quantiles(np.array([0.0, 1.0]), np.array([5.0, 5.0])), observation_tokens=7
    )
    assert agentic.given_tokens == 24
    outcome = simulate(agentic, cluster(step=0.1), system(max_staleness=1, weight_update="turn"), num_steps=8, warm_steps=2)
    assert outcome.latency_mean_seconds == pytest.approx(11.0, abs=0.2)
    assert outcome.rollout_idle_share > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["trajectory", "in_flight"])
def test_a_dead_machine_loses_no_trajectory_and_costs_its_share_until_it_is_back(mode):
    failure = Failure(at_seconds=4.0, replicas=(0, 1), seconds=6.0)
    outcome = simulate(
        workload(),
        cluster(4, step=0.5, failures=(failure,)),
        system(max_staleness=1, weight_update=mode),
        num_steps=20,
        warm_steps=0,
    )
    assert outcome.num_steps == 20
    assert outcome.admitted == outcome.trained + outcome.evicted + outcome.open
    assert outcome.evicted == 0
    assert outcome.max_staleness <= 1


def test_the_trainer_wakes_when_a_batch_is_legal_though_what_was_due_came_before_it_was_full():
    """Answers in 4 turns of seconds each, bound 4: nobody ever waits for the 600 s after which due groups are given up."""
    turns = Quantiles(np.array([0.0, 0.5, 1.0]), np.array([2.0, 5.0, 9.0]))
    lengths = Lengths(np.array([0.0, 0.5, 1.0]), np.array([20.0, 50.0, 400.0]))
    agentic = workload(lengths, group_size=2, prompts_per_step=32, num_turns=4, turn_seconds=turns, max_new_tokens=400)
    rules = system(max_staleness=4, max_in_flight_groups=16)
    outcome = simulate(agentic, cluster(6, step=0.1), rules, num_steps=10, warm_steps=0)
    assert max(outcome.step_seconds) < 100


def test_environments_leave_the_outcome_to_the_seed():
    """Trajectories in their environments are moved by repack in an order that is the same every time."""
    turns = Quantiles(np.array([0.0, 1.0]), np.array([0.5, 3.0]))
    agentic = workload(num_turns=3, turn_seconds=turns)
    first, again = (
        simulate(agentic, cluster(8, step=0.5), system(max_staleness=None, repack=REPACK), num_steps=8) for _ in range(2)
    )
    assert first.moved_trajectories > 0
    assert first == again


@pytest.mark.slow
def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    first, again, other = (simulate(workload(), cluster(), system(), seed=seed, num_steps=6) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_observed_lengths_are_drawn_back_as_they_were():
    lengths = observed_lengths([30.0, 10.0, 20.0])
    assert lengths.quantiles(np.array([0.0, 0.5, 1.0])).tolist() == [10.0, 20.0, 30.0]
    with pytest.raises(ConfigError, match="trajectory_rate"):
        observed_lengths([])


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="num_replicas is 0"):
        replace(cluster(), num_replicas=0)
    with pytest.raises(ConfigError, match="warm_steps is 3"):
        simulate(workload(), cluster(), system(), num_steps=3, warm_steps=3)
    with pytest.raises(ConfigError, match="failure names replicas"):
        cluster(2, failures=(Failure(1.0, (2,), 1.0),))
