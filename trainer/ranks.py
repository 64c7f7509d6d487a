"""What the ranks of a trainer tell each other: decisions as bytes, numbers as sums. No pickle crosses a process.

Every method but the properties is a collective: all ranks call it, in the same order. With one rank nothing is sent.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from laminar.errors import ConfigError, LaminarError, RunFailedError

_OK, _REFUSED = b"\x00", b"\x01"


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Ranks next to one another that hold the same rows, each a stretch of their tokens.

    Attributes:
        size: how many, at least 2.
        place: of this rank, from 0.
        group: torch's group of them.
    """

    size: int
    place: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
        device: where this rank computes.
        sequence: those that this rank shares its rows with; None if it has rows of its own.
    """

    rank: int
    world_size: int
    device: torch.device
    sequence: SequenceGroup | None = None

    @property
    def share(self) -> int:
        """Which share of a step's rows this rank has, from 0."""
        return self.rank if self.sequence is None else self.rank // self.sequence.size

    @property
    def num_shares(self) -> int:
        """Into how many shares a step's rows are split."""
        return self.world_size if self.sequence is None else self.world_size // self.sequence.size

    @property
    def speaks_for_share(self) -> bool:
        """Whether what follows from its rows is to be counted here: once a share, however many ranks have it."""
        return self.sequence is None or self.sequence.place == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == 0

    def decide(self, decision: Callable[[], bytes]) -> bytes:
        """What rank 0's `decision` returns, on every rank.

        Raises:
            LaminarError: what it raised on rank 0; on the others a `RunFailedError` with the same text, so that none waits.
        """
        if self.world_size == 1:
            return decision()
        failure: LaminarError | None = None
        message = b""
        if self.is_first:
            try:
                message = _OK + decision()
            except LaminarError as error:
                failure, message = error, _REFUSED + str(error).encode()
        message = self._broadcast(message)
        if failure is not None:
            raise failure
        if message[:1] == _REFUSED:
            raise RunFailedError(f"rank 0 refused: {message[1:].decode()}")
        return message[1:]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self.world_size == 1:
            return [text]
        data = text.encode()
        lengths = [int(length) for length in self.gather_numbers(len(data))]
        width = max(*lengths, 1)
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\x00"), dtype=torch.uint8)[: len(data)]
        parts = [torch.empty(width, dtype=torch.uint8, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(parts, mine.to(self.device))
        return [part.cpu().numpy().tobytes()[:length].decode() for part, length in zip(parts, lengths, strict=True)]

    def gather_numbers(self, number: float) -> list[float]:
        """Every rank's number, by rank."""
        values = [0.0] * self.world_size
        values[self.rank] = number
        return self.sum(values)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def sum_shares(self, values: Sequence[float]) -> list[float]:
        """As `sum`, of values that follow from a rank's rows: each share counts once, however many ranks have it."""
        return self.sum(values if self.speaks_for_share else [0.0] * len(values))

    def leave(self) -> None:
        """Close the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, message: bytes) -> bytes:
        size = int(self.sum([len(message) if self.is_first else 0])[0])
        buffer = torch.frombuffer(bytearray(message if self.is_first else size), dtype=torch.uint8).to(self.device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()


def join_ranks(
    rank: int,
    world_size: int,
    store: Store | None = None,
    *,
    use_gpu: bool = False,
    collective_seconds: float = 1800,
    sequence_size: int = 1,
) -> Ranks:
    """Meet the other ranks and open the process group that DeepSpeed will use.

    Args:
        rank: this process, from 0.
        world_size: number of ranks.
        store: where they meet, such as a `TCPStore` that rank 0's host serves; may be None for one rank.
        use_gpu: compute on the first visible GPU, with NCCL, instead of on the CPU, with gloo.
        collective_seconds: deadline of every collective, longer than rank 0 may wait for data while the others wait for it.
        sequence_size: so many ranks, one after another, share their rows; it divides `world_size`.

    Raises:
        ConfigError: if a GPU is asked for and there is none.
    """
    if use_gpu and not torch.cuda.is_available():
        raise ConfigError("trainer.num_gpus_per_rank is above 0 but torch sees no GPU: set it to 0, or install a CUDA build")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists; each rank sees only its own devices
    device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if use_gpu else "gloo",
        store=HashStore() if store is None else store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_seconds),
    )
    return Ranks(rank, world_size, device, group_sequences(rank, world_size, sequence_size))


def group_sequences(rank: int, world_size: int, size: int) -> SequenceGroup | None:
    """Make the groups of ranks that share rows; all ranks call it together. None if `size` is 1."""
    if size == 1:
        return None
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    return SequenceGroup(size, rank % size, groups[rank // size])
