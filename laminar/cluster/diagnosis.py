"""When no step ends for too long: who waits for what, written down before the run stops.

The text is put together by a pure function; gathering has deadlines, for whatever hangs may hang the gathering.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from redis.asyncio import Redis

from laminar.errors import ExperienceError
from laminar.experience.answers import Snapshot
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.store import ExperienceStore
from laminar.run_folder import RunFolder
from laminar.telemetry.clock import SILENT_SECONDS
from laminar.telemetry.view import RunView
from laminar.types import GroupState

STACK_SECONDS = 10.0
SNAPSHOT_SECONDS = 5.0
MAX_GROUPS, MAX_LINES = 10, 15
STAMP_LENGTH = len("2026-01-01 00:00:00,000")
SERIOUS = (" WARNING ", " ERROR ", " CRITICAL ")


async def diagnose(folder: RunFolder, client: Redis, run_id: str, view: RunView, limit_seconds: float) -> Path:
    """Write `logs/diagnosis-TIME.txt`; returns it.

    Raises:
        OSError: it cannot be written.
    """
    snapshot = None
    try:
        async with asyncio.timeout(SNAPSHOT_SECONDS):
            snapshot = await ExperienceBuffer(ExperienceStore(client, run_id, outage_seconds=SNAPSHOT_SECONDS)).peek()
    except (TimeoutError, ExperienceError):
        pass  # that it does not answer is a finding, and is written down
    pids = folder.read_state().roles
    stacks = await asyncio.to_thread(lambda: {role: stack_of(pid) for role, pid in pids.items()})
    text = describe(view, snapshot, last_errors(folder.logs), stacks, limit_seconds, time.time())
    path = folder.logs / time.strftime("diagnosis-%Y%m%d-%H%M%S.txt")
    path.write_text(text)
    return path


def describe(
    view: RunView,
    snapshot: Snapshot | None,
    errors: Sequence[str],
    stacks: Mapping[str, str],
    limit_seconds: float,
    now: float,
) -> str:
    """The diagnosis (pure).

    Args:
        view: what the roles said last.
        snapshot: of the buffer; None if the data module does not answer.
        errors: the last serious lines of the logs.
        stacks: of each role's process; empty where they cannot be seen.
        limit_seconds: how long no step has ended.
        now: Unix seconds.
    """
    lines = [
        f"No step ended for {limit_seconds:g} s (run.no_progress_seconds). The last one was step {view.step}.",
        "",
        f"The trainer waits for: {view.trainer_wait or 'nothing that it named'}",
        "",
        "Roles, and the state in which each has spent most of its time so far:",
        *(
            f"  {role}: {_main_state(metrics)}{_silence(now - view.heard_at.get(role, now))}"
            for role, metrics in sorted(view.roles.items())
        ),
        "",
        *_describe_buffer(snapshot),
        "",
        "Last notices:",
        *(f"  {notice}" for notice in view.notices[-MAX_LINES:]),
        "",
        "Last warnings and errors of the logs:",
        *(f"  {line}" for line in errors),
    ]
    for role, stack in sorted(stacks.items()):
        lines += [
            "",
            f"Stack of {role}:",
            *(f"  {line}" for line in (stack or "not to be seen (py-spy is not installed, or may not look)").splitlines()),
        ]
    return "\n".join(lines) + "\n"


def _main_state(metrics: Mapping[str, float]) -> str:
    spent = {name: value for name, value in metrics.items() if name.startswith("time/state_")}
    if not spent:
        return "unknown"
    name = max(spent, key=lambda state: spent[state])
    return f"{name.removeprefix('time/state_').removesuffix('_seconds')} ({spent[name]:.0f} of {sum(spent.values()):.0f} s)"


def _silence(seconds: float) -> str:
    """What a role that should have reported long since is suspected of."""
    return f"; SILENT for {seconds:.0f} s: it hangs, is stopped or is gone" if seconds > SILENT_SECONDS else ""


def _describe_buffer(snapshot: Snapshot | None) -> list[str]:
    if snapshot is None:
        return ["The data module does not answer."]
    states = {state: [header for header in snapshot.headers if header.state is state] for state in GroupState}
    oldest = sorted(states[GroupState.IN_FLIGHT], key=lambda header: header.admission)[:MAX_GROUPS]
    return [
        f"Published {snapshot.published}; "
        + ", ".join(f"{len(headers)} groups {state.value}" for state, headers in states.items())
        + f"; {snapshot.reserved_bytes} bytes reserved; {'paused' if snapshot.is_paused else 'admitting'}.",
        "Oldest groups in flight (whose leases are renewed by their owners):",
        *(f"  {header.group_id}: owner {header.owner or 'none'}, oldest version {header.oldest}" for header in oldest),
        f"Claims refused so far: {snapshot.counters.refused_claims or 'none'}.",
        f"Failures so far: {snapshot.counters.failed or 'none'}.",
    ]


def last_errors(logs: Path) -> list[str]:
    """The last serious lines of all logs, by their stamps."""
    found = [
        (line[:STAMP_LENGTH], f"{file.stem}: {line}")
        for file in logs.glob("*.log")
        for line in file.read_text(errors="replace").splitlines()
        if any(word in line for word in SERIOUS)
    ]
    return [line for _, line in sorted(found)[-MAX_LINES:]]


def stack_of(pid: int) -> str:
    """The Python stack of a process, by py-spy; empty where that is not installed or not allowed."""
    beside = str(Path(sys.executable).parent)  # an environment that is used without being activated is not on the path
    program = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        return ""
    for option in ("--full-filenames", "--nonblocking"):  # a process that is stopped cannot be stopped once more
        command = [program, "dump", option, "--pid", str(pid)]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=STACK_SECONDS, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
    return ""
