"""Alerts on their way out, against a real HTTP server that fails or hangs, and real programs."""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from laminar.config.system import AlertsConfig
from laminar.dashboard.alerts import Alert
from laminar.telemetry.delivery import MAX_WAITING, Deliveries

SECRET = "hook-7f3a"
DISK = Alert("critical", "disk_low", "only 1.0 % is free")


class Hook(ThreadingHTTPServer):
    """Takes alerts; answers with the next of its statuses, 200 when they are used up, or not at all while it hangs."""

    daemon_threads = True

    def __init__(self, statuses=(), hangs=False):
        self.statuses, self.taken, self.going_on = list(statuses), [], threading.Event()
        if not hangs:
            self.going_on.set()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.taken.append((self.path, body))
        self.server.going_on.wait(20)
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.end_headers()

    def log_message(self, *_):
        return None


@pytest.fixture
def hook():
    servers = []

    def start(**settings):
        servers.append(Hook(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.going_on.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
async def deliveries():
    tasks = []

    def start(**settings):
        made = Deliveries(AlertsConfig(**settings), "run-1", pause_seconds=0.01)
        tasks.append(asyncio.create_task(made.run()))
        return made

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_webhook_gets_the_alert_again_after_failures_until_it_takes_it(hook, deliveries):
    server = hook(statuses=[500, 503])
    made = deliveries(webhook=server.url)
    made.post(DISK)
    await made.finish(20)
    assert [path for path, _ in server.taken] == [f"/{SECRET}"] * 3
    body = server.taken[-1][1]
    assert (body["run"], body["level"], body["name"]) == ("run-1", "critical", "disk_low")
    assert body["text"] == "[critical] run-1: only 1.0 % is free"
    assert made.failed == 0


async def test_a_webhook_that_fails_for_good_is_given_up_and_its_address_is_not_logged(hook, deliveries, caplog):
    server = hook(statuses=[500] * 9)
    made = deliveries(webhook=server.url, max_retries=2)
    made.post(DISK)
    await made.finish(20)
    assert (len(server.taken), made.failed) == (3, 1)
    assert "the webhook failed in 3 attempts: it answered HTTP 500" in caplog.text
    assert SECRET not in caplog.text


async def test_a_webhook_that_does_not_answer_is_left_at_its_deadline_and_the_next_alert_goes_on(hook, deliveries, caplog):
    server = hook(hangs=True)
    made = deliveries(webhook=server.url, max_retries=0, timeout_seconds=0.1)
    made.post(DISK)
    async with asyncio.timeout(20):
        while not made.failed:
            await asyncio.sleep(0.01)
    assert "no answer within 0.1 s" in caplog.text
    server.going_on.set()
    made.post(Alert("critical", "role_silent", "rollout-0 is silent"))
    await made.finish(20)
    assert [body["name"] for _, body in server.taken] == ["disk_low", "role_silent"]


async def test_posting_never_waits_and_what_is_too_much_is_left_out(hook):
    made = Deliveries(AlertsConfig(webhook=hook(hangs=True).url), "run-1")  # nobody delivers
    for _ in range(MAX_WAITING + 5):
        made.post(DISK)
    assert made.failed == 5


async def test_nobody_listening_and_a_redirect_are_failures(hook, deliveries, caplog):
    gone = hook()
    url = gone.url
    gone.shutdown()
    gone.server_close()
    for settings in ({"webhook": url}, {"webhook": hook(statuses=[302]).url}):
        made = deliveries(**settings, max_retries=0)
        made.post(DISK)
        await made.finish(20)
        assert made.failed == 1
    assert "ClientConnectorError" in caplog.text
    assert "HTTP 302" in caplog.text
    assert SECRET not in caplog.text


async def test_only_alerts_that_are_grave_enough_are_delivered(hook, deliveries):
    server = hook()
    made = deliveries(webhook=server.url, level="critical")
    made.post(Alert("warning", "mismatch", "a little"))
    made.post(DISK)
    await made.finish(20)
    assert [body["name"] for _, body in server.taken] == ["disk_low"]


@pytest.mark.slow
async def test_a_command_gets_the_alert_on_its_input_and_in_its_environment(deliveries, tmp_path):
    program = tmp_path / "note.py"
    program.write_text(
        "import json, os, sys\n"
        "open(sys.argv[1], 'w').write(json.load(sys.stdin)['name'] + ' ' + os.environ['LAMINAR_ALERT_LEVEL'])\n"
    )
    made = deliveries(command=f"{sys.executable} -I -S {program} '{tmp_path}/to ld'")
    made.post(DISK)
    await made.finish(20)
    assert (tmp_path / "to ld").read_text() == "disk_low critical"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "reason"), [("false", "exit code 1"), ("sleep 100", "no answer within"), ("/nowhere/x", "No such file")]
)
async def test_a_command_that_fails_or_hangs_is_given_up(deliveries, caplog, command, reason):
    made = deliveries(command=command, max_retries=0, timeout_seconds=0.2 if "sleep" in command else 10)
    made.post(DISK)
    await made.finish(20)
    assert made.failed == 1
    assert reason in caplog.text
