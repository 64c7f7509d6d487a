"""What a weight version's file looks like, and how to tell that it is whole.

A slot file is a valid safetensors file: an 8-byte length, a JSON header, the tensors without gaps. The header depends on the
layout alone, so every version of a run has its tensors at the same places.

Invariants: tensors of wider numbers come first, and they start at a multiple of 64 bytes, so each can be mapped as it lies;
of weights that share memory one is stored, the others are listed in `tied`; `checksums` cover every byte of the file.
Does not know files, locks or processes. Imports no torch: tensors are asked only for their shape, dtype and address.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from laminar.errors import RelayError
from laminar.types import WeightVersion
from relay.probe import Probe

if TYPE_CHECKING:
    import torch

MANIFEST_FORMAT = 1
"""Written into every manifest; a reader refuses what it does not know."""

CHUNK_BYTES = 16 * 1024**2
"""Default length of a checksummed piece."""

DATA_ALIGNMENT = 64
"""The tensors' part of the file starts at a multiple of this many bytes (a cache line)."""

DTYPES: Mapping[str, tuple[str, int]] = {
    "torch.float64": ("F64", 8),
    "torch.float32": ("F32", 4),
    "torch.float16": ("F16", 2),
    "torch.bfloat16": ("BF16", 2),
    "torch.float8_e4m3fn": ("F8_E4M3", 1),
    "torch.float8_e5m2": ("F8_E5M2", 1),
    "torch.int64": ("I64", 8),
    "torch.int32": ("I32", 4),
    "torch.int16": ("I16", 2),
    "torch.int8": ("I8", 1),
    "torch.uint8": ("U8", 1),
    "torch.bool": ("BOOL", 1),
}
"""Torch's name of a number type -> its name in safetensors files, bytes of one number."""

_ITEM_BYTES = dict(DTYPES.values())


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor: `dtype` as safetensors names it, `offset` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every tensor lies in a slot file.

    Attributes:
        tensors: name -> place, in the order of the file.
        tied: name of a weight that is not stored -> name of the stored one it shares its memory with.
        header: the first bytes of the file, up to the first tensor.
        file_bytes: length of the file.
    """

    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    header: bytes
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` in a version's folder says.

    Attributes:
        version: the weight version.
        run_id: the run that published it.
        tensors: name -> place, in the order of the file.
        tied: alias -> stored name.
        file_bytes: length of `model.safetensors`.
        chunk_bytes: length of a checksummed piece; the last one may be shorter.
        checksums: xxh3_64 of each piece, 16 hexadecimal digits each.
        probe: what the trainer's own forward pass makes of fixed tokens; None: it has none (an emulated one).
    """

    version: WeightVersion
    run_id: str
    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    file_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    probe: Probe | None = None

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or len(self.checksums) != num_chunks(self.file_bytes, self.chunk_bytes):
            raise RelayError(
                f"manifest of {self.version}: {len(self.checksums)} checksums of {self.chunk_bytes}-byte pieces "
                f"do not cover {self.file_bytes} bytes"
            )

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(
            {
                "format": MANIFEST_FORMAT,
                "version": str(self.version),
                "run_id": self.run_id,
                "file_bytes": self.file_bytes,
                "chunk_bytes": self.chunk_bytes,
                "checksums": self.checksums,
                "probe": None if self.probe is None else [self.probe.token_ids, self.probe.logprobs],
                "tied": dict(self.tied),
                "tensors": {name: [t.dtype, t.shape, t.offset, t.nbytes] for name, t in self.tensors.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read `manifest.json`.

        Raises:
            RelayError: if it was written in another format.
        """
        fields: dict[str, Any] = json.loads(text)
        if fields.get("format") != MANIFEST_FORMAT:
            raise RelayError(
                f"manifest format {fields.get('format')!r} is not {MANIFEST_FORMAT}: "
                "trainer, relays and rollouts must run the same release"
            )
        return cls(
            version=WeightVersion.parse(fields["version"]),
            run_id=fields["run_id"],
            tensors={name: TensorSpec(d, tuple(s), o, n) for name, (d, s, o, n) in fields["tensors"].items()},
            tied=fields["tied"],
            file_bytes=fields["file_bytes"],
            chunk_bytes=fields["chunk_bytes"],
            checksums=tuple(fields["checksums"]),
            probe=None if fields.get("probe") is None else Probe(*map(tuple, fields["probe"])),
        )


def num_chunks(file_bytes: int, chunk_bytes: int) -> int:
    """How many checksummed pieces a file has."""
    return -(-file_bytes // chunk_bytes)


def checksum(chunk: memoryview | bytes) -> str:
    """Xxh3_64 of one piece, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(chunk)


def broken_chunks(data: memoryview, manifest: Manifest) -> list[int]:
    """Indices of the pieces of `data` (a whole file) that do not have their checksum."""
    if len(data) != manifest.file_bytes:
        return list(range(len(manifest.checksums)))
    size = manifest.chunk_bytes
    return [
        index
        for index, expected in enumerate(manifest.checksums)
        if checksum(data[index * size : (index + 1) * size]) != expected
    ]


def plan_layout(stored: Sequence[tuple[str, str, Sequence[int]]], tied: Mapping[str, str]) -> Layout:
    """Place tensors in a file.

    Args:
        stored: (name, dtype as safetensors names it, shape) of each tensor to store.
        tied: alias -> name of a stored tensor.

    Raises:
        RelayError: if there is nothing to store, a name appears twice, or an alias points nowhere.
    """
    names = {name for name, _, _ in stored}
    if not stored:
        raise RelayError("there is no tensor to publish")
    if len(names) != len(stored):
        repeated = Counter(name for name, _, _ in stored).most_common(1)[0][0]
        raise RelayError(f"tensor {repeated!r} was published twice in one version")
    if dangling := [alias for alias, name in tied.items() if name not in names or alias in names]:
        raise RelayError(f"tied weight {dangling[0]!r} must not be stored itself and must name a stored tensor")
    places: dict[str, TensorSpec] = {}
    offset = 0
    for name, dtype, shape in sorted(stored, key=lambda item: -_ITEM_BYTES[item[1]]):
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        places[name] = TensorSpec(dtype, tuple(shape), offset, nbytes)
        offset += nbytes
    header = _file_header(places)
    start = len(header)
    return Layout(
        tensors={name: TensorSpec(t.dtype, t.shape, start + t.offset, t.nbytes) for name, t in places.items()},
        tied=dict(tied),
        header=header,
        file_bytes=start + offset,
    )


def load_layout(state: Iterable[tuple[str, "torch.Tensor"]]) -> Layout:
    """The layout of a model's state, as `state_dict().items()` or `named_parameters(remove_duplicate=False)` gives it.

    Weights that share their memory exactly are stored once, under the name that comes first.

    Raises:
        RelayError: if a number type cannot be stored, or as `plan_layout`.
    """
    stored: list[tuple[str, str, tuple[int, ...]]] = []
    tied: dict[str, str] = {}
    # The tensors are kept while we look: the address of a freed one may come back under another name and look tied.
    seen: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
    for name, tensor in state:
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.data_ptr() and identity in seen:
            tied[name] = seen[identity][0]
            continue
        seen[identity] = (name, tensor)
        stored.append((name, dtype_name(name, tensor), tuple(tensor.shape)))
    return plan_layout(stored, tied)


def dtype_name(name: str, tensor: "torch.Tensor") -> str:
    """How safetensors files name the tensor's number type.

    Raises:
        RelayError: if they cannot hold it.
    """
    try:
        return DTYPES[str(tensor.dtype)][0]
    except KeyError:
        raise RelayError(f"tensor {name!r} has the number type {tensor.dtype}, which weight files cannot hold") from None


def _file_header(places: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, place in places.items():
        entries[name] = {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "data_offsets": [place.offset, place.offset + place.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
