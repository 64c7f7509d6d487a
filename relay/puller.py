"""The rollout's side: finds, awaits, holds and verifies versions in this machine's store.

Invariants: only complete versions are ever named; reading needs no relay process and no network; a lease keeps its version
whole until it ends or its holder dies.
Does not know how versions get here, or how an engine loads them.
"""

import asyncio
import mmap
from contextlib import AbstractContextManager
from pathlib import Path

from laminar.config.system import RelayConfig
from laminar.errors import DeadlineError, RelayError
from laminar.types import WeightVersion
from relay.manifest import Manifest, broken_chunks
from relay.store import MANIFEST_NAME, WEIGHTS_NAME, VersionStore

POLL_SECONDS = 0.02


class Puller:
    """Reads weight versions from a store.

    Args:
        store: this machine's store; it need not exist yet.
    """

    def __init__(self, store: VersionStore) -> None:
        self._store = store

    def latest(self) -> WeightVersion | None:
        """The newest complete version; None before the first."""
        return self._store.newest()

    async def wait_newer(self, than: WeightVersion | None, deadline_seconds: float) -> WeightVersion:
        """The newest complete version as soon as it is newer than `than`; any version, if `than` is None.

        Raises:
            DeadlineError: if none came in time.
        """
        try:
            async with asyncio.timeout(deadline_seconds):
                # Versions appear through other processes, which can set no event of ours.
                while (newest := self.latest()) is None or (than is not None and newest <= than):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            wanted = "a first weight version" if than is None else f"a weight version newer than {than}"
            raise DeadlineError(f"{wanted} in {self._store.folder}", deadline_seconds) from None
        return newest

    def lease(self, version: WeightVersion) -> AbstractContextManager[Path]:
        """Hold a version while it is read or mapped; see `VersionStore.lease`.

        Raises:
            RelayError: on entering, if the version is gone or just going.
        """
        return self._store.lease(version)

    def manifest(self, version: WeightVersion) -> Manifest:
        """What the version contains.

        Raises:
            RelayError: if the version is gone.
        """
        with self._store.lease(version) as folder:
            return read_manifest(folder)

    def verify(self, version: WeightVersion) -> None:
        """Recompute all checksums of a version.

        Raises:
            RelayError: if the version is gone, or a piece of it is not what was published.
        """
        with self._store.lease(version) as folder:
            verify_folder(folder)


def open_puller(config: RelayConfig, run_id: str, node_id: str) -> Puller:
    """The puller of a run's store on this machine."""
    return Puller(VersionStore(Path(config.root), run_id, node_id, keep_versions=config.keep_versions))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a version's folder; hold a lease meanwhile."""
    return Manifest.from_json((folder / MANIFEST_NAME).read_text())


def verify_folder(folder: Path) -> None:
    """Recompute all checksums of a version's folder; hold a lease meanwhile.

    Raises:
        RelayError: if a piece is not what was published.
    """
    manifest = read_manifest(folder)
    with (
        (folder / WEIGHTS_NAME).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        broken = broken_chunks(view, manifest)
    if broken:
        raise RelayError(
            f"weight version {manifest.version}: piece {broken[0]} of {len(manifest.checksums)} is broken in {folder}"
        )
