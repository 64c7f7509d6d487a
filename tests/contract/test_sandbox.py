"""The sandbox against programs that mean harm: every one ends within its limits, and nothing of it is left."""

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from laminar.types import FailureKind
from rollout.boundary import EpisodeError
from rollout.sandbox import run as sandbox
from rollout.sandbox.run import Ended, Limits, Program, namespaces_available, python_program, run

isolated = pytest.mark.skipif(not namespaces_available(), reason="this machine allows no namespaces")


@pytest.fixture(
    params=[pytest.param(True, marks=isolated), pytest.param(False, marks=pytest.mark.slow)], ids=["namespaces", "limits"]
)
def anywhere(request, monkeypatch):
    """With namespaces, and as on a machine without."""
    if not request.param:
        monkeypatch.setattr(sandbox, "namespaces_available", lambda: False)
    return request.param


def limits(**settings):
    return Limits(**{"wall_seconds": 60.0, "cpu_seconds": 30.0, "isolation": "if_available", **settings})


async def play(code, **settings):
    return await run(python_program(code), limits(**settings))


def left_over(mark):
    """Processes whose command line or working folder tells of the mark."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and mark in (process / "cmdline").read_bytes().decode():
                found.append(process.name)
        except OSError:
            continue
    return found


def sleeper(mark):
    python = python_program("")
    return Program([python.arguments[0], "-c", "import time; time.sleep(600)", mark], readable=python.readable)


def boxes():
    return set(Path("/tmp").glob("laminar-box-*"))


async def test_a_good_program_reads_writes_and_ends(anywhere):
    code = "import sys; print(sys.stdin.read() + open('sub/data.txt').read()); print('bad', file=sys.stderr); sys.exit(3)"
    outcome = await run(python_program(code, stdin="in ", files={"sub/data.txt": "ü"}), limits())
    assert (outcome.ended, outcome.code, outcome.output, outcome.errors) == (Ended.EXIT, 3, "in ü\n", "bad\n")
    assert outcome.isolated is anywhere
    assert not outcome.is_success


async def test_endless_output_ends_at_the_limit(anywhere):
    outcome = await play("while True: print('x' * 1000)", output_bytes=5000)
    assert outcome.ended is Ended.OUTPUT
    assert len(outcome.output) == 5000


async def test_a_program_that_sleeps_ends_at_its_wall_time(anywhere):
    outcome = await play("print('begun', flush=True); import time; time.sleep(600)", wall_seconds=0.3)
    assert outcome.ended is Ended.WALL


@pytest.mark.slow
async def test_processes_together_are_held_to_the_cpu_limit(anywhere):
    outcome = await play("import os; os.fork()\nwhile True: pass", cpu_seconds=0.3)
    assert outcome.ended is Ended.CPU


@pytest.mark.slow
async def test_a_fork_bomb_ends_with_all_its_processes(anywhere):
    mark = "bomb" + os.urandom(8).hex()
    code = (
        "import os, subprocess, sys\n"
        "while True:\n"
        "    try:\n"
        "        os.fork()\n"
        "        sleeper = [sys.executable, '-c', 'import time; time.sleep(600)', '" + mark + "']\n"
        "        subprocess.Popen(sleeper, start_new_session=True)\n"
        "    except OSError: pass\n"
    )
    outcome = await play(code, wall_seconds=2.0, processes=16)
    assert outcome.ended in (Ended.WALL, Ended.CPU, Ended.PROCESSES)
    assert left_over(mark) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "x = []\nwhile True: x.append(b'y' * 10_000_000)",
        "import os\nfor _ in range(3): os.fork()\nx = b'y' * 30_000_000\nimport time; time.sleep(600)",
    ],
    ids=["one process", "eight of them"],
)
async def test_a_memory_bomb_ends(anywhere, code):
    outcome = await play(code, memory_bytes=120_000_000)
    assert outcome.ended is Ended.MEMORY or "MemoryError" in outcome.errors


async def test_signal_handlers_and_new_sessions_keep_nobody_alive(anywhere):
    mark = "stubborn" + os.urandom(8).hex()
    code = (
        "import os, signal, sys, time\n"
        "for number in set(range(1, 65)) - {signal.SIGCHLD}:\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('done')\n"
    )
    outcome = await play(code)
    assert outcome.output == "done\n"
    assert left_over(mark) == []


@pytest.mark.slow
async def test_zombies_do_not_keep_a_program_from_ending(anywhere):
    outcome = await play("import os\nfor _ in range(8):\n    if os.fork() == 0: os._exit(0)\nprint('done')")
    assert (outcome.ended, outcome.output) == (Ended.EXIT, "done\n")


@pytest.mark.slow
async def test_a_large_file_and_a_full_folder_are_the_programs_error():
    outcome = await play("open('f', 'wb').write(b'x' * 2_000_000)", file_bytes=1_000_000)
    assert "File too large" in outcome.errors


@pytest.mark.slow
@isolated
async def test_a_full_private_folder_is_the_programs_error():
    outcome = await play("for i in range(9): open(f'f{i}', 'wb').write(b'x' * 500_000)", disk_bytes=1_000_000)
    assert "No space left" in outcome.errors


@isolated
async def test_there_is_no_network_not_even_the_machines_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = await play(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert "Network is unreachable" in outcome.errors or "Connection refused" in outcome.errors


@isolated
async def test_the_machines_files_cannot_be_reached_by_links_or_paths(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("sesame")
    code = f"""
import os
def attempt(act):
    try: print('reached', act())
    except OSError as error: print(type(error).__name__)
os.symlink({str(secret)!r}, 'link')
attempt(lambda: open('link').read())
attempt(lambda: open('../' * 20 + {str(secret)[1:]!r}).read())
attempt(lambda: open('/proc/1/root' + {str(secret)!r}).read())
attempt(lambda: open('link', 'w').write('x'))
for path in ('/usr/owned', '/owned', '/etc/owned', '/bin/owned', '/work'):
    attempt(lambda: open(path, 'w'))
"""
    outcome = await play(code)
    assert outcome.errors == ""
    assert "reached" not in outcome.output
    assert len(outcome.output.splitlines()) == 9
    assert secret.read_text() == "sesame"


@pytest.mark.slow
@isolated
async def test_a_program_sees_no_process_but_its_own_and_no_variable_of_ours(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "sesame")
    outcome = await play(
        "import os; print(sorted(os.environ)); print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 4)"
    )
    assert outcome.output == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR']\nTrue\n"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\0b"])
async def test_a_file_outside_the_private_folder_is_refused(name):
    with pytest.raises(ValueError, match="private folder"):
        await run(Program(["/bin/true"], {name: ""}), limits())


@pytest.mark.parametrize("files", [{"main.py": "print('\ud83d')"}, {"\ud83d": ""}])
async def test_a_file_that_cannot_be_written_is_its_authors_mistake(files):
    with pytest.raises(ValueError, match="half of a character"):
        await run(Program(["/bin/true"], files), limits())


@pytest.mark.slow
async def test_cancelling_ends_the_program_and_removes_its_folder(anywhere, tmp_path):
    before, mark = boxes(), "cancel" + os.urandom(8).hex()
    program = sleeper(mark)
    task = asyncio.create_task(run(program, limits()))
    async with asyncio.timeout(60):
        while not left_over(mark):
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left_over(mark) == []
    assert boxes() <= before


async def test_the_end_of_whoever_waits_ends_the_program(anywhere):
    """As if the worker had been killed: the pipe that the jail reads is closed, and nothing else happens."""
    mark = "orphan" + os.urandom(8).hex()
    program = sleeper(mark)
    task = asyncio.create_task(run(program, limits()))
    async with asyncio.timeout(60):
        while not left_over(mark):
            await asyncio.sleep(0.02)
        (jail,) = [pid for pid in left_over("jail.py") if parent_of(int(pid)) == os.getpid()]
        os.kill(int(jail), 9)
        while anywhere and left_over(mark):
            await asyncio.sleep(0.02)
    if not anywhere:
        for pid in left_over(mark):
            os.kill(int(pid), 9)
    assert (await task).ended is Ended.WALL


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_machine_without_namespaces_refuses_where_isolation_is_required(monkeypatch):
    monkeypatch.setattr(sandbox, "namespaces_available", lambda: False)
    with pytest.raises(EpisodeError, match="if_available") as caught:
        await run(python_program(""), Limits())
    assert caught.value.failure.kind is FailureKind.TOOL


@isolated
@pytest.mark.slow
async def test_many_at_once_all_end_and_leave_no_thread_and_no_folder():
    before, threads = boxes(), threading.active_count()
    codes = ["print('good')", "while True: pass", "import os; os.kill(0, 9)", "import time; time.sleep(600)"] * 5
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(play(code, wall_seconds=6.0, cpu_seconds=0.2)) for code in codes]
    assert all(task.result().ended in set(Ended) for task in tasks)
    assert [task.result().output for task in tasks[::4]] == ["good\n"] * 5
    assert boxes() <= before
    assert threading.active_count() <= threads + 2


async def test_a_jail_whose_starter_died_while_it_told_what_to_run_ends():
    told, tell = os.pipe()
    jail = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(sandbox._JAIL), str(tell), stdin=asyncio.subprocess.PIPE, pass_fds=(tell,)
    )
    os.close(tell)
    jail.stdin.write((100_000).to_bytes(8, "little") + b"{")
    jail.stdin.close()
    async with asyncio.timeout(20):
        await jail.wait()
    assert os.read(told, 100) == b""
    os.close(told)


def test_a_program_that_its_jail_gave_up_late_has_used_up_its_time():
    outcome = sandbox._outcome({"killed": "abandoned"}, "", "", True)
    assert outcome.ended is Ended.WALL


NO_NAMESPACE = """
import ctypes, os
LIBC = ctypes.CDLL(None, use_errno=True)
print(LIBC.unshare(0x10000000 | 0x20000), ctypes.get_errno())
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
print(LIBC.syscall(number, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())
"""
NO_HIDDEN_MEMORY = """
import ctypes, os
LIBC = ctypes.CDLL(None, use_errno=True)
print(LIBC.memfd_create(b"x", 0), ctypes.get_errno())
print(LIBC.shmget(0, 4096, 0o1600), ctypes.get_errno())
"""


@pytest.mark.parametrize("code", [NO_NAMESPACE, NO_HIDDEN_MEMORY], ids=["namespaces", "memory"])
async def test_calls_that_lead_around_the_limits_are_not_there(anywhere, code):
    outcome = await play(code)
    assert (outcome.ended, outcome.output) == (Ended.EXIT, "-1 38\n-1 38\n")


async def test_threads_and_programs_of_a_program_run_as_ever(anywhere):
    code = "import subprocess, threading, sys\nt = threading.Thread(target=print, args=[1]); t.start(); t.join()\n"
    outcome = await play(code + "subprocess.run([sys.executable, '-c', 'print(2)'])")
    assert sorted(outcome.output.split()) == ["1", "2"]


async def test_cpu_time_of_children_that_nobody_waits_for_counts(anywhere):
    code = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(200):
    if os.fork() == 0:
        while time.process_time() < 0.3: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
    assert (await play(code, cpu_seconds=1.0)).ended is Ended.CPU
