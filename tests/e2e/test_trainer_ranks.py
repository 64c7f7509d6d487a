"""Whole runs with two trainer ranks under ZeRO 3: killed, resumed on one rank, on two machines."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TWO_RANKS = (
    "trainer.num_ranks=2", "trainer.deepspeed.zero_stage=3", "trainer.deepspeed.max_whole_parameter=0",
    "trainer.algorithm.options.filter_zero_variance=false", "eval.at_start=false", "eval.at_end=false",
)  # fmt: skip
OBJECT_STORE_BYTES = 80 * 1024**2


def raylet_of(pid: int) -> int:
    """The process that a Ray worker is a child of: one for each node."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_second_rank_takes_the_group_along_and_the_run_resumes_on_one_rank(start):
    run = start("run.max_steps=12", "checkpoint.every_steps=4", "rollout.lease_seconds=4", *TWO_RANKS)
    run.wait_for_step(5)
    ranks = [run.role_pid(f"trainer-{rank}") for rank in range(2)]
    os.kill(ranks[1], signal.SIGKILL)
    run.wait_for_step(8)
    assert not {run.role_pid(f"trainer-{rank}") for rank in range(2)} & set(ranks)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    stopped_at = run.lines()[-1]["step"]
    shares = sorted(path.name for path in run.folder.checkpoints.glob(f"step_{stopped_at:06d}/optimizer_*"))
    assert shares == ["optimizer_000.safetensors", "optimizer_001.safetensors"]
    resumed = start("trainer.num_ranks=1", resume=run.folder.path)
    assert resumed.wait(240) == 0, resumed.text()
    assert [line["step"] for line in resumed.lines()] == list(range(1, 13))
    assert max(line["staleness/versions_max"] for line in resumed.lines()) <= 1
    assert resumed.leftovers() == []


def test_ranks_on_two_machines_train_together_and_restart_together(start):
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        run = start(f"cluster.ray_address={cluster.address}", "run.max_steps=100000", *TWO_RANKS)
        run.wait_for_step(2)
        ranks = [run.role_pid(f"trainer-{rank}") for rank in range(2)]
        assert len({raylet_of(pid) for pid in ranks}) == 2
        os.kill(ranks[1], signal.SIGKILL)
        run.wait_until(
            lambda: not {run.role_pid(f"trainer-{rank}") for rank in range(2)} & set(ranks), "both ranks again", 120.0
        )
        run.wait_for_step(run.lines()[-1]["step"] + 3)
        run.process.terminate()
        assert run.wait(90) == 130, run.text()
        run.wait_until_gone(10)
    finally:
        cluster.shutdown()
