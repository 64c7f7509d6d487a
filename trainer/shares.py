"""Every rank writes its share of a version into the slot that rank 0 has locked; rank 0 waits for all of them.

Where: all ranks are on one machine, hold no adapters and share no rows. Nothing is gathered: under ZeRO 3 a share is the
rank's own partition of each parameter, elsewhere an equal part of the parameters. So a version needs no memory beside its
slot, and the copy goes on beside the next forward and backward passes under every stage.

Invariants: rank 0 announces a slot only once it has it, so a version that is skipped is skipped by all; a version counts as
copied when every rank has said how many bytes it wrote and they add up to the file; no rank's weights change before its own
share is written. What a rank could not write is said to rank 0, which drops the version. A rank that dies says nothing:
training's next collective, the supervisor or the deadline ends rank 0's wait, and the slot has no name until then.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from laminar.errors import DeadlineError, LaminarError, RelayError
from relay.manifest import Layout, load_layout
from relay.pinning import computed_so_far, run_beside
from relay.publisher import COPY_SECONDS
from relay.share import AnnouncedSlots, Stretch, even_stretches, write_stretches
from relay.slots import Slot
from trainer.engine import TrainerEngine
from trainer.gathering import is_partitioned

POLL_SECONDS = 0.002


class WeightShares:
    """One rank's part in filling slots.

    Args:
        rank: this rank.
        num_ranks: at least 2, all on this machine.
        store: where ranks leave word for rank 0.
        layout: of every version, the same on every rank.
        own: this rank's stretches of the weights as they are, not copies.
        seconds: how long rank 0 waits for the others' shares, and a rank for its own.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: Store,
        layout: Layout,
        own: Callable[[], Iterable[Stretch]],
        seconds: float = COPY_SECONDS,
    ) -> None:
        self._rank, self._others, self._store = rank, range(1, num_ranks), store
        self._layout, self._own, self._seconds = layout, own, seconds
        self._slots, self._thread = AnnouncedSlots(), ThreadPoolExecutor(1, "share")
        self._copying: Future[None] | None = None
        self._number = 0

    def fill(self, announce: Callable[[str], None], slot: Slot, layout: Layout) -> Callable[[], None]:
        """Rank 0: let all ranks begin; returns what writes its own share and waits for theirs, in any thread.

        What is returned raises `RelayError` if a rank could not write, `DeadlineError` if one says nothing.

        Args:
            announce: brings an order to `begin` on every other rank.
            slot: locked.
            layout: the publisher's.

        Raises:
            RelayError: the publisher has another layout.
        """
        if layout != self._layout:
            raise RelayError("ranks share the layout of the trainer's weights, and the publisher has fixed another one")
        self._number += 1
        own = self._own()  # here, where nothing is computed: in a forward pass DeepSpeed watches who asks for parameters
        announce(f"{self._number} {slot.inode} {slot.path}")
        return partial(self._fill, slot, self._number, own)

    def begin(self, order: str) -> None:
        """Another rank: write this rank's share in a thread; see `fill`."""
        self.finish()
        number, inode, path = order.split(" ", 2)
        write = partial(self._write, int(inode), Path(path), self._own())
        self._copying = self._thread.submit(self._answer, int(number), partial(run_beside, computed_so_far(), write))

    def finish(self) -> None:
        """Another rank: wait until its share is written, for its weights are about to change; harmless when repeated.

        Raises:
            DeadlineError: it is not written in time.
        """
        copying, self._copying = self._copying, None
        if copying is not None:
            try:
                copying.result(self._seconds)
            except TimeoutError:
                raise DeadlineError(f"trainer rank {self._rank}'s share of a weight version", self._seconds) from None

    def _fill(self, slot: Slot, number: int, own: Iterable[Stretch]) -> None:
        slot.buffer[: len(self._layout.header)] = self._layout.header
        written = len(self._layout.header)
        try:
            written += write_stretches(slot, self._layout, own)
        finally:  # nobody writes any more when the slot is given back
            answers = self._hear(number)
        for rank, answer in answers.items():
            if not answer.isdigit():
                raise RelayError(f"trainer rank {rank} could not write its share: {answer}")
        written += sum(map(int, answers.values()))
        if written != self._layout.file_bytes:
            raise RelayError(f"the ranks' shares have {written:,} bytes, a version {self._layout.file_bytes:,}")

    def _hear(self, number: int) -> dict[int, str]:
        """What every other rank says of its share: the bytes written, or what went wrong."""
        keys, deadline = {rank: _key(number, rank) for rank in self._others}, time.monotonic() + self._seconds
        while not self._store.check(list(keys.values())):
            if time.monotonic() > deadline:
                silent = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
                raise DeadlineError(f"the shares of trainer ranks {', '.join(silent)} of a weight version", self._seconds)
            time.sleep(POLL_SECONDS)
        answers = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        for key in keys.values():
            self._store.delete_key(key)
        return answers

    def _answer(self, number: int, write: Callable[[], int]) -> None:
        try:
            answer = str(write())
        except (LaminarError, OSError) as error:
            answer = f"{type(error).__name__}: {error}"
        self._store.set(_key(number, self._rank), answer)

    def _write(self, inode: int, path: Path, own: Iterable[Stretch]) -> int:
        slot = self._slots.open(path, inode, self._layout.file_bytes)
        return write_stretches(slot, self._layout, own)


def join_shares(engine: TrainerEngine, store: Store | None, node_id: str) -> WeightShares | None:
    """This rank's part; None where rank 0 writes alone. All ranks call it together.

    Args:
        engine: has the weights.
        store: where ranks meet; None for one rank.
        node_id: this rank's machine; empty if that is not known.
    """
    ranks = engine.ranks
    if store is None or set(ranks.gather_texts(node_id)) != {node_id} or not node_id:
        return None
    if engine.adapters is not None or ranks.sequence is not None:
        return None
    layout = load_layout(engine.state_shapes())
    return WeightShares(ranks.rank, ranks.world_size, store, layout, partial(own_stretches, engine))


def own_stretches(engine: TrainerEngine) -> list[Stretch]:
    """What this rank writes: rank 0 all buffers, every rank its part of the parameters; nothing is gathered."""
    rank, named = engine.ranks.rank, list(engine.model.named_parameters())
    stretches = [Stretch(name, 0, buffer.detach().reshape(-1)) for name, buffer in engine.buffers()] if rank == 0 else []
    for name, parameter in named:
        if is_partitioned(parameter):  # equal partitions, the last ones padded
            partition = parameter.ds_tensor.detach().view(-1)
            start = rank * len(partition)
            length = max(0, min(len(partition), parameter.ds_numel - start))
            stretches.append(Stretch(name, start, partition[:length]))
    whole = [(name, parameter) for name, parameter in named if not is_partitioned(parameter)]
    return stretches + even_stretches(whole, rank, engine.ranks.world_size)


def _key(number: int, rank: int) -> str:
    return f"laminar/share/{number}/{rank}"
