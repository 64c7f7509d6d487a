"""A whole run on given machines, on paper: who goes where, what each place must hold, and what does not fit (pure)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from laminar.cluster.roles import rollout_spec, trainer_specs
from laminar.config.root import LaminarConfig
from laminar.config.sizes import is_one_machine, longest_row_tokens, peak_buffer_bytes
from laminar.dry_run.machines import Machine
from laminar.dry_run.memory import cache_capacity_tokens
from laminar.dry_run.parts import (
    CONTEXT_BYTES,
    ROLE_PROGRAM_BYTES,
    Model,
    Part,
    cache_bytes_per_token,
    engine_parts,
    relay_part,
    trainer_parts,
)
from laminar.dry_run.placement import Placed, place

USABLE = 0.95
"""Share of a GPU's memory that can be filled before its allocator fails for want of one piece."""
RAY_BYTES = 800_000_000
DRIVER_ROLES = ("supervisor", "observer", "dashboard", "manager")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where bytes are: `host` memory of a machine, its `shared` memory (which is host memory too), or one `device`."""

    machine: int
    kind: str
    device: int = 0

    def __str__(self) -> str:
        """For people."""
        what = {"device": f"GPU {self.device}", "host": "memory", "shared": "shared memory"}[self.kind]
        return f"{what} of machine {self.machine}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be started.

    Attributes:
        placed: trainer ranks and workers.
        parts: by place; empty if the model is not known.
        capacity: bytes that each place can hold.
        cache_tokens: of one replica: what the config asks for, and on a GPU what would fit beside all else.
    """

    machines: tuple[Machine, ...]
    placed: tuple[Placed, ...]
    parts: Mapping[Place, Sequence[Part]]
    capacity: Mapping[Place, int]
    cache_tokens: tuple[int, int | None] | None

    def needed(self, where: Place) -> int:
        """Bytes that a place must hold."""
        return sum(part.num_bytes for part in self.parts.get(where, ()))

    def faults(self) -> list[str]:
        """One sentence for each place that is too small, with the largest part that can be made smaller."""
        return [self._fault(where) for where in sorted(self.parts) if self.needed(where) > self.capacity[where]]

    def _fault(self, where: Place) -> str:
        largest = max((part for part in self.parts[where] if part.remedy), key=lambda part: part.num_bytes)
        return (
            f"{where} can hold {gigabytes(self.capacity[where])}, and {gigabytes(self.needed(where))} are needed: the most "
            f"by {largest.owner}, {largest.what}, {gigabytes(largest.num_bytes)}; {largest.remedy}"
        )


def make_plan(config: LaminarConfig, machines: Sequence[Machine], model: Model | None) -> Plan:
    """Place every role and add up what it takes.

    Args:
        config: the run's settings.
        machines: the first is the driver's.
        model: None if its files are not here: then only places are told.

    Raises:
        EnvironmentSetupError: there is no room for a role.
    """
    roles = [*trainer_specs(config, "dry"), *(rollout_spec(config, i) for i in range(config.rollout.num_workers))]
    placed = place(roles, machines, is_local=is_one_machine(config))
    parts = {} if model is None else _parts(config, model, placed)
    capacity: dict[Place, int] = {}
    for number, machine in enumerate(machines):
        capacity |= {Place(number, "host"): machine.host_bytes, Place(number, "shared"): machine.shared_bytes}
        capacity |= {Place(number, "device", d): int(machine.gpu_bytes * USABLE) for d in range(machine.num_gpus)}
    plan = Plan(tuple(machines), tuple(placed), parts, capacity, None)
    if model is None or config.rollout.engine.kind == "emulated":
        return plan
    return replace(plan, cache_tokens=(config.rollout.engine.max_cached_tokens, _room(plan, config, model)))


def _parts(config: LaminarConfig, model: Model, placed: Iterable[Placed]) -> dict[Place, list[Part]]:
    found: defaultdict[Place, list[Part]] = defaultdict(list)
    driver = found[Place(0, "host")]
    driver.append(Part("Ray", "its own processes", RAY_BYTES))
    driver += [Part(role, "programs", ROLE_PROGRAM_BYTES) for role in _driver_roles(config)]
    if config.experience.redis_url == "embedded":
        driver.append(Part("data module", "full buffer", peak_buffer_bytes(config), "lower experience.max_bytes"))
    used = set()
    for role in placed:
        used.add(role.machine)
        make = trainer_parts if role.name.startswith("trainer-") else engine_parts
        devices = [Place(role.machine, "device", device) for device in role.devices]
        host = Place(role.machine, "host")
        for part in make(role.name, config, model):
            for where in [host] if part.is_host or not devices else devices:
                found[where].append(part)
        for where in devices:
            found[where].append(Part(role.name, "driver context", CONTEXT_BYTES))
    for machine in used:
        part = relay_part(machine, config, model)
        found[Place(machine, "shared")].append(part)
        found[Place(machine, "host")] += [part, Part(f"relay-{machine}", "programs", ROLE_PROGRAM_BYTES)]
    return dict(found)


def _room(plan: Plan, config: LaminarConfig, model: Model) -> int | None:
    """Tokens that the tightest replica could cache if it took what is left of its devices; None on a CPU."""
    rooms = []
    for role in plan.placed:
        if not role.name.startswith("rollout-"):
            continue
        for device in role.devices:
            where = Place(role.machine, "device", device)
            others = sum(
                p.num_bytes for p in plan.parts[where] if not (p.owner == role.name and p.what == "key-value cache")
            )
            rooms.append(cache_capacity_tokens(plan.capacity[where], others, cache_bytes_per_token(config, model)))
    return min(rooms, default=None)


def describe(plan: Plan, config: LaminarConfig) -> str:
    """The plan for people."""
    lines = ["Placement"]
    for number, machine in enumerate(plan.machines):
        gpus = f", {machine.num_gpus} GPUs of {gigabytes(machine.gpu_bytes)}" if machine.num_gpus else ", no GPU"
        lines.append(
            f"  machine {number}: {machine.num_cores} cores, {gigabytes(machine.host_bytes)} of memory, "
            f"{gigabytes(machine.shared_bytes)} of it shared memory at most{gpus}"
        )
        lines += [f"    {text}" for text in _roles_on(number, plan, config)]
    if not plan.parts:
        return "\n".join([*lines, "", f"Memory: the files of {config.model.path} are not here, so it cannot be estimated."])
    lines += ["", "Memory, estimated at its peak"]
    for where in sorted(plan.parts):
        lines.append(f"  {where}: {gigabytes(plan.needed(where))} of {gigabytes(plan.capacity[where])}")
        lines += [
            f"    {gigabytes(part.num_bytes):>9}  {part.owner}: {part.what}"
            for part in sorted(plan.parts[where], key=lambda part: -part.num_bytes)
            if part.num_bytes
        ]
    if plan.cache_tokens is not None:
        asked, room = plan.cache_tokens
        longest = longest_row_tokens(config)
        fits = "" if room is None else f"; at most {room} would fit beside the rest"
        lines += [
            "",
            f"Key-value cache of a replica: {asked} tokens, {asked // longest} trajectories of the longest kind ({longest} "
            f"tokens){fits}",
        ]
    return "\n".join(lines)


def _roles_on(machine: int, plan: Plan, config: LaminarConfig) -> list[str]:
    placed = [role for role in plan.placed if role.machine == machine]
    lines = [
        role.name + (f" on GPU {', '.join(map(str, role.devices))}" if role.devices else " on the CPU") for role in placed
    ]
    if placed:
        lines.append(f"relay-{machine}")
    if machine == 0:
        data = ["data module"] if config.experience.redis_url == "embedded" else []
        lines.append(", ".join([*_driver_roles(config), *data]))
    return lines


def _driver_roles(config: LaminarConfig) -> list[str]:
    unwanted = set() if config.dashboard.enabled else {"dashboard"}
    if not config.rollout.wants_manager(config.rollout.num_workers):
        unwanted.add("manager")
    return [role for role in DRIVER_ROLES if role not in unwanted]


def gigabytes(number: float) -> str:
    """`1.5 GB`, or `1.5 MB` of what would be 0.0 GB."""
    return f"{number / 1e9:.1f} GB" if number >= 5e7 else f"{number / 1e6:.1f} MB"
