"""Loads a leased slot of the relay's store inside a tensor-parallel rank of SGLang, as its `--custom-weight-loader`.

The sender names folder and version in the file `$LAMINAR_WEIGHTS_REQUEST` and calls `/update_weights_from_tensor` with an
empty payload; each rank maps the slot (once a slot; on a GPU it is registered as pinned memory then), copies its own part of
every tensor, waits for the copies, reads them back, and leaves a receipt beside the request. On a CPU nothing is registered.

Invariants: names and shapes are checked before the first byte is copied; a rank that fails says so in its receipt and does
not raise, which would leave the others in a barrier. `plan_slice` is pure. Does not know Laminar: it is not installed here.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REQUEST_VARIABLE = "LAMINAR_WEIGHTS_REQUEST"
VOCABULARY_UNIT = 64
"""SGLang pads vocabularies to a multiple of this."""
FINGERPRINT_NUMBERS = 1 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_QKV = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)")
_GATE_UP = re.compile(r"(.*\.mlp)\.(gate|up)_proj\.(weight|bias)")
_ROWS = re.compile(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.weight")
_VOCABULARY = re.compile(r"(model\.embed_tokens|lm_head)\.weight")
_WHOLE = re.compile(r".*(norm\.weight|\.o_proj\.bias|\.down_proj\.bias)")


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model."""

    num_query: int
    num_key_value: int
    dimension: int


@dataclass(frozen=True)
class Slice:
    """Which part of a stored tensor a rank takes, and where it puts it.

    Attributes:
        target: name of the rank's parameter.
        dim: the dimension that is cut; 0 if nothing is.
        start, length: the part of the stored tensor, along `dim`.
        offset: where it begins in the parameter, along `dim`.
    """

    target: str
    dim: int
    start: int
    length: int
    offset: int


def plan_slice(name: str, shape: Sequence[int], heads: Heads, rank: int, size: int) -> Slice:
    """A rank's part of a tensor of the Llama family (Llama, Mistral, Qwen2, Qwen3), laid out as SGLang fuses it.

    Query, key and value rows lie below one another, and gate above up; what follows an attention or a gate is cut along its
    columns; vocabularies are cut in rows of equal padded shares. With fewer key-value heads than ranks, ranks share a head.

    Raises:
        ValueError: if the tensor is not known, or cannot be cut into so many parts.
    """
    if match := _QKV.fullmatch(name):
        query = _share(heads.num_query, size, name) * heads.dimension
        copies = max(1, size // heads.num_key_value)
        given = _share(heads.num_key_value * copies, size, name) * heads.dimension
        target = f"{match[1]}.qkv_proj.{match[3]}"
        if match[2] == "q":
            return Slice(target, 0, rank * query, query, 0)
        return Slice(target, 0, rank // copies * given, given, query + (given if match[2] == "v" else 0))
    if match := _GATE_UP.fullmatch(name):
        rows = _share(shape[0], size, name)
        return Slice(f"{match[1]}.gate_up_proj.{match[3]}", 0, rank * rows, rows, rows if match[2] == "up" else 0)
    if _ROWS.fullmatch(name):
        columns = _share(shape[1], size, name)
        return Slice(name, 1, rank * columns, columns, 0)
    if _VOCABULARY.fullmatch(name):
        share = _share(-(-shape[0] // VOCABULARY_UNIT) * VOCABULARY_UNIT, size, name)
        start = min(rank * share, shape[0])
        return Slice(name, 0, start, min(share, shape[0] - start), 0)
    if _WHOLE.fullmatch(name):
        return Slice(name, 0, 0, shape[0], 0)
    raise ValueError(f"{name} is not a tensor of the Llama family: load it with rollout.engine.weight_load = 'disk'")


def _share(count: int, size: int, name: str) -> int:
    if count % size:
        raise ValueError(f"{name}: {count} cannot be cut into {size} equal parts")
    return count // size


def fill(
    parameters: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], heads: Heads, rank: int, size: int
) -> str:
    """Copy a rank's part of every stored tensor into its parameters, wait, and read them back.

    Returns:
        A fingerprint of what the parameters hold now, 16 hexadecimal digits.

    Raises:
        ValueError: naming a tensor that does not fit, before anything is copied; or one that reads back otherwise.
    """
    plans = {name: plan_slice(name, tensor.shape, heads, rank, size) for name, tensor in stored.items()}
    regions = {name: _region(parameters, plan, stored[name].shape, name) for name, plan in plans.items()}
    _check_covered(parameters, plans)
    parts = {name: stored[name].narrow(plan.dim, plan.start, plan.length) for name, plan in plans.items()}
    for name, region in regions.items():
        region.copy_(parts[name], non_blocking=True)
    if any(region.is_cuda for region in regions.values()):
        torch.cuda.synchronize()
    total = 0
    for name, region in regions.items():
        found = fingerprint(region)
        if found != fingerprint(parts[name].to(region.dtype)):
            raise ValueError(f"{name} reads back otherwise than it was stored")
        total = (total * 31 + found) % 2**64
    return f"{total:016x}"


def _check_covered(parameters: Mapping[str, torch.Tensor], plans: Mapping[str, Slice]) -> None:
    """Every number of every parameter gets a new value, but for the padding of vocabularies."""
    covered: Counter[str] = Counter()
    for plan in plans.values():
        covered[plan.target] += plan.length
    dims = {plan.target: plan.dim for plan in plans.values()}
    for name, parameter in parameters.items():
        length = parameter.shape[dims.get(name, 0)]
        if covered[name] != length and not (_VOCABULARY.fullmatch(name) and name in covered):
            raise ValueError(f"{name}: {covered[name]} of {length} rows or columns are stored")


def _region(parameters: Mapping[str, torch.Tensor], plan: Slice, shape: Sequence[int], name: str) -> torch.Tensor:
    if plan.target not in parameters:
        raise ValueError(f"{name} is stored, but the model has no {plan.target}")
    parameter = parameters[plan.target]
    expected = list(shape)
    expected[plan.dim] = plan.length
    if parameter.dim() != len(expected) or parameter.shape[plan.dim] < plan.offset + plan.length:
        raise ValueError(f"{name}: {plan} does not fit {plan.target} of shape {tuple(parameter.shape)}")
    region = parameter.detach().narrow(plan.dim, plan.offset, plan.length)
    if list(region.shape) != expected:
        raise ValueError(f"{name}: a part of shape {expected} does not fit {plan.target} of shape {tuple(parameter.shape)}")
    return region


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that changes with any value and any place, computed where the tensor lies."""
    words = tensor.contiguous().view(-1).view(torch.uint8)
    total = 0
    for index, part in enumerate(words.split(FINGERPRINT_NUMBERS)):
        places = torch.arange(1, len(part) + 1, device=part.device, dtype=torch.int64) * 0x9E3779B1
        total += (index + 1) * int(((part.to(torch.int64) + 1) * places).sum())
    return total % 2**64


class Slots:
    """Mapped slots of a store by their inode: slots are rewritten in place, so each is mapped (and pinned) once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensors(self, path: Path, *, pinned: bool) -> dict[str, torch.Tensor]:
        """Views of a weights file's tensors; the caller's lease keeps the bytes as they are.

        Raises:
            ValueError: if it is not a whole safetensors file of numbers.
        """
        status = path.stat()
        storage = self._storages.get(status.st_ino)
        if storage is None:
            mapped: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=status.st_size)
            storage = mapped
            if pinned:
                code = torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), status.st_size, 0)
                if int(code) != 0:
                    raise ValueError(f"{path} cannot be registered as pinned memory (CUDA error {int(code)})")
            self._storages[status.st_ino] = storage
        data = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type,unused-ignore]
        header_bytes = int.from_bytes(bytes(data[:8].tolist()), "little")
        header = json.loads(bytes(data[8 : 8 + header_bytes].tolist()))
        start = 8 + header_bytes
        return {name: _view(data, start, entry) for name, entry in header.items() if name != "__metadata__"}


def _view(data: torch.Tensor, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    first, last = entry["data_offsets"]
    if last - first != math.prod(shape) * dtype.itemsize or start + last > len(data):
        raise ValueError(f"a tensor of shape {shape} cannot lie at bytes [{first}, {last})")
    return data[start + first : start + last].view(dtype).view(shape)


def load(model: Any, named_tensors: object) -> None:
    """SGLang calls this in every rank; the payload is empty."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    request = Path(os.environ[REQUEST_VARIABLE])
    wanted = json.loads(request.read_text())
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    config = model.config
    dimension = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, dimension)
    slots = model.__dict__.setdefault("laminar_slots", Slots())
    is_cuda = next(iter(parameters.values())).is_cuda

    def fill_rank() -> str:
        stored = slots.tensors(Path(wanted["folder"]) / "model.safetensors", pinned=is_cuda)
        return fill(parameters, stored, heads, parallel.tp_rank, parallel.tp_size)

    write_receipt(request, wanted["version"], parallel.tp_rank, fill_rank)


def write_receipt(request: Path, version: str, rank: int, fill_rank: Callable[[], str]) -> None:
    """Load, and say in a file beside the request what came of it."""
    receipt = {"rank": rank, "version": version, "checksum": "", "problem": ""}
    try:
        receipt["checksum"] = fill_rank()
    except Exception as error:  # noqa: BLE001 - whatever it is: a rank that raises leaves the others in a barrier
        receipt["problem"] = f"{type(error).__name__}: {error}"
    hidden = request.with_suffix(f".rank{rank}.partial")
    hidden.write_text(json.dumps(receipt))
    hidden.rename(request.with_suffix(f".rank{rank}.json"))
