"""The dashboard's addresses: what they answer, and what they refuse."""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import time

import msgspec
import pytest

from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.dashboard.address import allowed_hosts, bind, port_owner, url_of
from laminar.dashboard.app import FILES, make_app
from laminar.dashboard.guard import MAX_BODY_BYTES, Guard
from laminar.dashboard.live import LiveFeed
from laminar.dashboard.source import RunSource
from laminar.errors import EnvironmentSetupError
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.stream import Event, stream_key
from laminar.telemetry.timeline import TimelineFile
from laminar.trajectories import append_step
from rollout.scripted import CodePointTokenizer
from rollout.trajectory_log import TrajectoryLog

TOKEN = "the-run-token"


@pytest.fixture
def folder(tmp_path, trajectory_maker):
    """The folder of a finished run of three steps."""
    run = RunFolder.create(tmp_path, "a")
    config = LaminarConfig.model_validate(
        {
            "model": {"path": "m"}, "data": {"path": "d"},
            "experience": {"redis_url": "redis://me:hunter2@host:6379/0"},
        }
    )  # fmt: skip
    run.config.write_text(dump_toml(config))
    run.write_state(RunState("run-a", TOKEN, 1, "finished", reason="max_steps"))
    metrics = MetricsFile(run.metrics)
    for step in (1, 2, 3):
        metrics.append("step", step, {"time": 100.0 + step, "train/loss": 0.5 / step, "staleness/histogram_1": 4.0})
    metrics.append("mark", 2, {"time": 102.0, "what": "control", "text": "paused"})
    TimelineFile(run.timeline).add_spans("trainer-0", [["wait", 100.0, 101.0], ["train", 101.0, 104.0]])
    log = TrajectoryLog(run.trajectories, "rollout-0", CodePointTokenizer(), rate=1.0, max_bytes=10**6)
    log.add(trajectory_maker.play("00000003", 0, "0.0", reward=0.25))
    log.write()
    append_step(run.trajectories, 2, {"00000003": 2})
    (run.logs / "trainer-0.log").write_text("2026-01-01 10:00:00,000 INFO hello\n")
    return run


@pytest.fixture
async def ask(folder):
    """Ask the application; answers status, headers and body (read as JSON where it is)."""
    source = RunSource(folder)
    app = make_app(source)

    async def request(path, *, method="GET", headers=(), body=b"", query="", host="127.0.0.1:7860"):
        sent, parts = [], [body[i : i + 4096] for i in range(0, len(body), 4096)] or [b""]

        async def receive():
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            return await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        raw = [(b"host", host.encode()), *((k.encode(), v.encode()) for k, v in headers)]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": raw,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 7860),
        }  # fmt: skip
        async with asyncio.timeout(20):
            await app(scope, receive, send)
        answered = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        data = b"".join(m.get("body", b"") for m in sent[1:])
        return sent[0]["status"], answered, json.loads(data) if "json" in answered.get("content-type", "") else data.decode()

    await source.read()
    feed = asyncio.create_task(source.feed.run())
    while not source.feed.view.spans:
        await asyncio.sleep(0.01)
    yield request
    feed.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await feed


async def test_the_state_of_a_finished_run_is_answered_from_its_folder(ask):
    status, _, state = await ask("/api/state")
    assert status == 200
    assert (state["run"]["status"], state["run"]["is_alive"], state["step"]) == ("finished", False, 3)
    assert state["latest"]["train/loss"] == pytest.approx(0.5 / 3)
    assert (state["roles"]["trainer-0"]["silent_seconds"], state["roles"]["trainer-0"]["is_silent"]) == (None, False)


def test_a_role_of_a_living_run_is_silent_once_it_has_missed_ten_reports(folder):
    source = RunSource(folder)
    source.feed.is_alive = True
    now = time.time()
    for role, heard_at in (("rollout-0", now + 60.0), ("rollout-1", now - 5.1)):
        source.feed.view.apply(Event(role, "worker", heard_at, {}, {}))
    state = source.state()
    assert {name: role["is_silent"] for name, role in state["roles"].items()} == {"rollout-0": False, "rollout-1": True}
    (alert,) = (alert for alert in state["alerts"] if alert["name"] == "role_silent")
    assert alert["text"].startswith("rollout-1 has been silent")


def test_it_is_told_how_many_of_the_wanted_workers_run(folder):
    folder.write_state(dataclasses.replace(folder.read_state(), status="running", wanted_workers=52))
    source = RunSource(folder)
    source.feed.is_alive = True
    now = time.time()
    told = [("rollout-0", now, "decode"), ("rollout-1", now, "start"), ("rollout-2", now - 60.0, "decode")]
    for role, heard_at, state in (*told, ("trainer-0", now, "train")):
        source.feed.view.apply(Event(role, "worker", heard_at, {}, {"spans": [[state, heard_at - 1.0, heard_at]]}))
    assert source.state()["run"]["workers"] == {"running": 1, "wanted": 52}


async def test_a_role_that_died_is_silent_though_the_files_tell_of_all_roles_ever_after(folder):
    """The timeline repeats what each role said last, and `status` reads it before the stream."""
    now = time.time()
    folder.write_state(dataclasses.replace(folder.read_state(), status="running", started_at=now - 200.0))
    timeline = TimelineFile(folder.timeline)
    for role, ago in (("rollout-0", 90.0), ("rollout-1", 0.0)):
        timeline.add_spans(role, [["decode", now - ago - 1.0, now - ago]], f"{int(1000 * (now - ago))}-0")
    timeline.add_roles(now, {"rollout-0": {}, "rollout-1": {}})
    failure = "ERROR laminar.rollout-0: run failed\nTraceback (most recent call last):\n  File x\nValueError: no such row\n"
    (folder.logs / "rollout-0.log").write_text(f"2026-01-01 10:00:00,000 {failure}2026-01-01 10:00:01,000 INFO a: end\n")
    source = RunSource(folder)
    await source.feed.look_once()
    source.feed.is_alive = True
    roles = source.state()["roles"]
    assert {name: role["is_silent"] for name, role in roles.items()} == {"rollout-0": True, "rollout-1": False}
    assert roles["rollout-0"]["silent_seconds"] == pytest.approx(90.0, abs=5.0)
    assert roles["rollout-0"]["last_error"] == "2026-01-01 10:00:00,000 ValueError: no such row"
    assert roles["rollout-1"]["last_error"] == ""


async def test_a_resume_misses_neither_the_roles_nor_the_steps_of_the_life_before(folder):
    TimelineFile(folder.timeline).add_roles(104.0, {"rollout-0": {}, "rollout-1": {}})
    folder.write_state(dataclasses.replace(folder.read_state(), status="running", started_at=time.time(), lives=2))
    source = RunSource(folder)
    await source.feed.look_once()
    source.feed.is_alive = True
    source.feed.view.apply(Event("rollout-0", "worker", time.time(), {}, {}))
    state = source.state()
    assert {alert["name"] for alert in state["alerts"]} & {"role_silent", "no_progress"} == set()
    assert {name: role["is_silent"] for name, role in state["roles"].items()} == {"rollout-0": False}


@pytest.fixture
async def living(folder, valkey, redis_client, run_id, monkeypatch):
    """The feed of a living run whose files were written by a clock that is ahead, and what sends it events."""
    monkeypatch.setattr("laminar.dashboard.live.POLL_SECONDS", 0.01)
    ahead = time.time() + 1000.0
    TimelineFile(folder.timeline).add_roles(ahead, {"trainer-0": {}})
    folder.write_state(RunState(run_id, TOKEN, 1, "running", redis_url=valkey.url))
    lock, feed = folder.begin_life(1), LiveFeed(folder)
    task = asyncio.create_task(feed.run())

    async def send(role, at):
        event = Event(role, "worker", at, {}, {"spans": [["decode", at - 1.0, at]]})
        await redis_client.xadd(stream_key(run_id), {b"e": msgspec.msgpack.encode(event)})

    async def wait_for(condition):
        async with asyncio.timeout(20):
            while not condition():
                assert not task.done()
                await asyncio.sleep(0.01)

    yield feed, send, wait_for
    os.close(lock)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_roles_whose_clocks_are_behind_are_heard_and_are_not_silent(living):
    feed, send, wait_for = living
    behind = time.time() - 500.0
    for count in (1, 2):  # what the first look finds, and what comes later
        await send("rollout-0", behind + count)
        await wait_for(lambda count=count: len(feed.view.windows["rollout-0"]) == count)
        assert feed.view.roles["rollout-0"].heard_at > behind + 400.0
    assert list(feed.view.spans["rollout-0"]) == [("decode", behind, behind + 2.0)]


@pytest.mark.usefixtures("living")
async def test_a_role_that_ended_in_order_and_came_again_is_not_taken_for_gone(redis_client, run_id, folder):
    for kind, role in (("worker", "rollout-1"), ("retired", "supervisor"), ("worker", "rollout-1")):
        event = Event(role, kind, 1.0, {}, {"role": "rollout-1", "spans": [["decode", 0.0, 1.0]]})
        last = await redis_client.xadd(stream_key(run_id), {b"e": msgspec.msgpack.encode(event)})
    TimelineFile(folder.timeline).add_spans("rollout-1", [["decode", 0.0, 1.0]], last.decode())
    feed = LiveFeed(folder)
    assert await feed.look_once() == ""
    assert feed.view.retired == set()


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": "cut sho'])
async def test_a_state_that_cannot_be_read_for_a_moment_ends_no_feed_and_repeats_no_event(living, folder, text):
    feed, send, wait_for = living
    file, state = folder.path / "state.json", folder.read_state()
    await send("rollout-0", 10.0)
    await wait_for(lambda: "rollout-0" in feed.view.roles)
    file.write_text(text) if text else file.unlink()
    for _ in range(20):
        await asyncio.sleep(0.01)
    folder.write_state(dataclasses.replace(state, status="stopping"))
    await send("rollout-0", 20.0)
    await wait_for(lambda: len(feed.view.windows["rollout-0"]) > 1)
    assert feed.state.status == "stopping"
    assert [at for at, _ in feed.view.windows["rollout-0"]] == [10.0, 20.0]


def test_a_worker_that_was_scaled_away_is_shown_no_more_while_the_run_lives(folder):
    source = RunSource(folder)
    source.feed.is_alive = True
    for role in ("rollout-0", "rollout-1"):
        source.feed.view.apply(Event(role, "worker", 1.0, {"time/state_decode_seconds": 1.0}, {}))
    source.feed.view.apply(Event("supervisor", "retired", 2.0, {}, {"role": "rollout-1"}))
    assert (list(source.state()["roles"]), list(source.replicas())) == (["rollout-0"], ["rollout-0"])
    assert "rollout-1" not in source.prometheus()


async def test_history_timeline_logs_config_and_metrics_are_answered(ask):
    _, _, history = await ask("/api/history", query="names=train/*&points=10")
    assert (history["steps"], list(history["columns"])) == ([1, 2, 3], ["train/loss"])
    assert [mark["text"] for mark in history["marks"]] == ["paused"]
    _, _, timeline = await ask("/api/timeline", query="seconds=2")
    assert timeline["roles"]["trainer-0"] == [["train", 102.0, 104.0]]
    _, _, logs = await ask("/api/logs", query="role=trainer-0")
    assert logs["lines"] == [["trainer-0", "2026-01-01 10:00:00,000 INFO hello"]]
    _, _, config = await ask("/api/config")
    assert "[staleness]" in config
    assert "hunter2" not in config
    _, _, metrics = await ask("/metrics")
    assert 'laminar_staleness_histogram{run="run-a",versions="1"} 4' in metrics


async def test_a_mark_and_an_evaluation_between_steps_are_told_to_an_open_page(ask, folder):
    def told(state):
        return state["step"], state["num_marks"], state["num_evaluations"]

    before = told((await ask("/api/state"))[2])
    file = MetricsFile(folder.metrics)
    file.append("mark", 3, {"what": "notice", "text": "trainer restarted"})
    file.append("evaluation", 3, {"eval/accuracy": 0.5})
    async with asyncio.timeout(10):
        while (now := told((await ask("/api/state"))[2])) == before:
            await asyncio.sleep(0.05)
    assert (before, now) == ((3, 1, 0), (3, 2, 1))


async def test_trajectories_are_found_and_shown(ask):
    _, _, found = await ask("/api/trajectories", query="min_reward=0.2&outcome=trained")
    assert [(row["trajectory_id"], row["staleness"]) for row in found["rows"]] == [("00000003-000", 1)]
    assert (await ask("/api/trajectories", query="min_reward=0.9"))[2]["rows"] == []
    _, _, record = await ask("/api/trajectories/00000003-000")
    assert record["chains"][0][1]["logprobs"] == [-0.5, -0.25, -1.0]


@pytest.mark.parametrize("name", FILES)
async def test_every_file_of_the_page_is_served_under_a_policy_that_loads_nothing_from_elsewhere(ask, name):
    status, headers, body = await ask(f"/static/{name}")
    assert (status, bool(body)) == (200, True)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    if name.endswith((".html", ".css", ".js")) and not name.startswith("vendor/"):
        assert "http://" not in body
        assert "https://" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/vendor/../../source.py",
        "/api/trajectories/..%2f..%2fstate.json", "/api/trajectories/../../state.json", "/state.json", "/openapi.json",
    ],
)  # fmt: skip
async def test_a_path_that_leads_elsewhere_is_not_there(ask, path):
    status, _, body = await ask(path)
    assert status == 404
    assert TOKEN not in str(body)


@pytest.mark.parametrize("role", ["../../state", "/etc/passwd", "trainer-0.log", "..", "trainer-0/../../state"])
async def test_a_log_that_is_no_role_is_not_there(ask, role):
    status, _, body = await ask("/api/logs", query=f"role={role}")
    assert status == 404
    assert TOKEN not in str(body)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "[::2]:80"])
async def test_a_host_that_is_not_ours_is_refused(ask, host):
    assert (await ask("/api/state", host=host))[0] == 421


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1", "[::1]:7860"])
async def test_loopback_names_are_served(ask, host):
    assert (await ask("/api/state", host=host))[0] == 200


@pytest.mark.parametrize(
    ("bound_to", "name", "status"),
    [
        ("0.0.0.0", "10.1.2.3:7860", 200), ("::", "[fe80::1]:7860", 200), ("0.0.0.0", "evil.example", 421),
        ("0.0.0.0", "10.1.2.3.evil.example", 421), ("0.0.0.0", "any address", 421), ("10.1.2.3", "10.1.2.3:7860", 200),
        ("10.1.2.3", "10.1.2.4:7860", 421), ("127.0.0.1", "10.1.2.3:7860", 421),
    ],
)  # fmt: skip
async def test_a_dashboard_that_is_open_to_others_is_called_by_its_numbers_and_by_no_foreign_name(bound_to, name, status):
    answers = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        answers.append(message.get("status"))

    scope = {"type": "http", "method": "GET", "headers": [(b"host", name.encode())], "query_string": b""}
    await Guard(application, allowed_hosts(bound_to))(scope, None, send)
    assert answers[0] == status


async def test_another_pages_origin_is_refused_and_our_own_is_not(ask):
    ours, foreign = [("origin", "http://127.0.0.1:7860")], [("origin", "http://evil.example")]
    assert (await ask("/api/state", headers=ours))[0] == 200
    for headers in (foreign, [("origin", "null")], [("origin", "http://127.0.0.1:9999")]):
        assert (await ask("/api/state", headers=headers))[0] == 403
    cross = [("sec-fetch-site", "cross-site")]
    assert (await ask("/api/control", method="POST", headers=cross, body=b"{}"))[0] == 403


ORDER = json.dumps({"verb": "pause"}).encode()
JSON = ("content-type", "application/json")


async def test_control_without_the_token_is_refused(ask):
    for headers in ([JSON], [JSON, ("x-laminar-token", "guess")], [JSON, ("x-laminar-token", TOKEN + "x")]):
        status, _, body = await ask("/api/control", method="POST", headers=headers, body=ORDER)
        assert status == 403
        assert TOKEN not in str(body)


async def test_control_of_a_run_that_has_ended_is_answered_with_its_sentence(ask):
    status, _, body = await ask("/api/control", method="POST", headers=[JSON, ("x-laminar-token", TOKEN)], body=ORDER)
    assert (status, "not alive" in body["detail"]) == (409, True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422), (b"{", 422), (b"[]", 422), (b"\xff\xfe", 422), (b'{"verb": 3}', 422), (b'{"verb": "dance"}', 422),
        (b'{"verb": "stop", "extra": 1}', 422), (b"x" * (MAX_BODY_BYTES + 1), 413), (b"[" * 5000, 400),
    ],
)  # fmt: skip
async def test_malformed_and_oversized_orders_are_refused(ask, body, status):
    headers = [JSON, ("x-laminar-token", TOKEN)]
    assert (await ask("/api/control", method="POST", headers=headers, body=body))[0] == status


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/api/history", "points=0"), ("/api/history", "points=999999"), ("/api/timeline", "seconds=nan"),
        ("/api/logs", "lines=-1"), ("/api/trajectories", "outcome=odd"), ("/api/trajectories", "limit=100000"),
        ("/api/trajectories", "unknown=1"), ("/api/history", "names=" + "a" * 3000),
    ],
)  # fmt: skip
async def test_malformed_questions_are_refused(ask, path, query):
    assert (await ask(path, query=query))[0] == 422


async def test_other_methods_and_endless_questions_are_refused(ask):
    assert (await ask("/api/state", method="DELETE"))[0] == 405
    assert (await ask("/api/control", method="PUT"))[0] == 405
    assert (await ask("/api/state", query="a" * 5000))[0] == 414


def test_a_port_that_is_taken_is_refused_with_its_owner():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentSetupError, match=rf"dashboard.port {port} .*listens there; choose another"):
            bind("127.0.0.1", port)
        assert "process" in port_owner(port)
    with bind("127.0.0.1", 0) as listening:
        assert url_of(listening).startswith("http://127.0.0.1:")
