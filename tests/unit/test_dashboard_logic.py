"""What the dashboard concludes: the bottleneck sentence, alerts, thinned history, search, Prometheus text."""

import json
import math
from array import array

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laminar.config.redact import redact
from laminar.dashboard.alerts import Facts, find_alerts
from laminar.dashboard.bottleneck import Filtering, bottleneck, mean_shares
from laminar.dashboard.history import History
from laminar.dashboard.live import LiveView
from laminar.dashboard.prometheus import render_metrics
from laminar.dashboard.search import Search, search
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.registry import METRICS
from laminar.telemetry.stream import Event
from laminar.trajectories import Summary


def sentence(trainer, *rollouts, mean=0.5, bound=2):
    return bottleneck(trainer, rollouts, staleness_mean=mean, bound=bound)


def test_a_waiting_trainer_beside_busy_rollouts_asks_for_rollouts():
    text = sentence({"wait": 0.41, "train": 0.59}, {"decode": 1.0})
    assert text == (
        "Trainer waits 41 % of the time: add rollouts, or raise the in-flight limit; "
        "staleness (mean 0.5) is far below its bound of 2."
    )


@pytest.mark.parametrize(
    ("replica", "words"),
    [
        ({"idle_staleness": 0.6, "decode": 0.4}, "raise staleness.max_staleness"),
        ({"idle_bytes": 0.6, "decode": 0.4}, "raise experience.max_bytes"),
        ({"environment": 0.7, "decode": 0.3}, "wait 70 % for environments"),
        ({"swap": 0.3, "drain": 0.3, "decode": 0.4}, "take weights 60 %"),
        ({"restart": 0.6, "decode": 0.4}, "engines are being started"),
    ],
)
def test_a_waiting_trainer_is_explained_by_what_rollouts_do(replica, words):
    assert words in sentence({"wait": 0.5, "train": 0.5}, replica)


def test_rollouts_that_stand_still_beside_a_busy_trainer_ask_for_trainer_ranks():
    text = sentence(
        {"wait": 0.02, "train": 0.98}, {"idle_staleness": 0.6, "decode": 0.4}, {"idle_staleness": 0.2, "decode": 0.8}
    )
    assert "stand still 40 %" in text
    assert "add trainer ranks" in text


def test_balance_publishing_pause_and_start_are_told_apart():
    assert sentence({"wait": 0.1, "train": 0.9}, {"decode": 0.9, "idle_staleness": 0.1}).startswith("Balanced")
    assert "on checkpoint" in sentence({"checkpoint": 0.4, "train": 0.6}, {"decode": 1.0})
    assert "unpause" in bottleneck({}, [], staleness_mean=None, bound=1, is_paused=True)
    assert "starting" in sentence({})


WAITING = {"wait": 0.6, "train": 0.4}


@pytest.mark.parametrize(
    ("filtering", "words"),
    [
        (Filtering(0.95, 0.9), "The task is too easy: 95 % of the groups are filtered, for all their attempts get the same "
         "reward, a high one (trainer waits 60 % of the time); take harder prompts."),
        (Filtering(0.95, 0.1), "The task is too hard: 95 % of the groups are filtered, for all their attempts get the same "
         "reward, a low one (trainer waits 60 % of the time); take easier prompts, or give partial rewards."),
        (Filtering(0.95, 0.5), "leave out prompts that all or none solve"),
        (Filtering(0.95, None), "too easy or too hard"),
        (Filtering(0.5, 0.9), "add rollouts"),
    ],
)  # fmt: skip
def test_groups_that_teach_nothing_are_no_lack_of_rollouts(filtering, words):
    text = bottleneck(WAITING, [{"decode": 1.0}], staleness_mean=0.5, bound=2, filtering=filtering)
    assert words in text
    assert ("add rollouts" in text) == (filtering.ratio < 0.8)


@pytest.mark.parametrize(
    ("trainer", "replica", "words"),
    [
        ({"publish": 0.3, "train": 0.7}, {"decode": 1.0}, "30 % of the time on publish: the weights go out slowly"),
        ({"spool": 0.3, "train": 0.7}, {"decode": 1.0}, "put run.directory on a faster one"),
        ({"checkpoint": 0.2, "spool": 0.1, "train": 0.7}, {"decode": 1.0}, "raise checkpoint.every_steps"),
        ({"start": 0.6, "wait": 0.4}, {"decode": 1.0}, "The trainer is starting"),
        ({"restore": 0.6, "wait": 0.4}, {"decode": 1.0}, "The trainer is starting"),
        (WAITING, {"idle_end_of_data": 0.9, "decode": 0.1}, "the data is at its end"),
        (WAITING, {"idle_not_ready": 0.9, "decode": 0.1}, "the run is being restored"),
        (WAITING, {"decode": 0.9, "idle": 0.1}, "add rollouts, or raise the in-flight limit"),
        ({"train": 1.0}, {"idle_staleness": 0.3, "decode": 0.7}, "add trainer ranks, or take workers away"),
        ({"train": 0.9, "wait": 0.1}, {"decode": 0.6, "prefill": 0.2}, "rollouts generate 80 %"),
    ],
)
def test_each_state_of_things_has_its_sentence(trainer, replica, words):
    assert words in sentence(trainer, replica)


def test_staleness_is_mentioned_only_where_it_leaves_room():
    assert "far below" not in sentence(WAITING, {"decode": 1.0}, mean=1.5, bound=2)
    assert "far below" not in sentence(WAITING, {"decode": 1.0}, mean=None)
    assert "far below" not in sentence(WAITING, {"decode": 1.0}, bound=None)


@pytest.mark.parametrize(
    ("wait", "held", "begin"),
    [
        (0.7, 0.3, "Trainer waits 70 % of the time: "),
        (0.9, 0.7, "Trainer waits 90 % of the time: "),
        (0.1, 0.9, "Rollouts stand still 90 % of the time: "),
    ],
)
def test_a_bound_of_0_is_said_to_make_generation_and_training_take_turns(wait, held, begin):
    trainer, replica = {"wait": wait, "train": 1 - wait}, {"decode": 1 - held, "idle_staleness": held}
    assert sentence(trainer, replica, mean=0.0, bound=0) == (
        f"{begin}generation and training take turns at staleness.max_staleness = 0; "
        "raise it to let them overlap, or keep the wait as the price of on-policy data."
    )


def test_at_a_bound_of_0_too_a_slow_environment_is_named():
    assert "speed those up" in sentence({"wait": 0.7, "train": 0.3}, {"environment": 0.6, "decode": 0.4}, mean=0.0, bound=0)


def test_a_run_without_rollouts_that_are_known_is_not_told_to_add_some():
    for rollouts in ((), ({},)):
        assert sentence({"wait": 1.0}, *rollouts).startswith("No rollout worker is heard of")
    assert "add rollouts" in sentence({"wait": 1.0}, {}, {"decode": 1.0})


def test_of_a_run_that_has_ended_the_last_minutes_are_told():
    def ended(trainer, *rollouts):
        return bottleneck(trainer, rollouts, staleness_mean=None, bound=1, is_alive=False)

    assert ended({}) == ended({"train": 1.0}) == "The run has ended."
    assert ended({"train": 1.0}, {"decode": 1.0}) == (
        "The run has ended. Its last minutes: Balanced: the trainer trains 100 % of the time and waits 0 %; "
        "rollouts generate 100 %."
    )


def test_mean_shares_count_a_missing_state_as_nothing():
    assert mean_shares([{"a": 1.0}, {"a": 0.5, "b": 0.5}]) == {"a": 0.75, "b": 0.25}


def facts(**changes):
    return Facts(
        **{
            "is_alive": True, "silent": {}, "latest": {}, "earlier": {}, "seconds_since_step": 1.0,
            "mean_step_seconds": 1.0, "free_disk_ratio": 0.5, "mismatch_alarm": 0.05, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"silent": {"rollout-1": 6.0}}, "role_silent"),
        ({"seconds_since_step": 61.0}, "no_progress"),
        ({"latest": {"mismatch/kl_staleness_0": 0.2}}, "mismatch"),
        ({"latest": {"train/skipped_steps": 2.0}}, "skipped_steps"),
        ({"latest": {"reward/zero_std_ratio": 1.0}}, "no_signal"),
        ({"latest": {"rollout/truncated_ratio": 0.9}}, "truncated"),
        ({"latest": {"experience/admitted": 100.0, "experience/failed": 20.0}}, "failures"),
        (
            {
                "latest": {
                    "experience/admitted": 100.0,
                    "experience/evictions_stale": 20.0,
                    "experience/evictions_waited_too_long": 10.0,
                    "experience/evictions_fully_masked": 10.0,
                }
            },
            "dropped",
        ),
        ({"free_disk_ratio": 0.01}, "disk_low"),
    ],
)
def test_each_trouble_raises_its_alert_and_no_other(changes, name):
    assert [alert.name for alert in find_alerts(facts(**changes))] == [name]


def test_a_healthy_run_an_ended_run_and_a_paused_run_raise_none():
    assert find_alerts(facts(silent={"rollout-0": 0.5})) == []
    assert find_alerts(facts(is_alive=False, silent={"rollout-0": 9999.0}, seconds_since_step=9999.0)) == []
    assert find_alerts(facts(is_paused=True, seconds_since_step=9999.0)) == []


def test_evictions_that_no_bound_caused_raise_no_alert():
    now = {"experience/admitted": 100.0, "experience/evicted": 90.0, "experience/evictions_stale": 20.0}
    others = {f"experience/evictions_{reason}": 20.0 for reason in ("recycled", "payload_lost", "orphaned")}
    assert find_alerts(facts(latest=now | others)) == []


def test_a_mismatch_is_judged_by_fresh_tokens_and_the_runs_own_alarm():
    stale = {"mismatch/kl": 0.3, "mismatch/kl_staleness_2": 0.4}
    assert find_alerts(facts(latest=stale)) == []
    assert find_alerts(facts(latest=stale | {"mismatch/kl_staleness_0": 0.2}, mismatch_alarm=0.25)) == []
    (alert,) = find_alerts(facts(latest={"mismatch/kl_staleness_0": 0.3}, mismatch_alarm=0.25))
    assert "KL of 0.3, above trainer.mismatch_alarm = 0.25; compare temperature" in alert.text


def test_failures_of_long_ago_raise_no_alert():
    now = {"experience/admitted": 1000.0, "experience/failed": 300.0}
    before = {"experience/admitted": 500.0, "experience/failed": 300.0}
    assert find_alerts(facts(latest=now, earlier=before)) == []


@pytest.fixture
def metrics(tmp_path):
    return MetricsFile(tmp_path / "metrics.jsonl"), History(tmp_path / "metrics.jsonl")


def test_history_grows_with_the_file_and_leaves_gaps_where_a_metric_is_missing(metrics):
    file, history = metrics
    file.append("step", 1, {"a": 1.0})
    history.refresh()
    file.append("step", 2, {"b": 5.0})
    file.append("evaluation", 2, {"eval/accuracy": 0.5})
    file.append("step", 3, {"a": 3.0, "b": 6.0})
    assert history.refresh() is False
    assert history.steps == [1, 2, 3]
    assert (history.values("a"), history.values("b"), history.values("b", 1)) == ([1.0, 3.0], [5.0, 6.0], [6.0])
    assert history.thinned(9, "ab")["columns"] == {"a": [1.0, None, 3.0], "b": [None, 5.0, 6.0]}
    assert history.evaluations[0]["eval/accuracy"] == 0.5
    assert (history.value("b"), history.value("a", -2), history.value("a", -9)) == (6.0, None, None)
    assert {k: v for k, v in history.latest().items() if k in "ab"} == {"a": 3.0, "b": 6.0}


def test_a_history_that_a_resume_rewound_is_read_anew(metrics):
    file, history = metrics
    for step in (1, 2, 3):
        file.append("step", step, {"a": float(step)})
    history.refresh()
    file.rewind(2)
    file.append("step", 3, {"a": 30.0})
    assert history.refresh() is True
    assert (history.steps, history.columns["a"]) == ([1, 2, 3], array("d", [1.0, 2.0, 30.0]))


def test_a_step_whose_values_are_not_finite_is_there_with_gaps_that_a_page_can_read(metrics):
    file, history = metrics
    for step, loss in ((1, 0.5), (2, math.nan), (3, math.inf), (4, -math.inf)):
        file.append("step", step, {"train/loss": loss, "a": float(step)})
    file.append("evaluation", 4, {"eval/accuracy": math.nan})
    history.refresh()
    assert (history.steps, history.latest()) == ([1, 2, 3, 4], {"format_version": 1.0, "step": 4.0, "a": 4.0})
    shown = history.thinned(9, ["train/loss"])["columns"]
    assert shown == {"train/loss": [0.5, None, None, None]}
    json.dumps([shown, history.evaluations], allow_nan=False)


@pytest.mark.parametrize("odd", [b"12", b"{}", b"[1]", b"null", b'"x"', b'{"kind": "step"}', b"NaN", b"\0\xff"])
def test_a_line_that_is_no_steps_costs_itself(metrics, odd):
    file, history = metrics
    file.append("step", 1, {"a": 1.0})
    with history.path.open("ab") as lines:
        lines.write(odd + b"\n")
    file.append("step", 2, {"a": 2.0})
    history.refresh()
    assert history.steps == [1, 2]


def test_a_roles_metric_that_is_not_finite_is_left_out():
    view = LiveView()
    view.apply(Event("trainer-0", "worker", 1.0, {"train/loss": math.nan, "time/state_train_seconds": 1.0}, {}))
    assert view.roles["trainer-0"].metrics == {"time/state_train_seconds": 1.0}


def test_a_torn_last_line_waits_for_its_end(metrics):
    file, history = metrics
    file.append("step", 1, {"a": 1.0})
    text = history.path.read_text()
    history.path.write_text(text + text[:20])
    history.refresh()
    assert history.steps == [1]


def test_thinned_points_are_means_over_neighbouring_steps(metrics):
    file, history = metrics
    for step in range(1, 11):
        file.append("step", step, {"a": float(step)})
    history.refresh()
    thin = history.thinned(4, ["a"])
    assert thin == {"steps": [3, 6, 9, 10], "columns": {"a": [2.0, 5.0, 8.0, 10.0]}, "steps_per_point": 3}


def test_rates_are_tokens_over_time_also_over_several_steps(metrics):
    file, history = metrics
    name = "throughput/trained_tokens_per_second"
    for step, (rate, seconds) in enumerate([(9.0, 7.0), (100.0, 1.0), (10.0, 9.0), (50.0, 2.0), (20.0, 1.0)], start=1):
        file.append("step", step, {name: rate, "time/step_seconds": seconds})
    file.append("step", 6, {"time/step_seconds": 3.0})  # nothing is known of its tokens
    history.refresh()
    # (9 x 7 + 100 x 1 + 10 x 9) / 17, and (50 x 2 + 20 x 1) / 3
    assert history.thinned(2, [name])["columns"][name] == pytest.approx([253 / 17, 40.0])
    assert history.recent(4) == pytest.approx({name: 210 / 12, "time/step_seconds": 15 / 4})
    assert History(history.path.with_name("none")).recent(4) == {}


def test_shares_come_from_the_last_minutes_only():
    view = LiveView()
    for at, decode, idle in [(0.0, 0.0, 0.0), (100.0, 100.0, 0.0), (200.0, 100.0, 100.0)]:
        metrics = {"time/state_decode_seconds": decode, "time/state_idle_seconds": idle}
        view.apply(Event("rollout-0", "worker", at, metrics, {}))
    assert view.shares("rollout-0", 100.0) == {"decode": 0.0, "idle": 1.0}
    assert view.shares("rollout-0", 1000.0) == {"decode": 0.5, "idle": 0.5}


def test_a_role_that_ended_in_order_stays_to_be_seen_and_is_not_missed():
    view = LiveView()
    view.apply(Event("rollout-1", "worker", 0.0, {}, {"spans": [["decode", 0.0, 1.0]]}))
    view.apply(Event("supervisor", "retired", 1.0, {}, {"role": "rollout-1"}))
    assert view.retired == {"rollout-1"}
    assert list(view.spans["rollout-1"]) == [("decode", 0.0, 1.0)]
    view.apply(Event("rollout-1", "worker", 2.0, {}, {}))  # scaled up again
    assert view.retired == set()


def test_a_restarted_role_begins_anew():
    view = LiveView()
    view.apply(Event("w", "worker", 0.0, {"time/state_decode_seconds": 50.0}, {}))
    view.apply(Event("w", "worker", 5.0, {"time/state_start_seconds": 4.0, "time/state_decode_seconds": 1.0}, {}))
    assert view.shares("w", 60.0) == {"start": 0.8, "decode": 0.2}


def summary(name, **changes):
    values = {
        "trajectory_id": name, "group_id": name[:1], "prompt_id": "p", "attempt": 1, "worker": "rollout-0", "time": 0.0,
        "reward": 0.5, "failure": "", "finish_reason": "stop", "num_sampled_tokens": 10, "oldest": 0, "newest": 0,
        "file": "f", "member": 0, "line": 0, "text": "the answer is 4", "step": 3, "staleness": 1,
    }  # fmt: skip
    return Summary(**values | changes)


ROWS = [
    summary("a", time=1.0, reward=0.1, num_sampled_tokens=5),
    summary("b", time=2.0, reward=0.9, step=None, staleness=None),
    summary("c", time=3.0, reward=None, failure="tool: it broke", step=None, staleness=None, text=""),
    summary("d", time=4.0, reward=0.5, staleness=3, num_sampled_tokens=50),
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, "dcba"),
        ({"text": "BROKE"}, "c"),
        ({"min_reward": 0.5}, "db"),
        ({"max_reward": 0.5, "min_reward": 0.2}, "d"),
        ({"min_staleness": 2}, "d"),
        ({"max_tokens": 5}, "a"),
        ({"outcome": "trained"}, "da"),
        ({"outcome": "untrained"}, "b"),
        ({"outcome": "failed"}, "c"),
        ({"order": "reward_low"}, "adbc"),
        ({"order": "stalest"}, "dabc"),
        ({"order": "longest"}, "dbca"),
    ],
)
def test_search_filters_and_orders(wanted, found):
    assert "".join(s.trajectory_id for s in search(ROWS, Search(**wanted))) == found


def test_prometheus_text_is_read_back_by_the_reference_parser():
    run = {"run": 'r"1\\'}
    text = render_metrics(
        [
            ("train/loss", run, 0.25), ("staleness/histogram_2", run, 7.0), ("reward/term_digits", run, 1.0),
            ("throughput/trained_tokens_per_second", run, 3.5), ("not/declared", run, 1.0),
        ],
        [("laminar_up", "whether it lives", run, 1.0)],
    )  # fmt: skip
    read = {(s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    r = ("run", 'r"1\\')
    assert read == {
        ("laminar_train_loss", r): 0.25,
        ("laminar_staleness_histogram", r, ("versions", "2")): 7.0,
        ("laminar_reward_term", r, ("term", "digits")): 1.0,
        ("laminar_throughput_trained_tokens_per_second", r): 3.5,
        ("laminar_up", r): 1.0,
    }


def test_what_only_rises_is_a_counter_and_the_rest_is_a_gauge():
    role = {"role": "rollout-0"}
    text = render_metrics(
        [("time/state_idle_staleness_seconds", role, 3.5), ("experience/failed", {}, 2.0), ("train/loss", {}, 1.0)]
    )
    assert "# TYPE laminar_time_state_seconds counter\n" in text
    assert 'laminar_time_state_seconds{role="rollout-0",state="idle_staleness"} 3.5\n' in text
    assert "# TYPE laminar_experience_failed counter\n" in text
    assert "# TYPE laminar_train_loss gauge\n" in text
    assert {f.type for f in text_string_to_metric_families(text)} == {"counter", "gauge"}


def test_every_declared_metric_has_a_name_that_prometheus_takes():
    text = render_metrics([(metric.name.replace("*", "x"), {}, 1.0) for metric in METRICS])
    names = {family.name for family in text_string_to_metric_families(text)}
    assert len(names) == len(METRICS)


def test_secrets_are_starred_and_settings_are_not():
    tree = {
        "experience": {"redis_url": "redis://me:hunter2@host:6379/0"},
        "environment": {
            "options": {
                "api_key": "sk-1",
                "judge_token": "t",
                "nested": [{"password": "p"}],
                "headers": {"Authorization": "Bearer b", "X-Api-Key": "x"},
            }
        },
        "alerts": {"webhook": "https://chat.example/hooks/h00k"},
        "model": {"tokenizer": "models/tiny"},
        "rollout": {"max_new_tokens": 8},
    }
    shown = json.dumps(redact(tree))
    assert not any(secret in shown for secret in ("hunter2", "sk-1", '"t"', '"p"', "h00k", "Bearer", '"x"'))
    assert "models/tiny" in shown
    assert redact(tree)["rollout"] == {"max_new_tokens": 8}
