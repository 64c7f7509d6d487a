"""What a role is: a name, the class that plays it (by import string), what it needs from Ray, and its surroundings.

The supervisor names roles, it does not import them. A role class takes `(context, config, **arguments)` and has three
coroutine methods: `start` (ready when it returns), `run` (returns when its work is done) and `stop` (asks `run` to return).
Trainer ranks have a fourth, `restore`, between `start` and `run`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laminar.allocator import KEEP_ALL
from laminar.config.root import LaminarConfig

RUN_ID_VARIABLE = "LAMINAR_RUN_ID"
"""Marks every process of a run in its environment; leftovers are found by it, never by name."""


@dataclass(frozen=True, slots=True)
class RoleContext:
    """The surroundings of one role process.

    Attributes:
        role: its name, such as `rollout-1`.
        token: secret shared by all processes of the run; every handshake carries it.
        run_folder: the run's folder.
        node_id: the machine, as Ray names it (shortened).
        node_address: where other machines reach this one.
    """

    role: str
    run_id: str
    token: str
    redis_url: str
    run_folder: Path
    node_id: str = ""
    node_address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to start one role.

    Attributes:
        target: import string, `"package.module:Class"`.
        arguments: keyword arguments of the class, besides context and config.
        num_cpus: CPUs that Ray sets aside; control roles take 0.
        num_threads: threads its numeric libraries may use.
        environment: further environment variables.
        node_id: the machine to be placed on, as Ray names it; empty: any.
        is_wish: whether another machine will do if that one has no room.
    """

    name: str
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    num_cpus: float = 0
    num_gpus: float = 0
    num_threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    node_id: str = ""
    is_wish: bool = False


def relay_spec(index: int, node_id: str, *, is_master: bool, num_gpus: float = 0) -> RoleSpec:
    """The relay of one machine."""
    arguments = {"is_master": is_master}
    return RoleSpec(f"relay-{index}", "relay.role:RelayRole", arguments, num_gpus=num_gpus, node_id=node_id)


def trainer_specs(config: LaminarConfig, meeting: str, master_node: str = "") -> list[RoleSpec]:
    """All trainer ranks of one life.

    Args:
        config: the run's settings.
        meeting: names their rendezvous, new for every life.
        master_node: where rank 0 was in the last life; the weights of the run are there, so it stays if it can.
    """
    trainer = config.trainer
    return [
        RoleSpec(
            f"trainer-{rank}",
            "trainer.worker:TrainerRank",
            {"rank": rank, "meeting": meeting},
            num_cpus=trainer.num_threads,
            num_gpus=trainer.num_gpus_per_rank,
            num_threads=trainer.num_threads,
            environment={} if trainer.num_gpus_per_rank else {"DS_ACCELERATOR": "cpu", **KEEP_ALL},
            node_id=master_node if rank == 0 else "",
            is_wish=True,
        )
        for rank in range(trainer.num_ranks)
    ]


def rollout_spec(config: LaminarConfig, index: int) -> RoleSpec:
    """One rollout worker and, below it, its engine process."""
    engine = config.rollout.engine
    return RoleSpec(
        f"rollout-{index}",
        "rollout.worker:RolloutWorker",
        num_cpus=engine.num_threads,
        num_gpus=engine.num_gpus,
        num_threads=1,
    )


def manager_spec() -> RoleSpec:
    """The rollout manager."""
    return RoleSpec("manager", "rollout.manager:RolloutManager")


def cpus_needed(config: LaminarConfig) -> int:
    """CPUs that Ray must offer for all roles to be placed."""
    return (
        config.trainer.num_ranks * config.trainer.num_threads
        + config.rollout.num_workers * config.rollout.engine.num_threads
    )
