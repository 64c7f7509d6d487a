"""Settings of the rollout tier: `[rollout]` and the tables below it."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Section


class SamplingConfig(Section):
    """`[rollout.sampling]`: how tokens are drawn in training. The trainer mirrors these."""

    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of training rollouts (evaluation has its own)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; 1 switches it off."""
    top_k: Literal[-1] | Annotated[int, Field(ge=1)] = -1
    """Number of candidates; -1 switches it off."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Token ids that end an answer, besides the end ids of the model and of its tokenizer."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end an answer, matched by the worker."""


class EngineConfig(Section):
    """`[rollout.engine]`: the server that generates, one a worker."""

    kind: str = "torch"
    """`torch` (CPU, small), `sglang`, `emulated` (no model: a large engine's pace on a share of a core), or your own as
    `"package.module:Attr"` (`rollout/engines/README.md`)."""
    python: str = ""
    """Interpreter that starts the engine; empty: the run's own. SGLang lives in an environment of its own."""
    max_running: int = Field(64, ge=1)
    """Requests decoded at once."""
    max_cached_tokens: int = Field(65536, ge=1)
    """Capacity of the key-value cache in tokens."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of the engine process."""
    num_gpus: float = Field(0, ge=0)
    """GPUs that Ray sets aside for the engine; 0: it runs on the CPU; a share below 1 lets the trainer use the same GPU."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs over which one replica is split."""
    swap: Literal["retract", "in_place"] = "retract"
    """What `in_flight` updates do to running requests: recompute their cache under the new weights, or keep it."""
    weight_load: Literal["disk", "pinned"] = "disk"
    """How SGLang takes a version from shared memory: as a file, or every rank copies its own part, from pinned memory on a
    GPU (models of the Llama family)."""
    probe_tolerance: float | None = Field(None, gt=0)
    """After each swap the engine's log-probs of fixed tokens may differ from the trainer's by so many nats a token on
    average; beyond that its weights count as unknown and it is restarted. Unset: 0.01 for float32 weights, else 0.3."""
    start_seconds: float = Field(300, gt=0)
    """Deadline for the engine to become healthy."""
    request_seconds: float = Field(600, gt=0)
    """Deadline for one answer."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further command-line flags of the engine, by name without leading dashes. The torch and the emulated engine take some,
    SGLang any."""

    @property
    def may_map_weights(self) -> bool:
        """Whether it may hold on to a relay's slot while it serves; nobody knows of a kind of the user's own."""
        return self.kind == "torch" or ":" in self.kind


class RepackConfig(Section):
    """`[rollout.repack]`: replicas of an old version hand their last trajectories to each other, so that most swap early."""

    enabled: bool = True
    """Whether the manager makes plans. With `weight_update` other than `trajectory` there is nothing to plan."""
    interval_seconds: float = Field(5, gt=0)
    """Time between plans; one is made right after a new version, too."""
    kv_high: float = Field(0.8, gt=0, le=1)
    """Share of its key-value cache below which a replica with nothing waiting counts as idle."""
    kv_limit: float = Field(0.95, gt=0, le=1)
    """Share of a destination's cache that may be used, growth included."""
    headroom_tokens: int = Field(512, ge=0)
    """Growth that is planned for each trajectory, in tokens."""
    crowded_tokens: int | None = Field(None, ge=1)
    """For how many more tokens a trajectory may share a full cache. Who is expected to need more shares one that is emptier
    in proportion, since every step is slower in a full one: lower, and the longest answers take less longer, but fewer
    replicas are released. Unset: `kv_limit` holds for all."""
    flops_per_byte: float | None = Field(None, gt=0)
    """Arithmetic speed of an engine's GPU over its memory bandwidth, such as 295 for an H100: bounds a destination's
    trajectories to the batch whose steps are still bound by reading weights. Unset: `rollout.engine.max_running` does."""
    deadline_seconds: float = Field(30, gt=0)
    """Longest time for one move; what is not done by then is undone."""


class RolloutConfig(Section):
    """`[rollout]`: workers, groups and lengths."""

    num_workers: int = Field(1, ge=1)
    """Engine replicas, one worker each."""
    group_size: int = Field(8, ge=1)
    """Sibling attempts at one prompt."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest answer in tokens."""
    weight_update: Literal["trajectory", "turn", "in_flight"] | None = None
    """When a replica takes new weights: with no open trajectory, between turns, or at once.
    Default: `in_flight` with fewer than four replicas, else `trajectory`."""
    max_hold_seconds: float = Field(300, gt=0)
    """Longest time that open trajectories may hold back a swap before it happens in flight."""
    max_in_flight_groups: int = Field(64, ge=1)
    """Most groups that one worker plays at once."""
    adapt_in_flight: bool = True
    """Play fewer while the engine preempts requests or its cache is full, and slowly more again."""
    over_provision: float = Field(1.0, ge=1, le=4)
    """Groups begun for a step over those it needs, within what the staleness bound admits: when a batch is complete, up to
    (this - 1) * `trainer.prompts_per_step` groups that it has overtaken are let go and their prompts issued
    again. 1: off. Long answers are let go more often than short ones."""
    max_attempts: int = Field(3, ge=1)
    """Attempts at one trajectory, or at one group's lease, before it is given up."""
    group_failure: Literal["refill", "shrink", "drop"] = "shrink"
    """What a member that failed in all its attempts does to its group: it is played again, as often in all as the group has
    members, then as `shrink`; or the group goes on with the others, at least `min_group_size`; or the group is given up."""
    min_group_size: int = Field(2, ge=1)
    """Fewest members without failure for a group to be trained; below it the group is given up."""
    max_failure_ratio: float = Field(0.9, gt=0, le=1)
    """Share of failed trajectories among the last 64 that stops the run with the first error's text."""
    lease_seconds: float = Field(30, gt=0)
    """A worker that is silent for so long loses its groups to others."""
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    repack: RepackConfig = RepackConfig()

    def wants_manager(self, num_workers: int) -> bool:
        """Whether there is something to plan with so many workers: replicas that drain, and repack is on."""
        return self.repack.enabled and num_workers > 1 and self.effective_weight_update == "trajectory"

    @property
    def effective_weight_update(self) -> Literal["trajectory", "turn", "in_flight"]:
        """`weight_update`, with its default filled in (DESIGN: fewer than four replicas swap in flight)."""
        return self.weight_update or ("in_flight" if self.num_workers < 4 else "trajectory")
