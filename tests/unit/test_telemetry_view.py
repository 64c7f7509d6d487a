"""Throughput and generation accounting (case D29), by hand calculation."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from laminar.errors import InvariantError
from laminar.json_lines import read_lines
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.html_report import html_report, told
from laminar.telemetry.metrics_table import metrics_table
from laminar.telemetry.panel import step_line
from laminar.telemetry.registry import METRICS, check_declared
from laminar.telemetry.report import closing_report, summarize
from laminar.telemetry.stream import Event
from laminar.telemetry.view import GenerationMeter, RunView


def step_event(step, tokens, seconds, time, started=None, **more):
    metrics = {"train/step": step, "train/tokens": tokens, "time/step_seconds": seconds, **more}
    return Event("trainer-0", "step", time, metrics, {"train_started": started or time - seconds, "train_ended": time})


def worker_event(time, total, role="rollout-0"):
    return Event(role, "worker", time, {"engine/generated_tokens": total}, {})


def test_d29_tokens_per_second_use_one_span_above_and_below():
    view = RunView(max_steps=3)
    rates = []
    for step, (tokens, seconds, time) in enumerate([(1200, 2.0, 102.0), (900, 1.5, 103.5), (1500, 3.0, 206.5)], start=1):
        metrics = view.apply(step_event(step, tokens, seconds, time))
        rates.append(metrics["throughput/trained_tokens_per_second"])
    assert rates == pytest.approx([600, 600, 500])
    assert view.trained_tokens / view.step_seconds == pytest.approx(553.846154)  # the 100 s gap before step 3 does not count


def test_d29_generated_and_trained_are_two_numbers():
    view = RunView(max_steps=3)
    view.apply(worker_event(100.0, 0))
    view.apply(worker_event(103.0, 1900))
    metrics = view.apply(step_event(3, 1500, 3.0, 103.0))
    assert metrics["throughput/generated_tokens_per_second"] == pytest.approx(633.333333)
    assert metrics["throughput/trained_tokens_per_second"] == pytest.approx(500.0)


def test_d29_generated_tokens_of_each_step_are_over_its_own_span():
    """And sum, times the seconds, to all 4,000, which is not so of rates over some longer span."""
    view, rates, total = RunView(max_steps=3), [], 0
    view.apply(worker_event(100.0, 0))
    for step, (generated, seconds, time) in enumerate([(1200, 2.0, 102.0), (900, 1.5, 103.5), (1900, 3.0, 106.5)], start=1):
        total += generated
        view.apply(worker_event(time, total))
        rates.append(view.apply(step_event(step, 900, seconds, time))["throughput/generated_tokens_per_second"])
    assert rates == pytest.approx([600, 600, 633.333333])
    assert view.generated_per_second() == pytest.approx(4000 / 6.5)


def test_lines_tell_an_even_pace_of_generation_where_steps_are_shorter_than_reports_are_apart():
    """1,000 tokens/s, told every 0.5 s, in steps of 0.2 s: of one step the rate is 0 or 2,500."""
    view, paces, told = RunView(max_steps=300), [], 0
    view.apply(worker_event(0.0, 0))
    for step in range(1, 301):
        time = step * 0.2
        while 0.5 * (told + 1) <= time:
            told += 1
            view.apply(worker_event(0.5 * told, 500 * told))
        view.apply(step_event(step, 10, 0.2, time))
        paces.append(view.generated_per_second())
    assert all(950 <= pace <= 1050 for pace in paces[50:])  # at most one report too few or too many of 20
    assert f"generated {paces[-1]:.0f} tok/s" in step_line(view)


@pytest.mark.parametrize("second", [101.0, 99.0], ids=["no time between", "a clock set back"])
def test_steps_that_no_time_lies_between_tell_no_time_left(second):
    view = RunView(max_steps=3)
    for step, time in ((1, 101.0), (2, second)):
        event = step_event(step, 10, 1.0, time)
        event.fields["left"] = {"run.max_steps": 3.0 - step}
        metrics = view.apply(event)
    assert view.seconds_left() is None
    assert "time/left_seconds" not in metrics


def test_before_a_step_no_pace_is_known():
    assert RunView(max_steps=3).generated_per_second() is None
    assert "generated - tok/s" in step_line(RunView(max_steps=3))


def test_a_step_tells_of_the_oldest_version_that_a_replica_holds_and_of_what_the_machine_bears():
    view = RunView(max_steps=3)
    for role, number in (("rollout-0", 7.0), ("rollout-1", 5.0), ("rollout-2", -1.0)):  # the last one's engine is restarted
        view.apply(Event(role, "worker", 100.0, {"worker/version_number": number}, {}))
    view.apply(Event("supervisor", "system", 100.0, {"system/cpu_ratio": 0.5}, {}))
    metrics = view.apply(step_event(8, 10, 1.0, 101.0))
    assert (metrics["weights/min_replica_version"], metrics["system/cpu_ratio"]) == (5.0, 0.5)


def test_a_step_tells_trained_tokens_by_device_and_how_long_the_quietest_role_was_not_heard():
    view = RunView(max_steps=3, train_devices=2, engine_devices=4)
    for role, time in (("rollout-0", 100.0), ("rollout-1", 98.5)):
        view.apply(worker_event(time, 0, role))
    metrics = view.apply(step_event(1, 1200, 2.0, 102.0))
    assert metrics["throughput/tokens_per_second_per_device"] == pytest.approx(600 / 10)
    assert metrics["faults/heartbeat_age_seconds"] == pytest.approx(3.5)


def test_the_docs_table_of_metrics_is_that_of_the_registry():
    file = Path(__file__).resolve().parents[2] / "laminar" / "telemetry" / "METRICS.md"
    assert file.read_text() == metrics_table(), "python -m laminar.telemetry.metrics_table > laminar/telemetry/METRICS.md"
    assert all(f"| `{metric.name}` |" in file.read_text() for metric in METRICS)


def test_what_is_counted_so_far_is_a_counter_and_nothing_else_is():
    counted = {m.name for m in METRICS if "so far" in m.meaning or "since its start" in m.meaning}
    assert {metric.name for metric in METRICS if metric.type == "counter"} == counted


def test_d29_a_step_logged_before_a_crash_appears_once_after_the_resume(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append("step", step, {"x": step})
    file.rewind(2)
    file.append("step", 3, {"x": 30})
    assert [(line["step"], line["x"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 30)]


def test_a_step_that_is_in_the_file_is_not_added_again(tmp_path):
    MetricsFile(tmp_path / "m.jsonl").append("step", 5, {"x": 1})
    later = MetricsFile(tmp_path / "m.jsonl")
    later.append("step", 5, {"x": 2})
    later.append("step", 6, {"x": 3})
    assert [(line["step"], line["x"]) for line in read_lines(tmp_path / "m.jsonl")] == [(5, 1), (6, 3)]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append("step", 1, {})
    with path.open("a") as file:
        file.write('{"format_version": 1, "ste')
    MetricsFile(path).rewind(5)
    MetricsFile(path).append("step", 2, {})
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_a_line_torn_by_a_full_disk_hides_no_line_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append("step", 1, {})
    with path.open("a") as torn:
        torn.write('{"format_version": 1, "ste')
    file.append("step", 3, {})
    file.append("step", 4, {})
    assert [line["step"] for line in read_lines(path)] == [1, 3, 4]
    assert MetricsFile(path).last_step == 4


def test_tokens_generated_while_a_step_ran_are_split_by_time():
    meter = GenerationMeter()
    meter.report("a", 0.0, 0)
    meter.report("a", 10.0, 100)  # 10 tokens a second
    meter.settle_step(4.0, 8.0)  # 4 s of it
    meter.report("a", 20.0, 300)  # 20 tokens a second
    meter.settle_step(9.0, 15.0)  # 1 s at 10, 5 s at 20
    assert meter.total == 300
    assert meter.during_steps == pytest.approx(40 + 10 + 100)


@pytest.mark.parametrize("length", [0.1, 0.2, 0.5, 1.0, 5.0])
def test_tokens_that_are_reported_after_the_end_of_their_step_count_for_it(length):
    """One worker, 1,000 tokens/s without a pause, told every 0.5 s; steps follow each other from 0.17 s to about 59 s."""
    meter = GenerationMeter()
    reports = [(0.5 * k + 1e-6, None, 0.5 * k) for k in range(1, 121)]
    count = int((59 - 0.17) / length)
    steps = [(0.17 + (k + 1) * length, 0.17 + k * length, 0.0) for k in range(count)]
    meter.begin("a", 0.0, 0.0)
    for at, started, until in sorted(reports + steps, key=lambda event: event[0]):
        if started is None:
            meter.report("a", until, 1000 * until)
        else:
            meter.settle_step(started, at)
    assert meter.total == 60_000
    assert meter.during_steps == pytest.approx(1000 * count * length)


def test_a_restarted_worker_counts_its_new_tokens_only_once():
    meter = GenerationMeter()
    meter.report("a", 0.0, 0)
    meter.report("a", 1.0, 50)
    meter.report("a", 2.0, 20)
    assert meter.total == 70


def test_an_undeclared_metric_is_refused_by_name():
    check_declared(["train/loss", "reward/term_format", "staleness/histogram_3"])
    with pytest.raises(InvariantError, match="train/lost"):
        check_declared(["train/lost"])


def test_every_metric_has_a_meaning_and_a_name_of_the_form_area_what():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.meaning and metric.name.count("/") == 1 for metric in METRICS)


def left_after(*lefts, seconds=2.0):
    view = RunView(max_steps=100)
    for step, left in enumerate(lefts, start=1):
        event = step_event(step, 10, seconds, time=100.0 + step * seconds)
        latest = view.apply(Event(event.role, event.kind, event.time, event.metrics, {**event.fields, "left": left}))
        assert latest.get("time/left_seconds") == view.seconds_left()
    return view


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        ({"run.max_steps": 50.0}, {"run.max_steps": 49.0}, 98.0),
        ({"run.max_steps": 50.0, "run.max_train_seconds": 9.0}, {"run.max_steps": 49.0, "run.max_train_seconds": 7.0}, 7.0),
        (
            {"run.max_steps": 50.0, "run.max_trained_tokens": 90.0},
            {"run.max_steps": 49.0, "run.max_trained_tokens": 60.0},
            4.0,
        ),
        ({"run.max_steps": 50.0, "data.max_epochs": 28.0}, {"run.max_steps": 49.0, "data.max_epochs": 20.0}, 5.0),
        (
            {"run.max_steps": 50.0, "run.max_trained_tokens": 1.0},
            {"run.max_steps": 49.0, "run.max_trained_tokens": 1.0},
            98.0,
        ),
        ({"run.max_steps": 50.0, "run.max_train_seconds": 1.0}, {"run.max_steps": 49.0, "run.max_train_seconds": -1.0}, 0.0),
        ({}, {}, None),
    ],
)
def test_the_time_left_is_that_of_the_limit_which_is_reached_first(before, after, seconds):
    assert left_after(before, after).seconds_left() == seconds


def test_no_time_left_is_told_before_the_second_step_nor_over_a_restore():
    view = left_after({"run.max_steps": 50.0})
    assert view.seconds_left() is None
    view = left_after({"run.max_steps": 50.0}, {"run.max_steps": 49.0})
    view.apply(Event("trainer-0", "restored", 104.0, {}, {"step": 1}))
    assert view.seconds_left() is None


def test_the_report_averages_first_three_and_last_five_rewards():
    lines = [
        {
            "kind": "step",
            "step": n,
            "reward/mean": n / 10,
            "train/tokens": 10,
            "time/step_seconds": 2.0,
            "staleness/histogram_1": 3,
        }
        for n in range(1, 11)
    ]
    lines += [
        {"kind": "evaluation", "step": 0, "eval/accuracy": 0.25},
        {"kind": "evaluation", "step": 10, "eval/accuracy": 0.5},
    ]
    facts = {
        "status": "finished", "reason": "max_steps", "folder": "f", "seconds": 30.0, "peak_resident_bytes": 10,
        "restarts": {}, "generated_tokens": 400.0, "step_seconds": 20.0, "generated_during_steps": 100.0,
        "first_step": 1, "trained_tokens": 100.0,
    }  # fmt: skip
    figures = summarize(facts, lines)
    assert figures["first_reward"] == pytest.approx(0.2)
    assert figures["last_reward"] == pytest.approx(0.8)
    assert figures["staleness"] == {1: 30}
    assert figures["trained_tokens_per_second"] == pytest.approx(5.0)
    assert figures["generated_tokens_per_second"] == pytest.approx(20.0)
    assert figures["generated_during_steps_ratio"] == pytest.approx(0.25)
    assert figures["accuracies"] == {0: 0.25, 10: 0.5}
    assert closing_report(facts, lines).row_count == 8


def test_a_report_without_any_step_says_so_and_tells_of_no_reward_or_throughput():
    facts = {
        "status": "failed", "reason": "x", "folder": "f", "seconds": 1.0, "peak_resident_bytes": 0,
        "restarts": {"trainer": 1}, "generated_tokens": 0.0, "step_seconds": 0.0, "generated_during_steps": 0.0,
        "first_step": 0, "trained_tokens": 0.0,
    }  # fmt: skip
    assert report_lines(facts, []) == [
        "run failed: x", "steps none ended in 1 s (start and stop included)", "restarts trainer: 1", "run folder f"
    ]  # fmt: skip
    assert summarize(facts, [])["first_reward"] is None
    page = html_report({"id": "r", "status": "failed", "reason": "", "lives": 1}, [], "", bound=2, written_at=0.0)
    assert "first step -, last 5 steps -" in page


def report_lines(facts, lines):
    console = Console(width=150, file=io.StringIO())
    console.print(closing_report(facts, lines))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_after_a_resume_steps_and_throughput_are_told_of_the_life_whose_time_is_told():
    view = RunView(max_steps=100)
    view.apply(worker_event(200.0, 0))
    for step, time in ((6, 202.0), (7, 204.0)):
        view.apply(step_event(step, tokens=30, seconds=2.0, time=time))
    view.apply(worker_event(204.0, 80))
    facts = {
        "status": "finished", "reason": "x", "folder": "f", "seconds": 9.0, "peak_resident_bytes": 0, "restarts": {},
        "generated_tokens": view.generation.total, "step_seconds": view.step_seconds, "generated_during_steps": 80.0,
        "first_step": view.first_step, "trained_tokens": view.trained_tokens,
    }  # fmt: skip
    lines = [{"kind": "step", "step": step, "train/tokens": 1000, "time/step_seconds": 2.0} for step in range(1, 8)]
    told = report_lines(facts, lines)
    assert "steps 7, 2 of them in this life of 9 s (start and stop included)" in told
    assert any(text.startswith("throughput in this life: trained 15.0 tokens/s, generated 20.0 tokens/s;") for text in told)


def test_a_resume_in_which_no_step_ended_tells_no_throughput():
    facts = {
        "status": "stopped", "reason": "x", "folder": "f", "seconds": 9.0, "peak_resident_bytes": 0, "restarts": {},
        "generated_tokens": 50.0, "step_seconds": 0.0, "generated_during_steps": 0.0, "first_step": 0, "trained_tokens": 0.0,
    }  # fmt: skip
    told = report_lines(facts, [{"kind": "step", "step": 1, "train/tokens": 9, "time/step_seconds": 2.0}])
    assert "steps 1, none of them in this life of 9 s (start and stop included)" in told
    assert not any("throughput" in text for text in told)


def test_the_reports_read_nothing_of_a_line_but_what_they_keep_of_it():
    """A run of many days has more whole lines than fit into memory."""
    names = (metric.name.replace("*", part) for metric in METRICS for part in ("mean", "max", "p95", "2"))
    every = {name: place for place, name in enumerate(names) if not re.search("histogram_[^2]", name)}
    lines = [{"kind": "step", "step": step} | {name: value * step for name, value in every.items()} for step in range(1, 9)]
    lines.append({"kind": "evaluation", "step": 4, "eval/accuracy": 0.5})
    lines.append({"kind": "mark", "step": 5, "text": "trainer-0 began anew"})
    facts = {
        "status": "finished", "reason": "max_steps", "folder": "f", "seconds": 30.0, "peak_resident_bytes": 10,
        "restarts": {}, "generated_tokens": 400.0, "step_seconds": 20.0, "generated_during_steps": 100.0,
        "first_step": 1, "trained_tokens": 100.0,
    }  # fmt: skip
    run = {"id": "r", "status": "finished", "reason": "", "lives": 1}
    shapeless = [{}, {"kind": "step"}, {"step": 3}, {"kind": "mark", "step": None}]
    kept = told([*shapeless, *lines])
    assert max(map(len, kept)) < 30 < len(METRICS)
    page = html_report(run, lines, "", bound=2, written_at=0.0)
    assert html_report(run, kept, "", bound=2, written_at=0.0) == page
    assert "trainer-0 began anew" in page
    assert "Nothing was recorded" not in page
    assert summarize(facts, kept) == summarize(facts, lines)
    texts = [Console(width=100, file=io.StringIO()) for _ in range(2)]
    for console, of in zip(texts, (kept, lines), strict=True):
        console.print(closing_report(facts, of))
    assert texts[0].file.getvalue() == texts[1].file.getvalue()
