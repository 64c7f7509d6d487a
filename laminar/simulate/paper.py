"""The paper's three models, machines and systems (arXiv 2510.12633), as the simulator takes them.

The few constants at the top were fitted on the 32B model alone; everything else follows from published sizes. `README.md`
has the table with origins.
"""

from dataclasses import dataclass
from typing import Literal

from laminar.errors import ConfigError
from laminar.policies.repack import RepackLimits, request_bound
from laminar.simulate.cluster import Cluster, Engine, Failure, Trainer, Transfers
from laminar.simulate.system import Kind, Repack, System
from laminar.simulate.timings import StepTimes, load_lengths, load_step_times
from laminar.simulate.workload import Workload

TRAIN_FLOPS = 330e12
"""Fitted: arithmetic a GPU gets out of training, at 6 operations a parameter and token."""
MINI_BATCH_SECONDS = 3.0
"""Fitted: what an optimizer update costs besides its tokens: collectives, optimizer, uneven ranks."""
OVERHEAD_SECONDS = 13e-3
"""Fitted: what the host adds to each decode step."""
REQUEST_OVERHEAD_SECONDS = 25e-6
"""Fitted: the same, for every running request."""
CACHE_SHARE = 0.65
"""Fitted (figure 9): share of a GPU's memory for weights and cache together."""
PUBLISH_BYTES_PER_SECOND = 102e9
"""Fitted: 65.5 GB in 0.64 s (the actor's stall)."""
LOAD_BYTES_PER_SECOND = 117e9
"""Fitted: 65.5 GB in 0.558 s (figure 14, best)."""
SYNC_BYTES_PER_SECOND = 82e9
"""Fitted: 65.5 GB in 0.80 s on four machines (figure 14, global)."""
SYNC_LEVEL_SHARE = 0.053
"""Fitted: 0.97 s on 64 machines."""
SWITCH_BYTES_PER_SECOND = 3e9
"""Fitted: what verl loses between its phases (parameters and optimizer to the host and back), for the model's bytes."""
HOP_BYTES_PER_SECOND = 200e9
"""Eight network cards of 25 GB/s effective each."""
HOP_START_SECONDS = 5e-4
"""Fitted: figure 18."""

PROMPT_TOKENS = 150
GROUP_SIZE, PROMPTS_PER_STEP, MINI_BATCHES = 16, 512, 16
MAX_NEW_TOKENS = 16_384
MAX_CONCURRENCY = 1024
MAX_RUNNING = 256
"""vLLM's default, and figure 9's: the cache fills for 112 s, and when nothing waits any more 238 answers run."""
GPU_BYTES = 80e9
PEAK_FLOPS, MEMORY_BYTES_PER_SECOND = 989e12, 3.35e12
PREFILL_EFFICIENCY = 0.5
AREAL_STALENESS, AREAL_SYNCS_PER_STEP = 2, 4
"""Fitted: how far AReaL runs ahead, and its global broadcasts in a step."""
ANSWERS_IN_FLIGHT = 768
"""Fitted (table 1: the least squares of the relative errors of all its tokens/s, latencies and cache use): what a replica of
ours begins together, or its share of a batch if that is more; it takes new ones when all have ended or been moved away."""
KV_HIGH, KV_LIMIT, HEADROOM_TOKENS = 0.8, 0.95, 512

Model = Literal["7B", "32B", "72B"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Published sizes.

    Attributes:
        parameters: of the model.
        layers: of the model.
        kv_bytes_per_token: keys and values of all layers in bfloat16.
        rollout_gpus: over which a replica is split.
        lengths: name of its answer lengths.
    """

    parameters: float
    layers: int
    kv_bytes_per_token: int
    rollout_gpus: int
    lengths: str

    @property
    def num_bytes(self) -> float:
        """In bfloat16."""
        return 2 * self.parameters


MODELS: dict[Model, ModelFacts] = {
    "7B": ModelFacts(7.62e9, 28, 2 * 2 * 28 * 4 * 128, 1, "7B_math"),
    "32B": ModelFacts(32.8e9, 64, 2 * 2 * 64 * 8 * 128, 4, "32B_math"),
    "72B": ModelFacts(72.7e9, 80, 2 * 2 * 80 * 8 * 128, 8, "72B_math"),
}


def step_times(model: Model) -> StepTimes:
    """Figure 4, at the number of GPUs that a replica has; the 72B model is not in it.

    Its times follow from the 32B model's on eight GPUs: figure 4's steps of one request on 2, 4 and 8 GPUs are 5.4 ms (84 us
    a layer) and 1.063 times the reading of the weights; the rest of a step is reading keys and values.
    """
    if model == "7B":
        return load_step_times("7B_TP1")
    if model == "32B":
        return load_step_times("32B_TP4")
    base, small, large = load_step_times("32B_TP8"), MODELS["32B"], MODELS["72B"]
    reading = large.num_bytes / large.rollout_gpus / MEMORY_BYTES_PER_SECOND
    alone = 5.4e-3 * large.layers / small.layers + 1.063 * reading
    grown = (base.seconds - base.seconds[0]) * large.kv_bytes_per_token / small.kv_bytes_per_token
    return StepTimes(base.batch, alone + grown, base.context_tokens)


def paper_workload(model: Model, lengths: str | None = None) -> Workload:
    """DAPO-Math: 512 prompts of 16 answers a step, with the model's lengths or others by name."""
    drawn = load_lengths(lengths or MODELS[model].lengths)
    return Workload(drawn, PROMPT_TOKENS, MAX_NEW_TOKENS, GROUP_SIZE, PROMPTS_PER_STEP)


def paper_engine(model: Model) -> Engine:
    """One replica."""
    facts = MODELS[model]
    cache_bytes = CACHE_SHARE * GPU_BYTES * facts.rollout_gpus - facts.num_bytes
    return Engine(
        times=step_times(model),
        num_gpus=facts.rollout_gpus,
        capacity_tokens=int(cache_bytes / facts.kv_bytes_per_token),
        max_running=MAX_RUNNING,
        prefill_tokens_per_second=facts.rollout_gpus * PEAK_FLOPS * PREFILL_EFFICIENCY / (2 * facts.parameters),
        overhead_seconds=OVERHEAD_SECONDS,
        request_overhead_seconds=REQUEST_OVERHEAD_SECONDS,
    )


def paper_cluster(model: Model, train_gpus: int, rollout_gpus: int, failures: tuple[Failure, ...] = ()) -> Cluster:
    """Machines of eight GPUs."""
    facts = MODELS[model]
    num_replicas = rollout_gpus // facts.rollout_gpus
    if num_replicas < 1:
        raise ConfigError(f"{rollout_gpus} GPUs hold no replica of the {model} model; give {facts.rollout_gpus} or more")
    return Cluster(
        engine=paper_engine(model),
        num_replicas=num_replicas,
        trainer=Trainer(train_gpus, TRAIN_FLOPS / (6 * facts.parameters), MINI_BATCHES, MINI_BATCH_SECONDS),
        transfers=Transfers(
            model_bytes=facts.num_bytes,
            publish_bytes_per_second=PUBLISH_BYTES_PER_SECOND,
            load_bytes_per_second=LOAD_BYTES_PER_SECOND,
            hop_bytes_per_second=HOP_BYTES_PER_SECOND,
            hop_start_seconds=HOP_START_SECONDS,
            sync_bytes_per_second=SYNC_BYTES_PER_SECOND,
            sync_level_share=SYNC_LEVEL_SHARE,
            switch_bytes_per_second=SWITCH_BYTES_PER_SECOND,
        ),
        failures=failures,
    )


def paper_system(kind: Kind, num_replicas: int, *, repack: bool = True) -> System:
    """The system with the paper's settings; ours is unbounded and generates in batches of a replica, as there."""
    if kind == "partial":
        return System(
            kind="partial",
            weight_update="in_flight",
            max_staleness=AREAL_STALENESS,
            max_in_flight_groups=MAX_CONCURRENCY // GROUP_SIZE,
            syncs_per_step=AREAL_SYNCS_PER_STEP,
        )
    bound = request_bound(PEAK_FLOPS / MEMORY_BYTES_PER_SECOND, 2)
    limits = RepackLimits(KV_HIGH, KV_LIMIT, HEADROOM_TOKENS, bound)
    return System(
        kind=kind,
        max_staleness=None,
        max_in_flight_groups=max(ANSWERS_IN_FLIGHT // GROUP_SIZE, PROMPTS_PER_STEP // num_replicas),
        max_hold_seconds=1e9,
        refills=False,
        repack=Repack(limits) if repack and kind == "laminar" else None,
    )
