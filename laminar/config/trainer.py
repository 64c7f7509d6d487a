"""Settings of the trainer: `[trainer]` and the tables below it. Batch sizes are in prompts."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Plugin, Section


class DeepSpeedConfig(Section):
    """`[trainer.deepspeed]`: how parameters, gradients and optimizer state are split over ranks."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """0 replicates everything, 1 splits the optimizer state, 2 the gradients as well, 3 the parameters as well."""
    max_whole_parameter: int = Field(100_000, ge=0)
    """Under stage 3, parameters of at most so many numbers stay whole on every rank between steps."""
    offload_optimizer: bool = False
    """Keep the optimizer state in the host's memory, and update there; needs stage 1 or above."""


class LoraConfig(Section):
    """`[trainer.lora]`: train low-rank adapters instead of all weights; needs the extra `lora`."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0)
    """An adapter's output is scaled by alpha / rank."""
    targets: list[str] = Field(default_factory=list)
    """Names, or ends of names, of the linear layers that get one, such as `q_proj`; empty: all but the output head."""


class AlgorithmConfig(Plugin):
    """`[trainer.algorithm]`: how rewards become advantages and a loss."""

    kind: str = "grpo"
    """A preset such as `grpo`, `dapo`, `rloo`, `gspo` or `decoupled_ppo`, or `"package.module:Attr"`."""


class CorrectionConfig(Section):
    """`[trainer.correction]`: what to do about tokens that another distribution sampled than the one at batch start.

    With d = log-prob at batch start - log-prob of the engine, w = exp(d). A sequence is a trajectory, all its chains
    together.
    """

    weight: Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop"] = "none"
    """What multiplies the policy loss: w of the token or of the sequence, truncated at `weight_max` (TIS) or 0 above it
    (MIS), or 0 outside [`weight_min`, `weight_max`] (IcePop); the denominator stays."""
    weight_max: float = Field(2.0, gt=0)
    """Upper bound of the weight."""
    weight_min: float = Field(0.5, ge=0)
    """Lower bound of the weight under `icepop`."""
    geometric_min: float | None = Field(None, gt=0, lt=1)
    """Sequences whose geometric mean of w is below this leave numerator and denominator."""
    geometric_max: float | None = Field(None, gt=1)
    """Sequences whose geometric mean of w is above this leave numerator and denominator."""
    max_k3: float | None = Field(None, gt=0)
    """Sequences whose mean of w - 1 - d exceeds this, in nats a token, leave numerator and denominator."""

    @property
    def masks_sequences(self) -> bool:
        """Whether whole sequences may leave the loss."""
        return any(bound is not None for bound in (self.geometric_min, self.geometric_max, self.max_k3))

    @property
    def is_on(self) -> bool:
        """Whether it changes anything."""
        return self.weight != "none" or self.masks_sequences


class SpikesConfig(Section):
    """`[trainer.spikes]`: what to do about an update whose loss, KL or gradient norm is out of all proportion.

    Out of proportion is what lies above median + `factor` x robust standard deviation (1.4826 x the median absolute
    deviation, at least a tenth of the median) of the last `window_updates` updates, if it is also above 0.01 (loss, KL in
    nats a token) or `max_grad_norm` (gradient norm).
    """

    action: Literal["off", "notice", "skip", "stop"] = "notice"
    """Nothing; a notice that names the trajectory with the largest share; leave the update, and the rest of its step,
    out; or end the run before it."""
    factor: float = Field(20, gt=0)
    """Robust standard deviations above the median."""
    window_updates: int = Field(64, ge=3)
    """Updates that the scale is taken from."""
    min_updates: int = Field(16, ge=3)
    """Updates before anything is judged."""


class EmulatedTrainerConfig(Section):
    """`[trainer.emulated]`: what a trainer that only pretends takes for a step."""

    step_seconds: list[Annotated[float, Field(ge=0)]] = Field(default_factory=lambda: [1.0], min_length=1)
    """Duration of the steps in seconds, one after another, from the first again at the end."""
    tokens_per_second: float | None = Field(None, gt=0)
    """A step takes the time of its sampled tokens at this pace besides; unset: lengths do not count."""


class TrainerConfig(Section):
    """`[trainer]`: the step."""

    kind: Literal["deepspeed", "emulated"] = "deepspeed"
    """`deepspeed` trains; `emulated`, one rank, takes batches, sleeps, and publishes the model's weights slightly scaled:
    for trying out a rollout tier."""
    num_ranks: int = Field(1, ge=1)
    """Trainer processes, one a device."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    num_gpus_per_rank: float = Field(0, ge=0)
    """GPUs that Ray sets aside for each rank."""
    prompts_per_step: int = Field(8, ge=1)
    """Groups trained in one step."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer updates in one step; each sees an equal share of the groups (the first ones take the remainder)."""
    epochs: int = Field(1, ge=1)
    """How often a step goes through its mini-batches; advantages and proximal log-probs are made once, at batch start."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1)
    """Most tokens, padding included, in one forward and backward pass."""
    sequence_parallel_size: int = Field(1, ge=1)
    """So many ranks share each row, a stretch of its tokens each: for rows that one device has no room for. It divides
    `num_ranks` and the model's attention heads; the micro-batch limit then holds for each rank's stretches."""
    share_prompts: bool = True
    """Compute a group's common prompt once in a forward pass; the gradient is the same."""
    pack_rows: Literal["auto", "on", "off"] = "auto"
    """Rows of a micro-batch lie one behind the other, without padding and with prompts of their own. `auto`: on GPUs, where
    `flash-attn` is installed and the model is bfloat16; elsewhere packing is slower than padding."""
    peak_flops: float | None = Field(None, gt=0)
    """Operations a second that one device could do in the training dtype, for `throughput/model_flops_utilisation`. Unset:
    the data sheet's, for GPUs known by name and bfloat16; otherwise that metric is left out."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    critic_learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic, if the algorithm has one; it follows the same schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak at which a decaying schedule ends."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's first moment."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the gradient's second moment."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    keep_reference_on: Literal["device", "cpu"] = "device"
    """Where the frozen reference stays between its passes; `cpu` saves device memory, and moves it twice a step."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    max_filter_rounds: int = Field(64, ge=1)
    """So many rounds (of `prompts_per_step` groups) filtered or failed while one batch is gathered are too many."""
    on_uninformative: Literal["stop", "wait"] = "stop"
    """Then the run stops with the reason, or it waits on, with a warning each round, until `run.no_progress_seconds`."""
    mismatch_alarm: float = Field(0.05, gt=0)
    """A notice warns if engine and trainer are further apart (KL, nats a token) on tokens of the newest weights."""
    start_seconds: float = Field(300, gt=0)
    """Deadline for all ranks to meet and load the model."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    spikes: SpikesConfig = SpikesConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    lora: LoraConfig = LoraConfig()
    emulated: EmulatedTrainerConfig = EmulatedTrainerConfig()
