"""However Ray says that a role has gone, it is an error of ours, so that the role is started again."""

import asyncio
from types import SimpleNamespace

import pytest
import ray.exceptions

from laminar.cluster.ray_cluster import RoleDiedError, RoleProcess
from laminar.errors import LaminarError


class Actor:
    """Answers every call with the same error, as a Ray actor does."""

    def __init__(self, error):
        self.error = error
        self.call = self.whereabouts = SimpleNamespace(remote=self.fail)

    def fail(self, *arguments):
        future = asyncio.get_running_loop().create_future()
        future.set_exception(self.error)
        return future


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError("killed for memory"),
        ray.exceptions.ActorUnschedulableError("its machine has left"),
        ray.exceptions.RayActorError(),
        ray.exceptions.RuntimeEnvSetupError("no such variable"),
    ],
)
async def test_what_ray_says_of_a_process_that_went_is_told_as_its_end(error):
    process = object.__new__(RoleProcess)
    process.spec, process._actor = SimpleNamespace(name="rollout-1", num_cpus=1.0, num_gpus=0.0), Actor(error)
    with pytest.raises(RoleDiedError, match="the process of rollout-1 ended"):
        await process.call("run")
    with pytest.raises(RoleDiedError, match="the process of rollout-1 did not start"):
        await process.place(5.0)
    assert issubclass(RoleDiedError, LaminarError)
