"""SGLang's process tree: no secret in sight, no survivor."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from laminar.types import WeightVersion
from rollout.engines.launch import EngineLaunch
from rollout.engines.process import EngineProcess
from rollout.engines.tiny_model import write_tiny_model

PYTHON = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
TOKEN = "b58a4f0e6d934c27"

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make sglang-cpu`")]


async def start(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    log = tmp_path / "engine.log"
    launch = EngineLaunch(model, WeightVersion(0, 0), TOKEN, "run-1", log, kind="sglang", python=str(PYTHON))
    process = EngineProcess(launch)
    await process.start(400)
    return process, log


async def all_gone(processes):
    return await asyncio.to_thread(psutil.wait_procs, processes, 20)


async def test_a_dead_scheduler_ends_the_whole_engine_and_its_token_is_nowhere_to_be_read(tmp_path):
    process, log = await start(tmp_path)
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert all(TOKEN not in " ".join(member.cmdline()) for member in tree)
        assert "server_args" in log.read_text()
        assert TOKEN not in log.read_text()
        (scheduler,) = [member for member in tree if "sglang::scheduler" in " ".join(member.cmdline())]
        scheduler.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), 60) != 0
        assert (await all_gone(tree[1:]))[1] == []
    finally:
        await process.kill()


async def test_the_whole_tree_dies_when_the_launcher_is_killed(tmp_path):
    process, _ = await start(tmp_path)
    tree = psutil.Process(process.pid).children(recursive=True)
    assert len(tree) >= 2
    psutil.Process(process.pid).kill()
    await process.wait()
    assert (await all_gone(tree))[1] == []
