"""Several machines, simulated by raylets on this one: a store and a relay each, weights travel between them.

The relays are on one host and so pass pieces by shared memory; `tests/contract/relay` has the same faults by TCP.
"""

import os
import signal
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from relay.store import VersionStore

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OBJECT_STORE_BYTES = 80 * 1024**2


@pytest.fixture
def cluster():
    """Three nodes with one CPU each: the trainer's, and one for each worker."""
    settings = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    yield cluster
    cluster.shutdown()


def stores_of(run) -> dict[str, list[str]]:
    """Node id -> versions, of every store of a run."""
    prefix = f"laminar-{run.folder.path.name}-"
    names = [path.name.removeprefix(prefix) for path in Path("/dev/shm").glob(f"{prefix}*")]
    return {name: [str(v) for v in VersionStore(Path("/dev/shm"), run.folder.path.name, name).versions()] for name in names}


def test_weights_reach_workers_on_other_machines_and_a_killed_relay_is_replaced(start, cluster):
    run = start(
        f"cluster.ray_address={cluster.address}", "rollout.num_workers=2", "run.max_steps=100000", "eval.at_start=false",
        "eval.at_end=false", "trainer.algorithm.options.filter_zero_variance=false",
    )  # fmt: skip
    run.wait_for_step(2)
    run.wait_until(lambda: len(list(filter(None, stores_of(run).values()))) == 3, "a version on every machine", 120.0)
    victim = run.role_pid("relay-1")
    os.kill(victim, signal.SIGKILL)
    run.wait_until(lambda: run.role_pid("relay-1") != victim, "the relay to be started again", 60.0)
    run.wait_for_step(run.lines()[-1]["step"] + 4)
    run.process.terminate()
    assert run.wait(60) == 130, run.text()
    assert max(line["staleness/versions_max"] for line in run.lines()) <= 1
    assert "relay-1: the process of relay-1 ended; restarting it (1)" in run.text()
    run.wait_until_gone(10)
