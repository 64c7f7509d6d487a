"""The trainer's side: puts complete weight versions into this machine's store, at the speed of a memory copy.

Invariants: one publisher a store; a version appears by one rename, after its last byte was checksummed; whatever fails or
dies before that leaves the older versions as they were; numbers only rise within a lineage, and a newer lineage supersedes.
Does not know how tensors are gathered (`trainer.publishing`), who reads, or other machines.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from laminar.errors import DeadlineError, RelayError
from laminar.types import WeightVersion
from relay.locks import FileLock
from relay.manifest import CHUNK_BYTES, Layout, Manifest, load_layout
from relay.model_files import stage_model_files
from relay.pinning import computed_so_far, pin_slots, run_beside, unpin_slots
from relay.probe import Probe
from relay.reveal import reveal
from relay.slots import Slot
from relay.store import PUBLISHER, RANK, VersionStore, kept_versions
from relay.writing import fill_slot, piece_checksums

Until = Literal["begun", "copied", "visible"]
"""What a publish waits for: a free slot; that its tensors may change; that readers see the version."""

Fill = Callable[[Slot, Layout], Callable[[], None]]
"""Called with a locked slot where `publish` was called; what it returns fills the slot, perhaps in another thread."""

COPY_SECONDS, FINISH_SECONDS = 600.0, 600.0
"""Deadlines of a version's copy, and of its checksums and appearance: hundreds of times what large models take."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one `publish` did.

    Attributes:
        seconds: how long it took.
        bytes: weight bytes written; 0 if none were.
        skipped: true if the version is not in the store and may be offered again.
        reason: why nothing was written; empty if the version was.
    """

    seconds: float
    bytes: int
    skipped: bool
    reason: str


class Publisher:
    """Writes weight versions into a store. Every trainer rank makes one; only rank 0's writes, or lets all write (`fill`).

    Args:
        store: this machine's store.
        model_files: folder of the Hugging Face model whose config and tokenizer go with the weights.
        rank: this trainer rank.
        world_size: number of trainer ranks, each with the full weights.
        chunk_bytes: length of a checksummed piece; None: what the chain of relays advises, else `CHUNK_BYTES`.

    Raises:
        RelayError: if another living process publishes into the store, or a rank of an earlier one still lives.
        ConfigError: if `model_files` has no config.json.
        EnvironmentSetupError: if there is no room for the model's files.
    """

    def __init__(
        self, store: VersionStore, model_files: Path, *, rank: int = 0, world_size: int = 1, chunk_bytes: int | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._chunk_bytes = chunk_bytes
        self._layout: Layout | None = None
        self._slots: list[Slot] = []
        self._pinned: list[Slot] = []
        self._lock: FileLock | None = None
        self._thread = ThreadPoolExecutor(1, "relay-publish")
        self._copying: Future[float] | None = None
        """The copy of the version that was begun last, where its publish did not wait for it."""
        self._finishing: Future[None] | None = None
        """Checksums and appearance of the version that was copied last, where its publish did not wait for them."""
        if rank == 0:
            store.hold(RANK).release()  # no rank of a dead publisher still writes
            self._lock = store.hold(PUBLISHER)
            store.clean_partial()
            stage_model_files(model_files, store.model_files)

    def prepare(self, layout: Layout) -> None:
        """Fix the layout; allocate and touch the slots, which takes seconds per gigabyte: do it before training starts.

        Raises:
            EnvironmentSetupError: if the machine has no room for the slots.
            RelayError: if another layout was fixed before.
        """
        if self._rank != 0:
            return
        if self._layout is not None and self._layout != layout:
            raise RelayError("the layout of the weights is fixed at the first publish and cannot change")
        if self._layout is None:
            self._slots = self._store.prepare_slots(layout.file_bytes)
            self._pinned = pin_slots(self._slots)
            self._layout = layout

    def publish(
        self,
        version: WeightVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        probe: Probe | None = None,
        *,
        until: Until = "visible",
        fill: Fill | None = None,
    ) -> PublishReport:
        """Make a version visible to this machine's readers, or nothing at all.

        Publishing a version that is there already does nothing. With every slot leased the version is skipped: offer it
        again.

        Args:
            version: newer than all that were published before.
            tensors: (name, values), in any order; cast to the layout's number type.
            probe: what the trainer's forward pass makes of fixed tokens; goes along for readers to compare.
            until: what to wait for. `copied`: checksums and appearance follow in a thread, and what they raise is raised by
                the next call or by `settle`. `begun`: so does the copy, on GPUs beside the stream that computes; call
                `finish_copy` before the tensors change.
            fill: what fills the slot if `tensors` are not read, because each rank writes its share; after `prepare`.

        Raises:
            RelayError: if a newer version exists, or a tensor does not fit the layout (named); nothing is published then.
            EnvironmentSetupError: at the first publish, as `prepare`.
        """
        started = time.perf_counter()
        if self._rank != 0:
            return PublishReport(0.0, 0, skipped=False, reason=f"rank {self._rank} of {self._world_size} does not write")
        self.settle()
        complete = self._store.versions()
        if version in complete:
            return PublishReport(time.perf_counter() - started, 0, skipped=False, reason=f"{version} is complete already")
        if complete and version < complete[-1]:
            raise RelayError(f"weight version {version} is older than {complete[-1]}, which is complete")
        layout = self._layout
        if layout is None:
            tensors = list(tensors)
            layout = load_layout(tensors)
            self.prepare(layout)
        slot = self._store.claim_slot(self._slots)
        if slot is None:
            return PublishReport(time.perf_counter() - started, 0, skipped=True, reason=self._why_full())
        chunk_bytes = self._chunk_bytes or self._store.advised_chunk_bytes() or CHUNK_BYTES
        copy = self._begin(slot, fill or (lambda slot, layout: partial(fill_slot, slot, layout, tensors)), layout)
        if until == "begun":
            self._copying = self._thread.submit(_timed, partial(run_beside, computed_so_far(), copy))
        else:
            copy()
        self._finishing = self._thread.submit(self._finish, self._copying, version, slot, layout, chunk_bytes, probe)
        if until == "visible":
            self.settle()
        return PublishReport(time.perf_counter() - started, layout.file_bytes, skipped=False, reason="")

    def finish_copy(self) -> float:
        """Wait until the tensors of the version that was begun last may change; harmless when repeated.

        Returns:
            Seconds that the copy took; 0 if none was under way.

        Raises:
            RelayError: a tensor does not fit the layout (named); that version is dropped.
            DeadlineError: the copy is not over in `COPY_SECONDS`.
        """
        copying, self._copying = self._copying, None
        if copying is None:
            return 0.0
        try:
            return copying.result(COPY_SECONDS)
        except TimeoutError:
            raise DeadlineError("the copy of a weight version", COPY_SECONDS) from None
        finally:
            if copying.done() and copying.exception() is not None:
                self._finishing = None  # it ends with the same error

    def settle(self) -> None:
        """Wait until the version that was begun last is there; harmless when repeated."""
        self.finish_copy()
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            try:
                finishing.result(FINISH_SECONDS)
            except TimeoutError:
                raise DeadlineError("the checksums of a weight version", FINISH_SECONDS) from None

    def close(self) -> None:
        """Stop publishing; the versions stay."""
        self._thread.shutdown()
        unpin_slots(self._pinned)
        self._pinned = []
        for slot in self._slots:
            slot.close()
        self._slots = []
        if self._lock is not None:
            self._lock.release()

    def _begin(self, slot: Slot, fill: Fill, layout: Layout) -> Callable[[], None]:
        """What fills a slot; what fails gives it back, now or then."""
        with ExitStack() as undo:
            undo.callback(slot.unlock)
            copy = fill(slot, layout)
            undo.pop_all()
        return partial(_copy, slot, copy)

    def _finish(
        self,
        copying: Future[float] | None,
        version: WeightVersion,
        slot: Slot,
        layout: Layout,
        chunk_bytes: int,
        probe: Probe | None,
    ) -> None:
        """Checksum a filled slot and make it appear."""
        if copying is not None:
            copying.result()  # over by now: one thread does one after the other
        try:
            self._reveal(version, slot, layout, chunk_bytes, probe)
        finally:
            slot.unlock()
        self._store.prune()

    def _reveal(self, version: WeightVersion, slot: Slot, layout: Layout, chunk_bytes: int, probe: Probe | None) -> None:
        manifest = Manifest(
            version=version,
            run_id=self._store.run_id,
            tensors=layout.tensors,
            tied=layout.tied,
            file_bytes=layout.file_bytes,
            chunk_bytes=chunk_bytes,
            checksums=piece_checksums(slot, chunk_bytes),
            probe=probe,
        )
        reveal(self._store, manifest, slot)

    def _why_full(self) -> str:
        complete = self._store.versions()
        leased = [str(v) for v in complete if v not in kept_versions(complete, self._store.keep_versions)]
        return f"all {len(self._slots)} slots are kept or leased; versions still read besides the kept: {', '.join(leased)}"


def _copy(slot: Slot, copy: Callable[[], None]) -> None:
    with ExitStack() as undo:
        undo.callback(slot.unlock)
        copy()
        undo.pop_all()


def _timed(work: Callable[[], None]) -> float:
    """The seconds that it took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
