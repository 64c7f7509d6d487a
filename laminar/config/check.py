"""Rules between settings, judged before any process starts.

Rules of a single setting live in the models; the rows of the data are judged by the data loader; what only the machine can
tell (memory, ports, GPUs) is found out at start.
"""

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec

from laminar.config.addresses import http_fault, port_fault
from laminar.config.check_algorithm import algorithm_faults
from laminar.config.check_model import model_faults
from laminar.config.check_plugins import algorithm_options, needs_exact_logprobs, option_notes, plugin_faults
from laminar.config.check_sources import source_faults, source_notes
from laminar.config.check_warnings import episode_warnings, machine_warnings, pace_warnings
from laminar.config.root import LaminarConfig
from laminar.config.sizes import (
    bytes_per_group,
    longest_evaluation_tokens,
    longest_row_tokens,
    members_per_group,
    most_micro_batch_tokens,
)
from laminar.errors import ConfigError
from laminar.experience.client import hide_password, url_fault

_RAY_ADDRESS = re.compile(r"local|auto|[^\s/]+:\d+|ray://\S+:\d+")


def check_config(config: LaminarConfig, num_cores: int | None = None) -> list[str]:
    """Refuse what cannot work; name what works but may surprise.

    Args:
        config: a loaded config (local paths are absolute, the user's own modules can be found).
        num_cores: cores of the machine that would run it; None: ask this one.

    Returns:
        Notes and warnings, one sentence each.

    Raises:
        ConfigError: naming everything that is wrong, one sentence each.
    """
    rules = (
        _group_faults,
        _capacity_faults,
        _sampling_faults,
        _evaluation_faults,
        _engine_faults,
        _split_faults,
        _gpu_faults,
        _spike_faults,
        _relay_faults,
        _address_faults,
        source_faults,
        model_faults,
        plugin_faults,
        algorithm_faults,
    )
    faults = [fault for rule in rules for fault in rule(config)]
    if faults:
        head = f"{len(faults)} settings cannot work:" if len(faults) > 1 else ""
        raise ConfigError("\n  ".join([head, *faults] if head else faults))
    cores = num_cores or len(os.sched_getaffinity(0))
    return [
        *source_notes(config),
        *option_notes(config),
        *pace_warnings(config),
        *episode_warnings(config),
        *machine_warnings(config, cores),
    ]


def _group_faults(config: LaminarConfig) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    baseline = getattr(algorithm_options(config), "baseline", "none")
    if rollout.group_size == 1 and baseline in ("group_mean", "leave_one_out"):
        yield (
            f"`rollout.group_size` is 1: {trainer.algorithm.kind} compares a group's members, so every advantage "
            "would be 0; use 2 or more"
        )
    elif rollout.min_group_size > members_per_group(config):
        yield (
            f"`rollout.min_group_size` is {rollout.min_group_size}, above `rollout.group_size` = {rollout.group_size}: "
            "no group would ever be trained; lower it"
        )
    if rollout.over_provision > 1 and config.staleness.bound == 0:
        yield (
            f"`rollout.over_provision` is {rollout.over_provision:g} with `staleness.max_staleness` = 0: a batch is then "
            "exactly what was admitted, and nothing may be let go; set it to 1, or the bound to 1 or more"
        )
    if trainer.mini_batches > trainer.prompts_per_step:
        yield (
            f"`trainer.mini_batches` is {trainer.mini_batches}, above `trainer.prompts_per_step` = "
            f"{trainer.prompts_per_step}: a mini-batch needs at least one group; lower it"
        )


def _capacity_faults(config: LaminarConfig) -> Iterator[str]:
    longest, limit = longest_row_tokens(config), config.environment.max_trajectory_tokens
    prompt, answer = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    parts = f"`data.max_prompt_tokens` {prompt} + `rollout.max_new_tokens` {answer}"
    source = parts if limit is None else "`environment.max_trajectory_tokens`"
    row = f"the longest trajectory has {longest} tokens ({source}) and must fit; raise the one or lower the others"
    if limit is not None and limit <= prompt:
        yield (
            f"`environment.max_trajectory_tokens` is {limit}, not above `data.max_prompt_tokens` = {prompt}: "
            "a long prompt would leave no token for an answer; raise it"
        )
    needed = config.trainer.prompts_per_step * bytes_per_group(config)
    if config.experience.max_bytes < needed:
        yield (
            f"`experience.max_bytes` is {config.experience.max_bytes}: one step's {config.trainer.prompts_per_step} groups "
            f"reserve {bytes_per_group(config)} bytes each, so it must be at least {needed}"
        )
    if most_micro_batch_tokens(config) < longest:
        yield f"`trainer.max_tokens_per_micro_batch` is {config.trainer.max_tokens_per_micro_batch}: {row}"
    if config.rollout.engine.max_cached_tokens < longest:
        yield f"`rollout.engine.max_cached_tokens` is {config.rollout.engine.max_cached_tokens}: {row}"


def _split_faults(config: LaminarConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.num_ranks % trainer.sequence_parallel_size:
        yield (
            f"`trainer.sequence_parallel_size` is {trainer.sequence_parallel_size}, which does not divide "
            f"`trainer.num_ranks` = {trainer.num_ranks}: each group of ranks needs that many"
        )
    if trainer.deepspeed.offload_optimizer and trainer.deepspeed.zero_stage == 0:
        yield (
            "`trainer.deepspeed.offload_optimizer` is true, but `trainer.deepspeed.zero_stage` is 0, which DeepSpeed cannot "
            "offload: set the stage to 1, 2 or 3, or the former to false"
        )
    if trainer.lora.rank and trainer.kind != "emulated" and find_spec("peft") is None:
        yield (
            f"`trainer.lora.rank` is {trainer.lora.rank}, but peft is not installed: `pip install laminar-rl[lora]`, or set "
            "it to 0"
        )


def _gpu_faults(config: LaminarConfig) -> Iterator[str]:
    """Ray shares out one GPU, or gives whole ones."""
    numbers = {
        "trainer.num_gpus_per_rank": config.trainer.num_gpus_per_rank,
        "rollout.engine.num_gpus": config.rollout.engine.num_gpus,
    }
    for setting, number in numbers.items():
        if number > 1 and number % 1:
            whole = int(number)
            yield f"`{setting}` is {number:g}: above 1 only whole GPUs can be set aside; use {whole} or {whole + 1}"


def _spike_faults(config: LaminarConfig) -> Iterator[str]:
    spikes = config.trainer.spikes
    if spikes.action == "stop" and spikes.window_updates < spikes.min_updates:
        yield (
            f"`trainer.spikes.window_updates` is {spikes.window_updates}, below `trainer.spikes.min_updates` = "
            f"{spikes.min_updates}: nothing would ever be judged; raise the one, or lower the other"
        )


def _sampling_faults(config: LaminarConfig) -> Iterator[str]:
    kind, sampling = config.trainer.algorithm.kind, config.rollout.sampling
    if (sampling.top_p == 1 and sampling.top_k == -1) or not needs_exact_logprobs(kind):
        return
    reason = f"{kind} needs the exact log-probs of the sampled tokens, and the trainer cannot mirror this filter"
    if sampling.top_p < 1:
        yield f"`rollout.sampling.top_p` is {sampling.top_p}: {reason}; set it to 1"
    if sampling.top_k != -1:
        yield f"`rollout.sampling.top_k` is {sampling.top_k}: {reason}; set it to -1"


def _relay_faults(config: LaminarConfig) -> Iterator[str]:
    relay = config.relay
    if relay.num_gpus and relay.transport != "collective":
        yield (
            f"`relay.num_gpus` is {relay.num_gpus:g}, but transport `{relay.transport}` uses no GPU; set it to 0, or "
            '`relay.transport` to "collective"'
        )
    is_shared = 0 < relay.num_gpus < 1 and (config.rollout.engine.num_gpus > 0 or config.trainer.num_gpus_per_rank > 0)
    if is_shared and not relay.shares_gpu_by_mps:
        yield (
            f"`relay.num_gpus` is {relay.num_gpus:g}: NCCL would share a GPU with an engine or a trainer. Kernels of two "
            "processes do not run at once without MPS, and a waiting NCCL kernel takes the other's time; set it to 1, to 0 "
            "(gloo), or start MPS and set `relay.shares_gpu_by_mps`"
        )
    if relay.transport == "mooncake" and find_spec("mooncake") is None:
        yield '`relay.transport` is "mooncake", which is not installed: `pip install laminar-rl[mooncake]`'


def _address_faults(config: LaminarConfig) -> Iterator[str]:
    """Addresses that nobody could ever answer at, and folders that are files."""
    redis_url, ray_address = config.experience.redis_url, config.cluster.ray_address
    if redis_url != "embedded" and (fault := url_fault(redis_url)):
        yield f'`experience.redis_url` is "{hide_password(redis_url)}": {fault}; "embedded" starts a server for the run'
    if not _RAY_ADDRESS.fullmatch(ray_address) or (":" in ray_address and port_fault(f"//{ray_address.rpartition('/')[2]}")):
        yield f'`cluster.ray_address` is "{ray_address}": write "local", "auto", or a host:port'
    if config.alerts.webhook and (fault := http_fault(config.alerts.webhook)):
        yield f"`alerts.webhook`: {fault}"
    for setting, folder in {"run.directory": config.run.directory, "relay.root": config.relay.root}.items():
        if os.path.exists(folder) and not os.path.isdir(folder):
            yield f'`{setting}` is "{folder}": that is a file; give a folder'


def _evaluation_faults(config: LaminarConfig) -> Iterator[str]:
    evaluation, longest = config.eval, longest_evaluation_tokens(config)
    if not evaluation.path:
        return
    if evaluation.samples_per_prompt > 1 and evaluation.temperature == 0:
        yield (
            f"`eval.samples_per_prompt` is {evaluation.samples_per_prompt}, but `eval.temperature` is 0: every sample would "
            "be the same; set the temperature above 0, such as 1"
        )
    if config.rollout.engine.max_cached_tokens < longest:
        yield (
            f"`rollout.engine.max_cached_tokens` is {config.rollout.engine.max_cached_tokens}: the longest trajectory of an "
            f"evaluation has {longest} tokens (`eval.max_new_tokens`) and must fit; raise the one or lower the other"
        )


def _engine_faults(config: LaminarConfig) -> Iterator[str]:
    engine = config.rollout.engine
    if engine.kind == "torch" and engine.tensor_parallel_size > 1:
        yield (
            f"`rollout.engine.tensor_parallel_size` is {engine.tensor_parallel_size}: the torch engine does not split a "
            'model; set it to 1, or `rollout.engine.kind` to "sglang"'
        )
    if config.trainer.kind == "emulated" and config.trainer.num_ranks > 1:
        yield f"`trainer.num_ranks` is {config.trainer.num_ranks}: the emulated trainer has one rank; set it to 1"
    if engine.weight_load == "pinned" and engine.kind in ("torch", "emulated"):
        yield (
            f'`rollout.engine.weight_load` is "pinned", but the {engine.kind} engine maps or reads the file by itself; '
            'set it to "disk", or `rollout.engine.kind` to "sglang"'
        )
    if 0 < engine.num_gpus < engine.tensor_parallel_size and engine.tensor_parallel_size > 1:
        yield (
            f"`rollout.engine.num_gpus` is {engine.num_gpus:g}: a replica split over `tensor_parallel_size` = "
            f"{engine.tensor_parallel_size} GPUs needs that many"
        )
