"""One machine's store of weight versions: folders that appear whole, are leased by readers, and make room for newer ones.

    <root>/laminar-<run_id>-<node_id>/
        owner.lock publisher.lock     held by the living relay and publisher
        rank.lock                     shared by the trainer ranks that write into slots which the publisher locked for them
        chunk_bytes                   how long the chain wants the checksummed pieces, if it has other machines
        model_files/                  config, tokenizer: staged once, linked into every version
        slots/0.safetensors ...       rewritten in place
        versions/<lineage>.<number>/  model.safetensors (hard link to a slot), manifest.json, config and tokenizer

Invariants: a folder named after a version is complete; it goes only under the exclusive lock of its slot, so never under a
reader's lease; the newest `keep_versions` of the newest lineage stay. Names that start with a dot are work in progress.
Does not know tensors, Redis or Ray; works without any relay process.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from laminar.config.root import LaminarConfig
from laminar.config.sizes import num_weight_slots
from laminar.errors import InvariantError, RelayError
from laminar.types import WeightVersion
from relay.locks import FileLock, is_same_file, try_lock
from relay.slots import Slot, check_space, num_slots, open_slots

WEIGHTS_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
OWNER = "owner"
PUBLISHER = "publisher"
RANK = "rank"
PARTIAL_PREFIX = ".partial-"
REMOVED_PREFIX = ".removed-"
STORE_PREFIX = "laminar-"
ADVICE_NAME = "chunk_bytes"

_ATTEMPTS = 8


def kept_versions(complete: Sequence[WeightVersion], keep_versions: int) -> list[WeightVersion]:
    """Which complete versions stay: the newest few of the newest lineage, newest first.

    An older lineage is superseded as a whole by the first complete version of a newer one.
    """
    newest_first = sorted(complete, reverse=True)
    return [version for version in newest_first if version.lineage == newest_first[0].lineage][:keep_versions]


class VersionStore:
    """A run's weight versions on one node.

    Args:
        root: folder on a memory-backed file system.
        run_id: the run.
        node_id: the Ray node; two nodes on one host have a store each.
        keep_versions: complete versions that are kept.
        mapping_readers: engines that map the weights they serve, and so hold a lease all the time.
    """

    def __init__(self, root: Path, run_id: str, node_id: str, *, keep_versions: int = 1, mapping_readers: int = 0) -> None:
        if keep_versions < 1 or mapping_readers < 0:
            raise InvariantError(
                f"keep_versions {keep_versions} must be 1 or more, mapping_readers {mapping_readers} 0 or more"
            )
        self.root = root
        self.run_id = run_id
        self.node_id = node_id
        self.keep_versions = keep_versions
        self.mapping_readers = mapping_readers
        self.num_slots = num_slots(keep_versions=keep_versions, mapping_readers=mapping_readers)
        self.folder = root / f"{STORE_PREFIX}{run_id}-{node_id}"
        self.model_files = self.folder / "model_files"
        self._slots_folder = self.folder / "slots"
        self._versions_folder = self.folder / "versions"

    def create(self) -> None:
        """Make the folders; harmless when repeated.

        Raises:
            EnvironmentSetupError: if the root is no folder.
        """
        check_space(self.root, 0)
        for folder in (self.model_files, self._slots_folder, self._versions_folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def hold(self, role: str) -> FileLock:
        """Become the store's one `OWNER` or `PUBLISHER`, until released or dead; as `RANK`, see that no old one lives.

        Raises:
            RelayError: if a living process is it already.
        """
        for _ in range(_ATTEMPTS):
            self.create()
            try:
                lock = FileLock.acquire(self.folder / f"{role}.lock", create=True)
            except FileNotFoundError:
                continue  # the folder was removed as an orphan between the two calls
            if lock is not None:
                return lock
        raise RelayError(f"store {self.folder} already has a living {role}: end that process first")

    def versions(self) -> list[WeightVersion]:
        """The complete versions, oldest first; empty if there is no store yet."""
        try:
            names = os.listdir(self._versions_folder)
        except FileNotFoundError:
            return []
        return sorted(WeightVersion.parse(name) for name in names if not name.startswith("."))

    def newest(self) -> WeightVersion | None:
        """The newest complete version, by lineage, then number."""
        return max(self.versions(), default=None)

    def folder_of(self, version: WeightVersion) -> Path:
        """Where a version lies, or would."""
        return self._versions_folder / str(version)

    @contextmanager
    def lease(self, version: WeightVersion) -> Iterator[Path]:
        """Hold a version: until the end of the block (or of the process) its folder and bytes stay as they are.

        Keep the lease for as long as anything of it is mapped.

        Yields:
            The version's folder.

        Raises:
            RelayError: if the version is gone or just going; ask for the newest again.
        """
        descriptor = self._open_leased(version)
        try:
            yield self.folder_of(version)
        finally:
            os.close(descriptor)

    def _open_leased(self, version: WeightVersion) -> int:
        path = self.folder_of(version) / WEIGHTS_NAME
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                break
            # The publisher may have taken the slot between open and lock: then the name is gone, or names another slot.
            if try_lock(descriptor, exclusive=False) and is_same_file(descriptor, path):
                return descriptor
            os.close(descriptor)
        newest = self.newest()
        raise RelayError(f"weight version {version} is not in {self.folder} (newest: {newest}): lease the newest")

    def slot_path(self, version: WeightVersion) -> Path:
        """The slot that a leased version links to; the version's own file once that slot was given up."""
        linked = self.folder_of(version) / WEIGHTS_NAME
        for path in self._slots_folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # one of another length goes when the layout has changed
                if path.samefile(linked):
                    return path
        return linked

    def prepare_slots(self, file_bytes: int) -> list[Slot]:
        """Open the slots for files of this length, allocating and touching what is missing.

        Raises:
            EnvironmentSetupError: if there is no room.
        """
        self.create()
        return open_slots(self._slots_folder, self.num_slots, file_bytes)

    def slot_lengths(self) -> list[int]:
        """Bytes of the file in each slot that is there already; none if there is no store yet."""
        return [path.stat().st_size for path in self._slots_folder.glob("*.safetensors")]

    def claim_slot(self, slots: Sequence[Slot]) -> Slot | None:
        """Lock a slot for writing and remove the versions that link to it; None if all others are kept or leased."""
        by_inode = self._versions_by_inode()
        kept = set(kept_versions(list(by_inode.values()), self.keep_versions))
        for slot in sorted(slots, key=lambda slot: slot.num_links):
            version = by_inode.get(slot.inode)
            if version in kept or not slot.try_lock():
                continue
            if version is not None:
                self._remove(version)
            return slot
        return None

    def prune(self) -> list[WeightVersion]:
        """Remove what need not be kept and nobody leases; returns what went."""
        complete = self.versions()
        surplus = [v for v in complete if v not in kept_versions(complete, self.keep_versions)]
        return [version for version in surplus if self._remove_if_unleased(version)]

    def partial_folder(self, version: WeightVersion) -> Path:
        """Where a version is put together, before one rename makes it appear."""
        return self._versions_folder / f"{PARTIAL_PREFIX}{version}"

    def clean_partial(self) -> None:
        """Remove what a killed writer left half done. For the publisher, or the relay that receives, alone."""
        for path in self._versions_folder.iterdir():
            if path.name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)):
                shutil.rmtree(path, ignore_errors=True)

    def advise_chunk_bytes(self, chunk_bytes: int) -> None:
        """Leave word for the publisher how long the checksummed pieces should be."""
        hidden = self.folder / f".{ADVICE_NAME}"
        hidden.write_text(str(chunk_bytes))
        hidden.rename(self.folder / ADVICE_NAME)

    def advised_chunk_bytes(self) -> int | None:
        """What `advise_chunk_bytes` said; None if nothing yet."""
        try:
            return int((self.folder / ADVICE_NAME).read_text())
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Delete the store; readers that map a version keep its bytes."""
        remove_store(self.folder)

    def _versions_by_inode(self) -> dict[int, WeightVersion]:
        found = {}
        for version in self.versions():
            with suppress(FileNotFoundError):
                found[os.stat(self.folder_of(version) / WEIGHTS_NAME).st_ino] = version
        return found

    def _remove_if_unleased(self, version: WeightVersion) -> bool:
        try:
            lock = FileLock.acquire(self.folder_of(version) / WEIGHTS_NAME, create=False)
        except FileNotFoundError:
            return False
        if lock is None:
            return False
        with lock:
            self._remove(version)
        return True

    def _remove(self, version: WeightVersion) -> None:
        """Take a version away; the caller holds the exclusive lock of its slot."""
        removed = self._versions_folder / f"{REMOVED_PREFIX}{version}"
        # What a killed predecessor left under this name would make the rename fail.
        shutil.rmtree(removed, ignore_errors=True)
        with suppress(FileNotFoundError):  # relay and publisher both prune
            os.rename(self.folder_of(version), removed)
        shutil.rmtree(removed, ignore_errors=True)


def open_store(config: LaminarConfig, run_id: str, node_id: str) -> VersionStore:
    """A run's store with as many slots as `laminar explain` promises; nothing is created yet."""
    keep_versions = config.relay.keep_versions
    mapping_readers = num_weight_slots(config) - num_slots(keep_versions=keep_versions, mapping_readers=0)
    root = Path(config.relay.root)
    return VersionStore(root, run_id, node_id, keep_versions=keep_versions, mapping_readers=mapping_readers)


def remove_store(folder: Path) -> None:
    """Delete a store's folder: one rename, so that nobody opens a half-deleted one, then the files."""
    removed = folder.with_name(f"{REMOVED_PREFIX}{folder.name}-{os.getpid()}")
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)
