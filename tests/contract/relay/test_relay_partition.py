"""A machine that is cut off in the middle of a broadcast, without a broken connection to tell of it.

Three machines in network namespaces of their own, real relay processes between them. Their heartbeats pass (Redis is reached
by its Unix socket), so the others go on seeing the machine that is cut off as alive.
"""

import os
import shutil
import subprocess
import time

import pytest
import torch

from benchmarks.machines import simulated_machines
from benchmarks.relay_nodes import running_chain
from laminar.types import WeightVersion

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_VALUES = 2_000_000
BYTES_PER_SECOND = 4e6
"""8 MB take two seconds a hop: the cut comes in between."""


@pytest.fixture
def machines():
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, ip and tc")
    try:
        with simulated_machines(3, BYTES_PER_SECOND) as machines:
            yield machines
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def wait_for(store, version: WeightVersion, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while store.newest() != version:
        assert time.monotonic() < deadline, f"{store.folder} holds {store.newest()}, not {version}"
        time.sleep(0.01)


def test_a_machine_that_is_cut_off_is_left_out_and_catches_up_when_it_is_back(machines):
    with running_chain([("a", torch.ones(NUM_VALUES))], 2, machines=machines) as chain:
        chain.publish()
        machines.set_cable(1, plugged=False)
        wait_for(chain.stores[2], WeightVersion(0, 2))
        machines.set_cable(1, plugged=True)
        chain.publish()
        for store in chain.stores:
            wait_for(store, WeightVersion(0, 3))
