"""Users' agents as programs and plain functions: what they started ends with them, and waiting costs no agent its time."""

import asyncio
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from laminar.config.load import load_config
from laminar.config.sizes import longest_row_tokens
from laminar.types import ClaimedGroup, FailureKind, Prompt, Purpose, SamplingParameters
from rollout.agents import AgentPlayer, build_agent_player
from rollout.boundary import DaemonThreads, EpisodeError
from rollout.drivers import AgentDriver, Task
from rollout.environments.agent import Agent
from rollout.rewards.scorer import RewardScorer
from rollout.scripted import CodePointTokenizer, ScriptedEngine

GROUP = ClaimedGroup("00000003", 3, Prompt("p", "2 + 3?", {}), (0,), 0)
TASK = Task(Prompt("p", "2 + 3?", {}), "http://nowhere/v1", "key", seconds=60.0)
PYTHON = [sys.executable, "-I", "-S", "-c"]
FAMILY = """
import os, subprocess, sys, time
kept = subprocess.Popen(["sleep", "1000"])  # holds standard error
away = subprocess.Popen(["sleep", "1000"], start_new_session=True, stderr=subprocess.DEVNULL)
with open(sys.argv[1] + ".tmp", "w") as file:
    print(os.getpid(), kept.pid, away.pid, file=file)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""
DRIVER = """
import asyncio, sys
from laminar.types import Prompt
from rollout.drivers import AgentDriver, Task
from rollout.environments.agent import Agent
asyncio.run(AgentDriver(Agent.Options(command=sys.argv[1:])).run(Task(Prompt("p", "?", {}), "http://nowhere/v1", "key")))
"""


def family(path, seconds):
    return [*PYTHON, FAMILY, str(path), str(seconds)]


def driver(*command):
    return AgentDriver(Agent.Options(command=list(command)))


def lives(pid):
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


async def pids_in(path):
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.02)
    return [int(pid) for pid in path.read_text().split()]


async def all_end(pids):
    async with asyncio.timeout(20):
        while any(lives(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def test_a_program_that_has_ended_takes_along_what_it_started(tmp_path):
    async with asyncio.timeout(20):  # its child holds standard error for 1,000 s
        await driver(*family(tmp_path / "pids", 0)).run(TASK)
    assert [lives(pid) for pid in await pids_in(tmp_path / "pids")] == [False] * 3


async def test_a_program_that_is_given_up_takes_along_what_it_started(tmp_path):
    run = asyncio.create_task(driver(*family(tmp_path / "pids", 1000)).run(TASK))
    pids = await pids_in(tmp_path / "pids")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [lives(pid) for pid in pids] == [False] * 3


async def test_a_worker_that_is_killed_takes_along_what_its_agents_started(tmp_path):
    command = [sys.executable, "-c", DRIVER, *family(tmp_path / "pids", 1000)]
    worker = await asyncio.create_subprocess_exec(*command)
    pids = await pids_in(tmp_path / "pids")
    worker.kill()
    await worker.wait()
    await all_end(pids)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/nowhere/agent"], "could not be started"),
        ([*PYTHON, "import sys; sys.stderr.write('x\\n' * 10**6 + 'no browser'); sys.exit(3)"], "status 3: no browser"),
        ([*PYTHON, "import os; os.kill(os.getpid(), 9)"], "status 137"),
    ],
)
async def test_a_program_that_fails_is_a_failure_with_its_status_and_last_words(command, text):
    with pytest.raises(EpisodeError, match=text) as caught:
        await driver(*command).run(TASK)
    assert caught.value.failure.kind is FailureKind.ENVIRONMENT


async def test_plain_functions_that_will_return_in_time_are_not_stuck_when_nobody_waits_any_more(monkeypatch):
    release, started = threading.Event(), threading.Semaphore(0)

    def agent(task):
        started.release()
        return release.wait(60) and 1.0

    monkeypatch.setitem(sys.modules, "agent_of_the_test", SimpleNamespace(solve=agent))
    plain = AgentDriver(Agent.Options(run="agent_of_the_test:solve"))
    evicted = [asyncio.create_task(plain.run(TASK)) for _ in range(20)]
    for _ in evicted:
        assert await asyncio.to_thread(started.acquire, timeout=20)
    for task in evicted:
        task.cancel()
    await asyncio.gather(*evicted, return_exceptions=True)
    release.set()
    assert await plain.run(TASK) == 1.0


async def test_the_wait_for_a_thread_does_not_count_as_a_plain_agents_time(monkeypatch):
    import json
    import urllib.request

    def agent(task):
        body = json.dumps({"messages": [{"role": "user", "content": task.prompt.content}]}).encode()
        request = urllib.request.Request(task.base_url + "/chat/completions", body, {"x-api-key": task.api_key})
        urllib.request.urlopen(request).read()
        return task.seconds

    monkeypatch.setitem(sys.modules, "agent_of_the_test", SimpleNamespace(solve=agent))
    options = Agent.Options(run="agent_of_the_test:solve")
    plain = AgentDriver(options, DaemonThreads(max_running=1))
    player = AgentPlayer(options, CodePointTokenizer(), RewardScorer([]), 60.0, driver=plain)
    await player.gateway.start()
    try:
        async with plain.place():
            sampling = SamplingParameters(1.0, 100, 0)
            waits = asyncio.create_task(player.play(ScriptedEngine(["5"]), GROUP, 0, 0, sampling=sampling, run_seed=5))
            await asyncio.sleep(1.0)  # the wait that must not count
        assert (await waits).reward > 59.5
    finally:
        await player.close()


async def test_an_agent_that_is_evaluated_has_the_tokens_of_an_evaluation(monkeypatch):
    async def agent(task):
        body = {"messages": [{"role": "user", "content": task.prompt.content}]}
        async with (
            aiohttp.ClientSession(headers={"x-api-key": task.api_key}) as session,
            session.post(task.base_url + "/chat/completions", json=body) as response,
        ):
            return float(response.status == 200)

    monkeypatch.setitem(sys.modules, "agent_of_the_test", SimpleNamespace(solve=agent))
    config = load_config(
        Path("deploy/recipes/tiny.toml"),
        ["environment.kind=agent", "environment.options.run=agent_of_the_test:solve", "eval.max_new_tokens=60"],
    )
    sampling = SamplingParameters(1.0, 10**6, 0)
    player = build_agent_player(config, CodePointTokenizer(), RewardScorer([]))
    try:
        evaluated = config.data.max_prompt_tokens + 60
        for purpose, longest in ((Purpose.TRAIN, longest_row_tokens(config)), (Purpose.EVALUATION, evaluated)):
            engine = ScriptedEngine(["5" * 100])
            await player.play(engine, GROUP, 0, 0, sampling=sampling, run_seed=5, purpose=purpose)
            (request,) = engine.requests
            assert len(request.input_ids) + request.sampling.max_new_tokens == longest
    finally:
        await player.close()
