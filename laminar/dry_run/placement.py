"""Which machine and which devices each role gets, by the needs that Ray is told of (pure).

Ray fills the first machine on which a role fits before it goes to the next; a share of a GPU comes from one device, whole
GPUs from one machine. A run on a cluster may be placed in another order where others use the cluster too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar.cluster.roles import RoleSpec
from laminar.dry_run.machines import Machine
from laminar.errors import EnvironmentSetupError

TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Placed:
    """One role in its place; `devices` are numbers of the machine's GPUs."""

    name: str
    machine: int
    devices: tuple[int, ...] = ()


@dataclass(slots=True)
class _Room:
    """What is left of one machine."""

    cpus: float
    gpus: list[float] = field(default_factory=list)

    def devices_for(self, num_gpus: float) -> tuple[int, ...] | None:
        """Devices for so many GPUs; None if there is no room."""
        if num_gpus <= 0:
            return ()
        share = num_gpus if num_gpus < 1 else 1.0
        fitting = [number for number, left in enumerate(self.gpus) if left + TINY >= share]
        count = max(1, math.ceil(num_gpus - TINY))
        return tuple(fitting[:count]) if len(fitting) >= count else None


def place(roles: Sequence[RoleSpec], machines: Sequence[Machine], *, is_local: bool) -> list[Placed]:
    """Find room for all roles, in the order in which they are started.

    Args:
        roles: with the CPUs and GPUs that Ray is told.
        machines: the first is the driver's.
        is_local: Ray is started for this run alone: its CPUs are numbers, only GPUs limit.

    Raises:
        EnvironmentSetupError: there is no room for a role.
    """
    rooms = [_Room(math.inf if is_local else m.num_cores, [1.0] * m.num_gpus) for m in machines]
    return [_place_one(role, rooms, machines) for role in roles]


def _place_one(role: RoleSpec, rooms: Sequence[_Room], machines: Sequence[Machine]) -> Placed:
    for number, room in enumerate(rooms):
        devices = room.devices_for(role.num_gpus)
        if devices is not None and room.cpus + TINY >= role.num_cpus:
            room.cpus -= role.num_cpus
            for device in devices:
                room.gpus[device] -= min(1.0, role.num_gpus)
            return Placed(role.name, number, devices)
    free_cpus = ", ".join("any number of" if math.isinf(room.cpus) else f"{room.cpus:g}" for room in rooms)
    free_gpus = ", ".join(f"{sum(room.gpus):g}" for room in rooms)
    raise EnvironmentSetupError(
        f"{role.name} needs {role.num_cpus:g} CPUs and {role.num_gpus:g} GPUs, and there is no room: {len(machines)} "
        f"machine(s) have {free_cpus} CPUs and {free_gpus} GPUs left; lower the number of workers or ranks, or the GPUs of "
        "each, or add machines"
    )
