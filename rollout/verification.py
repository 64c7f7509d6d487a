"""Whether an engine holds the weights it should: the version's name, what each rank reads back, and a log-prob probe.

Names and shapes were checked before (`engines/weights_file.py`, `engines/torch_model.py`). A verdict against the weights
means that they are unknown: whoever asked kills the engine and starts it anew. What cannot be checked (an engine that does
not read back, a version without a probe) is not held against it.
It does not know what is done about a verdict, or when.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from laminar.types import WeightVersion
from relay.manifest import Manifest
from relay.probe import default_tolerance
from relay.store import MANIFEST_NAME
from rollout.engines.client import EngineClient

logger = logging.getLogger("laminar.rollout.verification")


class Check(StrEnum):
    """What a verdict rests on."""

    ANSWER = "answer"
    """The engine refused, or did not answer."""
    VERSION = "version"
    RANKS = "ranks"
    PROBE = "probe"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about an engine's weights.

    Attributes:
        version: what it should hold.
        check: the one that failed, or the last one; `ALL` if everything that can be checked holds.
        reason: why the weights count as unknown; empty if they are as they should be.
        difference: mean absolute difference of the probe's log-probs to the trainer's, in nats; None if not probed.
    """

    version: WeightVersion
    check: Check
    reason: str = ""
    difference: float | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the engine holds what it should."""
        return not self.reason


async def check_held(client: EngineClient, version: WeightVersion) -> Verdict:
    """Ask for the version's name, and each rank for what it holds; possible during a pause.

    Raises:
        EngineError, DeadlineError: the engine does not answer, or says that it does not know.
    """
    held = await client.weight_version()
    if held != version:
        return Verdict(version, Check.VERSION, f"the engine should hold {version} but says it holds {held}")
    for report in await client.rank_reports():
        if report.version != str(version):
            return Verdict(version, Check.RANKS, f"rank {report.rank} holds {report.version} instead of {version}")
        if report.problem:
            return Verdict(version, Check.RANKS, f"rank {report.rank} read {version} back: {report.problem}")
    return Verdict(version, Check.RANKS)


async def check_probe(client: EngineClient, folder: Path, version: WeightVersion, tolerance: float | None) -> Verdict:
    """Compare the engine's log-probs of the version's probe with the trainer's; not during a pause.

    Args:
        client: of the engine.
        folder: the version's, leased.
        version: what the engine should hold.
        tolerance: mean difference in nats that is accepted; None: `default_tolerance` of the weights' types.

    Raises:
        EngineError, DeadlineError: the engine does not answer.
    """
    path = folder / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_text()) if path.is_file() else None
    if manifest is None or manifest.probe is None:
        return Verdict(version, Check.ALL)
    scored_by, logprobs = await client.score(manifest.probe.token_ids)
    if scored_by != version:
        return Verdict(version, Check.PROBE, f"the probe of {version} was answered by {scored_by}")
    difference = manifest.probe.difference(logprobs)
    limit = default_tolerance(spec.dtype for spec in manifest.tensors.values()) if tolerance is None else tolerance
    if difference <= limit:
        return Verdict(version, Check.ALL, difference=difference)
    reason = (
        f"log-probs of the probe of {version} differ from the trainer's by {difference:.3g} nats a token, above {limit:g} "
        "(rollout.engine.probe_tolerance): the weights are damaged, or engine and trainer compute differently"
    )
    return Verdict(version, Check.PROBE, reason, difference)


async def verify(client: EngineClient, folder: Path, version: WeightVersion, tolerance: float | None) -> Verdict:
    """Every check there is, of an engine that is not paused; see `check_held` and `check_probe`."""
    held = await check_held(client, version)
    return await check_probe(client, folder, version, tolerance) if held.is_accepted else held
