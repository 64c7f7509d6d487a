"""The sender's half of `weight_load = "pinned"`: asks every rank to load a slot, and reads what each says of it.

The ranks' half is `ranks/laminar_weights.py`. It does not know HTTP or torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from laminar.errors import EngineError, reason
from laminar.types import WeightVersion
from rollout.engines.wire import RankReport

LOADER = "laminar_weights.load"
RANKS_FOLDER = Path(__file__).with_name("ranks")
_EMPTY_PAYLOAD = "gARdLg=="
"""An empty list in the form that SGLang reads payloads in (a constant: nothing is pickled here)."""


@dataclass(frozen=True, slots=True)
class PinnedLoad:
    """How one engine's ranks are asked.

    Attributes:
        request: the file that the engine was started with.
        num_ranks: tensor-parallel ranks.
    """

    request: Path
    num_ranks: int

    def ask(self, folder: Path, version: WeightVersion) -> None:
        """Say what is to be loaded; what was said of earlier versions is removed."""
        for rank in range(self.num_ranks):
            self._receipt(rank).unlink(missing_ok=True)
        hidden = self.request.with_suffix(".partial")
        hidden.write_text(json.dumps({"folder": str(folder), "version": str(version)}))
        hidden.rename(self.request)

    def body(self, version: WeightVersion, *, flush_cache: bool) -> dict[str, Any]:
        """The body of `/update_weights_from_tensor`."""
        return {
            "serialized_named_tensors": [_EMPTY_PAYLOAD] * self.num_ranks,
            "load_format": LOADER,
            "flush_cache": flush_cache,
            "weight_version": str(version),
        }

    def reports(self) -> list[RankReport]:
        """What each rank said last.

        Raises:
            EngineError: naming a rank that has said nothing.
        """
        return [self._read(rank) for rank in range(self.num_ranks)]

    def check(self, version: WeightVersion) -> None:
        """Make sure that every rank has loaded this version.

        Raises:
            EngineError: naming the first one that has not.
        """
        for report in self.reports():
            problem = report.problem or f"it says it holds {report.version or 'no version'}; replace the engine"
            if report.version != str(version) or report.problem:
                raise EngineError(f"rank {report.rank} of {self.num_ranks} did not load {version}: {problem}")

    def _read(self, rank: int) -> RankReport:
        try:
            return msgspec.json.decode(self._receipt(rank).read_bytes(), type=RankReport)
        except (OSError, msgspec.DecodeError) as error:
            raise EngineError(f"rank {rank} of {self.num_ranks} did not say what it loaded ({reason(error)})") from error

    def _receipt(self, rank: int) -> Path:
        return self.request.with_suffix(f".rank{rank}.json")
