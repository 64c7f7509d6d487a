"""How much of everything a config asks for.

Pure, but for `read_model_size`, which reads the headers of a model's files.
"""

import json
import math
import struct
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

from laminar.config.check_plugins import algorithm_options
from laminar.config.root import LaminarConfig
from laminar.policies.repack import RepackLimits, request_bound

_BYTES_PER_TOKEN = 8
"""An int32 token id and a float32 log-prob."""
_BYTES_PER_TRAJECTORY = 2048
"""Ids, spans, reward terms, timings."""
_LARGEST_HEADER_BYTES = 100 * 1024**2
"""The safetensors format allows no longer header; a longer one means that the file is none."""
BESIDE_SLOT_BYTES = 4 * 1024**2
"""What goes with a slot: a version's manifest (the longest are those of many experts) and its folder."""
_BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a checkpoint's files hold: numbers (parameters), and bytes in the files' own type."""

    num_parameters: int
    num_bytes: int


def longest_row_tokens(config: LaminarConfig) -> int:
    """The longest trajectory that can be trained: prompt, answers, observations, in all its chains."""
    return config.environment.max_trajectory_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens


def longest_evaluation_tokens(config: LaminarConfig) -> int:
    """The longest trajectory of an evaluation, whose answers may have another limit."""
    answer = config.eval.max_new_tokens or config.rollout.max_new_tokens
    return config.environment.max_trajectory_tokens or config.data.max_prompt_tokens + answer


def plays_greedy(config: LaminarConfig) -> bool:
    """Whether each group plays a greedy answer, which its algorithm compares the others with and does not train."""
    return getattr(algorithm_options(config), "baseline", None) == "greedy"


def members_per_group(config: LaminarConfig) -> int:
    """Trajectories of a group: its attempts, and a greedy one if the algorithm asks for it."""
    return config.rollout.group_size + plays_greedy(config)


def bytes_per_group(config: LaminarConfig) -> int:
    """Payload bytes reserved in the buffer when a group is claimed: its longest possible size."""
    return members_per_group(config) * (longest_row_tokens(config) * _BYTES_PER_TOKEN + _BYTES_PER_TRAJECTORY)


def groups_within_bytes(config: LaminarConfig) -> int:
    """Groups that fit into `experience.max_bytes`."""
    return config.experience.max_bytes // bytes_per_group(config)


def groups_within_staleness(config: LaminarConfig) -> int | None:
    """Groups that the staleness rule admits at once, (K + 1) * B; None if unbounded."""
    bound = config.staleness.bound
    return None if bound is None else (bound + 1) * config.trainer.prompts_per_step


def most_admitted_groups(config: LaminarConfig) -> int:
    """Groups that may be outstanding at once, by staleness and by bytes."""
    by_bytes, by_staleness = groups_within_bytes(config), groups_within_staleness(config)
    return by_bytes if by_staleness is None else min(by_bytes, by_staleness)


def peak_buffer_bytes(config: LaminarConfig) -> int:
    """Most payload bytes that the buffer may hold."""
    return most_admitted_groups(config) * bytes_per_group(config)


def peak_spool_bytes(config: LaminarConfig) -> int:
    """Most bytes of the replay spool on disk: all steps since the oldest kept checkpoint, with the longest answers."""
    steps = config.checkpoint.keep * config.checkpoint.every_steps
    return min(steps, config.run.max_steps) * config.trainer.prompts_per_step * bytes_per_group(config)


def shares(total: int, parts: int) -> list[int]:
    """`total` things over `parts` places as evenly as whole numbers allow; the first places take the remainder."""
    base, remainder = divmod(total, parts)
    return [base + (place < remainder) for place in range(parts)]


def num_row_shares(config: LaminarConfig) -> int:
    """Parts into which a mini-batch's rows are dealt: one a rank, or one a group of ranks that share each row."""
    return config.trainer.num_ranks // config.trainer.sequence_parallel_size


def most_micro_batch_tokens(config: LaminarConfig) -> int:
    """Most tokens of one micro-batch, on all the ranks that share its rows."""
    return config.trainer.max_tokens_per_micro_batch * config.trainer.sequence_parallel_size


def most_micro_batches(config: LaminarConfig, num_rows: int) -> int:
    """Upper bound on the micro-batches that one share of `num_rows` rows needs: when all have the greatest length."""
    return math.ceil(num_rows / max(1, most_micro_batch_tokens(config) // longest_row_tokens(config)))


def published_bytes(config: LaminarConfig, size: ModelSize) -> int:
    """Bytes of one published version: the checkpoint's numbers in the type they are trained in."""
    per_number = _BYTES_PER_NUMBER.get(config.model.dtype)
    return size.num_bytes if per_number is None else size.num_parameters * per_number


def is_one_machine(config: LaminarConfig) -> bool:
    """Whether Ray is started for this machine alone, so that weights need not travel."""
    return config.cluster.ray_address == "local"


def num_weight_slots(config: LaminarConfig) -> int:
    """Slots for weights in one machine's shared memory: kept versions, the one being written, one an engine that maps.

    On a cluster one more, for the version that is being passed on: without it a slow chain would hold up the trainer.
    """
    num_mapping = config.rollout.num_workers if config.rollout.engine.may_map_weights else 0
    return config.relay.keep_versions + 1 + num_mapping + (not is_one_machine(config))


def slot_bytes(file_bytes: int) -> int:
    """Bytes of shared memory that a slot takes with what goes with it; memory comes in whole pages."""
    return -(-file_bytes // PAGESIZE) * PAGESIZE + BESIDE_SLOT_BYTES


def repack_limits(config: LaminarConfig) -> RepackLimits:
    """What `[rollout.repack]` says, for plans; tokens as the engines count them."""
    repack, most = config.rollout.repack, config.rollout.engine.max_running
    if repack.flops_per_byte:
        most = min(most, request_bound(repack.flops_per_byte, _BYTES_PER_NUMBER.get(config.model.dtype, 2)))
    return RepackLimits(repack.kv_high, repack.kv_limit, repack.headroom_tokens, most, repack.crowded_tokens)


def read_model_size(folder: Path) -> ModelSize | None:
    """The size of a Hugging Face model from the headers of its safetensors files; None if there are none to read."""
    num_parameters = num_bytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        header = _read_header(file)
        if header is None:
            return None
        for name, tensor in header.items():
            if name != "__metadata__":
                num_parameters += math.prod(tensor["shape"])
                num_bytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return ModelSize(num_parameters, num_bytes) if num_bytes else None


def _read_header(file: Path) -> dict[str, dict[str, list[int]]] | None:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= _LARGEST_HEADER_BYTES else None
    except (OSError, struct.error, ValueError):
        return None
    return header if isinstance(header, dict) else None
