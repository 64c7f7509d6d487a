"""The pure parts of the benchmarks: what counts as flat, as reached, as met; and the task that two sides share."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.all
from benchmarks.all import LIMITS, Outcome, read_outcome, table
from benchmarks.simulate_against_real import simulated
from benchmarks.slopes import Growth, measure_growth
from benchmarks.soak import command_name
from benchmarks.systems import ONE_STEP
from benchmarks.systems import compare as compare_systems
from benchmarks.systems_arm import generated, trained
from benchmarks.trl_figures import Seen, Task, reached, report
from benchmarks.trl_figures import compare as compare_sides
from benchmarks.trl_task import COLUMNS, judge, score_batch, with_long_tails
from laminar.types import Prompt
from rollout.tiny import reward as tiny_reward


def line(slope, start=0.0, level=100.0, num=30):
    return [(start + second, level + slope * second) for second in range(num)]


def test_growth_is_the_slope_times_the_longest_life_without_its_beginning():
    growth = measure_growth({1: line(2.0), 2: line(2.0, start=100.0, num=20)}, settle_seconds=9.0)
    assert (growth.growth, growth.seconds, growth.num_samples) == (pytest.approx(2.0 * 20), 20.0, 21 + 11)


def test_a_restart_at_another_level_and_a_spike_are_no_growth():
    spiked = [(second, 900.0 if second == 15 else value) for second, value in line(0.0)]
    growth = measure_growth({1: spiked, 2: line(0.0, start=50.0, level=300.0)}, settle_seconds=0.0)
    assert growth.growth == pytest.approx(0.0)
    assert growth.is_flat(0.0)


def test_what_may_grow_is_five_percent_or_the_allowance_whichever_is_more():
    assert Growth(median=100.0, growth=5.0, seconds=60.0, num_samples=9).is_flat(1.0)
    assert not Growth(median=100.0, growth=5.1, seconds=60.0, num_samples=9).is_flat(1.0)
    assert Growth(median=100.0, growth=7.9, seconds=60.0, num_samples=9).is_flat(8.0)


def test_lives_too_short_to_judge_give_no_growth():
    assert measure_growth({1: line(5.0, num=7), 2: []}, settle_seconds=0.0) is None


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        (b"/usr/bin/python\0-m\0rollout.engines.emulated_server\0--model=x", "rollout.engines.emulated_server"),
        (b"ray::DashboardAgent", "ray::DashboardAgent"),
        (b"/a/b/raylet\0--flag", "raylet"),
        (b"/a/python\0-u\0/site/ray/log_monitor.py\0--x", "log_monitor.py"),
        (b"", "unnamed"),
    ],
)
def test_a_process_without_a_role_is_called_by_what_it_runs(cmdline, name):
    assert command_name(cmdline) == name


def test_ours_without_a_bound_is_compared_and_both_bars_must_hold():
    def arms(speed):
        speeds = {"synchronous": 10.0, "one_step": 12.0, "ours_k1": 1.0, "ours_unbounded": speed}
        return [{"system": name, "trained_tokens_per_second": speed} for name, speed in speeds.items()]

    good = compare_systems(arms(18.0))
    assert (good["value"], good["over_one_step"], good["holds"]) == (1.8, 1.5, True)
    assert compare_systems(arms(15.0))["holds"] is False


def test_trained_tokens_are_counted_between_the_ends_of_steps():
    def step(started, ended, tokens, ages):
        metrics = {"train/tokens": tokens} | {f"staleness/histogram_{age}": n for age, n in ages.items()}
        return SimpleNamespace(fields={"train_started": started, "train_ended": ended}, metrics=metrics)

    window = [step(0.0, 10.0, 999.0, {0: 50}), step(12.0, 20.0, 100.0, {0: 1, 2: 1}), step(20.0, 30.0, 300.0, {1: 2})]
    seen = trained(window, time_factor=2.0)
    assert seen["trained_tokens_per_second"] == pytest.approx(400 * 32 / 20 / 2)
    assert seen["trainer_idle_share"] == pytest.approx(1 - 18 / 20)
    assert (seen["staleness_mean"], seen["staleness_max"], seen["step_seconds"]) == (1.0, 2, 20.0)


def test_engines_are_idle_while_they_neither_decode_nor_drain():
    def look(at, tokens, decode, drain):
        states = {"time/state_decode_seconds": decode, "time/state_drain_seconds": drain, "time/state_idle_seconds": 99.0}
        return {
            "at": at, "generated_tokens": tokens, "states": states, "cpu_seconds": at / 10, "workers_cpu_seconds": at / 2,
            "lag_seconds": 0.0, "late_seconds": at / 20,
        }  # fmt: skip

    seen = generated(look(0.0, 0, 1.0, 0.0), look(10.0, 500, 11.0, 4.0), engines=2, time_factor=4.0)
    assert seen["engine_idle_share"] == pytest.approx(1 - 14 / 20)
    assert seen["generated_tokens_per_second"] == pytest.approx(500 * 32 / 10 / 4)
    assert (seen["engines_cpu_share"], seen["workers_cpu_share"]) == (pytest.approx(0.1), pytest.approx(0.5))


def test_a_reward_is_reached_when_the_mean_of_the_window_first_is_high_enough():
    notes = [{"at": float(second), "score": score} for second, score in enumerate([1, 0, 0, 1, 1, 1])]
    assert reached(notes, target=0.6, window=3) == (4.0, 5)
    assert reached(notes, target=1.1, window=3) == (None, None)
    assert reached(notes[:2], target=0.0, window=3) == (None, None)


def test_a_training_is_told_without_its_start_up_and_without_what_came_after_its_last_step():
    task = Task("t", "m", "r", 6, 1e-5, (1,), prompts_per_step=2, group_size=4)
    notes = [{"at": 101.0 + second, "score": 1.0, "long": second % 2 == 0} for second in range(40)]
    told = report(task, 0, Seen("ours", 90.0, 100.0, [(1, 110.0), (2, 120.0)], 0.5, 1, 7.5), notes)
    assert (told["start_up_seconds"], told["seconds"], told["trained_per_second"]) == (10.0, 20.0, 0.8)
    assert told["trained_tokens_per_second"] == 16 * 7.5 / 20
    assert told["untrained_share"] == pytest.approx(1 - 16 / 20)
    assert told["seconds_to_reward"] is None


def test_ours_is_ahead_only_if_faster_and_there_first():
    def arm(side, speed, seconds, tokens=1.0, seed=0):
        rates = {"trained_per_second": speed, "trained_tokens_per_second": tokens * speed}
        return {"side": side, "task": "smollm2_tails", "seed": seed, **rates, "seconds_to_reward": seconds}

    ahead = compare_sides([arm("trl", 2.0, 60.0), arm("ours", 5.0, 30.0), arm("trl_async", 4.0, None)])
    assert (ahead["value"], ahead["holds"]) == (1.25, True)
    longer = compare_sides([arm("ours", 5.0, 30.0, tokens=4.0), arm("trl_async", 4.0, None, tokens=2.0)])
    assert longer["ratios"]["smollm2_tails/trl_async"]["trained_tokens_per_second"] == 2.5
    never = compare_sides([arm("trl", 2.0, None), arm("ours", 5.0, None)])
    assert (never["ratios"]["smollm2_tails/trl"]["reached_first"], never["holds"]) == ("nobody", False)
    assert compare_sides([arm("trl", 2.0, 60.0)])["holds"] is False
    failed = {"side": "trl_async", "task": "smollm2_tails", "seed": 0, "failed": "was not done in time"}
    beside = compare_sides([arm("trl", 2.0, 60.0), arm("ours", 5.0, 30.0), failed])
    assert (beside["value"], beside["failures"], beside["holds"]) == (2.5, 1, False)
    # a machine that slows down between two seeds: 6 for 5, 3 for 2 and 2 for 4 are 1.2, where medians of each side give 0.75
    paces = [(6.0, 5.0, 30.0, 60.0), (3.0, 2.0, 40.0, 30.0), (2.0, 4.0, 50.0, None)]
    drift = [
        each
        for seed, (ours, theirs, mine, others) in enumerate(paces)
        for each in (arm("ours", ours, mine, seed=seed), arm("trl_async", theirs, others, seed=seed))
    ]
    told = compare_sides(drift)["ratios"]["smollm2_tails/trl_async"]
    assert (told["trained_per_second"], told["reached_first"], told["first_in_seeds"]) == (1.2, "ours", [2, 3])


def test_long_tails_replace_an_exact_share_of_the_rows_and_say_so():
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(200)]
    mixed = with_long_tails(rows, 0.05, seed=3)
    long = [row for row in mixed if row.get("long")]
    assert (len(mixed), len(long)) == (200, 10)
    first = int(long[0]["prompt"].split(",")[0])
    assert long[0]["answer"] == f"{first + 8},"
    assert with_long_tails(rows, 0.0, seed=3) == rows


@pytest.mark.parametrize(
    ("row", "completion", "score"),
    [
        ({"answer": "12"}, " 12\n3 + 4", 1.0),
        ({"answer": "12"}, " 125", 0.0),
        ({"answer": "9,", "long": "1"}, " 9, 10, 11", 1.0),
        ({"answer": "9,", "long": "1"}, " 10, 11", 0.0),
    ],
)
def test_answers_are_judged_by_the_kind_of_their_row(row, completion, score):
    assert judge(row, completion) == score


@pytest.mark.parametrize("completion", ["", "\n7", "779a", "5 8\n0", "99"])
def test_digits_are_judged_as_the_tiny_recipe_does(completion):
    row = {"digit": "7", "long": ""}
    assert judge(row, completion) == tiny_reward(Prompt("p", "47>", row), completion)


def test_a_batch_of_answers_is_judged_and_noted_one_by_one(tmp_path):
    columns = {name: ["", ""] for name in COLUMNS} | {"answer": ["3", "4"], "log": [str(tmp_path / "notes")] * 2}
    assert score_batch([" 3", " 5"], prompts=["a", "b"], **columns) == [1.0, 0.0]
    assert [json.loads(text)["score"] for text in (tmp_path / "notes").read_text().splitlines()] == [1.0, 0.0]


def test_the_last_line_decides_and_without_one_the_reason_stands():
    met = read_outcome(
        "buffer", 3.0, 0, 'words\n{"name": "buffer", "value": 1.25, "unit": "times", "bar": 1, "holds": true}\n'
    )
    assert (met.verdict, met.result["value"]) == ("met", 1.25)
    assert read_outcome("buffer", 3.0, 1, '{"value": 1}').verdict == "ended with 1"
    assert read_outcome("buffer", 3.0, 0, "words").verdict == "its last line is no result"
    assert read_outcome("buffer", 3.0, 0, '{"value": 1}').verdict == "its last line is no result"


def test_every_benchmark_with_a_quick_form_is_run():
    folder = Path(benchmarks.all.__file__).parent
    quick = {file.stem for file in folder.glob("*.py") if 'parser.add_argument("--quick"' in file.read_text()}
    assert set(LIMITS) == quick


def test_the_table_has_a_line_for_every_benchmark_also_for_one_that_told_nothing():
    told = {"value": 0.51234, "unit": "s", "bar": 1.0, "holds": False}
    lines = table([Outcome("relay", 12.0, told), Outcome("soak", 420.0, None, "not done in 420 s")]).splitlines()
    assert lines[1].split() == ["relay", "0.5123", "s", "1", "missed", "12"]
    assert lines[2].split() == ["soak", "-", "-", "not", "done", "in", "420", "s", "420"]


@pytest.mark.slow
def test_a_simulated_system_that_its_trainer_holds_up_trains_at_the_trainers_pace():
    held_up = replace(ONE_STEP, engines=7, training_devices=4)
    guess = simulated(held_up, time_factor=8.0, warm_steps=1, steps=1)
    assert guess["tokens_per_second"] == pytest.approx(4 * 1300.0, rel=1e-3)
    assert guess["mean_staleness"] == 1.0
