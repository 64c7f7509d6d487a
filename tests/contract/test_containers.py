"""Containers as a sandbox: commands as an engine gets them, and the pool's dealings, with a scripted engine.

The scripted engine stands in for the command line of one: `run` and `exec` are processes of this machine in a folder.
"""

import asyncio
import stat
import sys

import pytest

from laminar.types import FailureKind, Prompt
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.code_tests import CodeTests
from rollout.sandbox.containers import Container, ContainerPool, exec_arguments, find_engine, run_arguments
from rollout.sandbox.run import Ended, Limits, Program, python_program

ENGINE = """#!{python} -IS
import json, os, signal, subprocess, sys
home = os.path.dirname(os.path.abspath(sys.argv[0]))
verb, arguments = sys.argv[1], sys.argv[2:]
with open(home + "/calls.jsonl", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if verb == "version":
    sys.exit(0)
if verb == "run":
    if "absent" in arguments:
        sys.exit("Unable to find image 'absent' locally")
    box = home + "/" + arguments[arguments.index("--name") + 1]
    os.mkdir(box)
    with open(box + ".pid", "w") as file:
        file.write(str(os.getpid()))
    print("ready", flush=True)
    sys.stdin.buffer.read()
if verb == "exec":
    place = next(i for i, part in enumerate(arguments) if part.startswith("laminar-"))
    box = home + "/" + arguments[place]
    command = [box if part == "/box" else part for part in arguments[place + 1:]]
    command = [{python!r} if part == "python3" else part for part in command]
    child = subprocess.Popen(command, cwd=box, start_new_session=True)
    with open(box + ".pids", "a") as file:
        file.write(str(child.pid) + "\\n")
    code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)
if verb == "rm":
    box = home + "/" + arguments[1]
    pids = open(box + ".pids").read().split() if os.path.exists(box + ".pids") else []
    for pid in pids:
        try:
            os.killpg(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    os.kill(int(open(box + ".pid").read()), signal.SIGKILL)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The scripted engine as the only one on the path; its folder."""
    folder = tmp_path / "engine"
    folder.mkdir()
    script = folder / "podman"
    script.write_text(ENGINE.replace("{python!r}", repr(sys.executable)).replace("{python}", sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
async def pool_of(engine):
    pools = []

    def make(warm=0, image="python:3", **limits):
        sizes = {"wall_seconds": 30.0, "output_bytes": 1000, **limits}
        pools.append(ContainerPool(Container(image=image, engine="podman", warm=warm), Limits(**sizes)))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


def verbs(engine):
    import json

    return [json.loads(line)[0] for line in (engine / "calls.jsonl").read_text().splitlines()]


def test_a_container_gets_every_limit_and_no_network():
    limits = Limits(memory_bytes=2**28, disk_bytes=2**20, file_bytes=2**16, processes=8, cpu_seconds=3.0)
    told = " ".join(run_arguments("laminar-x", Container(image="python:3"), limits))
    for part in (
        "run -i --rm --pull never --name laminar-x", "--network none", "--read-only", "--memory 268435456",
        "--memory-swap 268435456", "--pids-limit 10", "--cap-drop ALL", "--security-opt no-new-privileges",
        "--user 65534:65534", "size=1048576", "fsize=65536:65536", "python:3 /bin/sh -c echo ready; exec cat > /dev/null",
    ):  # fmt: skip
        assert part in told
    program = python_program("print(1)")
    assert exec_arguments("laminar-x", program, limits) == [
        "exec", "-i", "--env", "OMP_NUM_THREADS=1", "laminar-x", "/bin/sh", "-c",
        'ulimit -St 3; ulimit -Ht 5; exec "$@"', "box", "python3", "-I", "-B", "main.py",
    ]  # fmt: skip


@pytest.mark.slow
async def test_a_program_runs_in_a_container_of_its_own_which_is_removed(pool_of, engine):
    pool = pool_of()
    code = "import sys; print(sys.stdin.read() + open('sub/data.txt').read()); print('bad', file=sys.stderr); sys.exit(3)"
    outcome = await pool.run(python_program(code, stdin="in ", files={"sub/data.txt": "ü"}))
    assert (outcome.ended, outcome.code, outcome.output, outcome.errors) == (Ended.EXIT, 3, "in ü\n", "bad\n")
    assert outcome.isolated
    assert verbs(engine) == ["version", "run", "exec", "exec", "rm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limits", "ended"),
    [
        ("import time; time.sleep(600)", {"wall_seconds": 1.0}, Ended.WALL),
        ("while True: print('x' * 100)", {}, Ended.OUTPUT),
        ("import os; os.kill(os.getpid(), 9)", {}, Ended.MEMORY),
        ("import os; os.kill(os.getpid(), 24)", {}, Ended.CPU),
        ("import os; os.kill(os.getpid(), 11)", {}, Ended.SIGNAL),
    ],
)
async def test_a_program_ends_at_its_limits(pool_of, code, limits, ended):
    outcome = await asyncio.wait_for(pool_of(**limits).run(python_program(code)), 60)
    assert outcome.ended is ended
    assert len(outcome.output) <= 1000


@pytest.mark.slow
async def test_containers_are_started_ahead_and_none_is_used_twice(pool_of, engine):
    pool = pool_of(warm=2)
    await pool.run(python_program("print(1)"))
    async with asyncio.timeout(30):
        while len(pool._ready) < 2:
            await asyncio.sleep(0.01)
    ahead = {container.name for container in pool._ready}
    used = [pool._ready[-1].name]
    assert (await pool.run(python_program("print(2)"))).output == "2\n"
    assert used[0] in ahead
    assert used[0] not in {container.name for container in pool._ready}
    await pool.close()
    assert verbs(engine).count("rm") == verbs(engine).count("run")


async def test_without_an_engine_programs_are_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EpisodeError, match="docker is not installed; podman is not installed") as caught:
        await find_engine("auto", 5.0)
    assert caught.value.failure.kind is FailureKind.TOOL
    assert "remove `container`" in str(caught.value)


@pytest.mark.slow
async def test_an_engine_that_does_not_answer_is_named_with_its_words(engine, monkeypatch):
    (engine / "podman").write_text("#!/bin/sh\necho 'cannot connect to the daemon' >&2\nexit 1\n")
    with pytest.raises(EpisodeError, match="podman: cannot connect to the daemon"):
        await find_engine("podman", 20.0)


@pytest.mark.slow
async def test_an_image_that_is_not_there_is_a_failure_of_the_tool(pool_of):
    with pytest.raises(EpisodeError, match="Unable to find image 'absent' locally"):
        await pool_of(image="absent").run(python_program("print(1)"))


@pytest.mark.slow
async def test_a_file_outside_the_private_folder_is_refused(pool_of):
    with pytest.raises(ValueError, match="leads out"):
        await pool_of().run(Program(["/bin/true"], {"../x": ""}))


@pytest.mark.slow
async def test_code_tests_run_in_containers_where_asked_for(engine):
    reward = CodeTests(CodeTests.Options(container=Container(image="python:3", engine="podman", warm=0)))
    prompt = Prompt("p", "?", {"tests": [{"input": "3", "output": "4"}]})
    assert await reward.score(RewardContext("t", prompt, "print(int(input()) + 1)")) == 1.0
    assert "exec" in verbs(engine)
