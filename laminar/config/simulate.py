"""Settings of `laminar simulate`: what a run's own settings do not say. `[simulate]` changes nothing about a run."""

from typing import Annotated

from pydantic import Field

from laminar.config.section import Section

Quantile = Annotated[float, Field(ge=0, le=1e7)]


class SimulateConfig(Section):
    """`[simulate]`: how fast engines and trainer are, how long answers become (`laminar/simulate/README.md`)."""

    latency: str = "32B_TP4"
    """Decode steps of the paper's figure 4, such as `7B_TP1` or `32B_TP4`; the emulated engine's own option goes first."""
    decode_milliseconds: dict[str, Annotated[float, Field(ge=1e-3, le=1e6)]] = Field(default_factory=dict)
    """Measured decode steps instead: requests in the batch, from "1" on, and milliseconds."""
    decode_context_tokens: int = Field(4096, ge=1, le=10**8)
    """Context of the sequences that `decode_milliseconds` was measured with."""
    lengths: str = "32B_math"
    """Answer lengths of the paper's figure 17: `7B_math`, `32B_math`, `72B_math` or `7B_tool`."""
    length_quantiles: dict[str, Annotated[float, Field(ge=1, le=1e8)]] = Field(default_factory=dict)
    """Own answer lengths instead: quantiles such as "p50", in tokens, from "p0" or "p5" up to "p99.9" or "p100". On the
    command line a key with a dot keeps its quotes: `'simulate.length_quantiles."p99.9"=9000'`."""
    prompt_tokens: int | None = Field(None, ge=0, le=10**8)
    """Length of a prompt; unset: half of `data.max_prompt_tokens`."""
    num_turns: int = Field(1, ge=1, le=10_000)
    """Sampled turns of a trajectory."""
    turn_seconds_quantiles: dict[str, Quantile] = Field(default_factory=dict)
    """What the environment takes between two turns: quantiles such as "p50", in seconds; empty: nothing."""
    observation_tokens: int = Field(0, ge=0, le=10**8)
    """What the environment adds to the context between two turns."""
    model_parameters: float | None = Field(None, ge=1, le=1e15)
    """Parameters of the model, such as 7.6e9; unset: counted in the model's files, else 32.8e9."""
    prefill_tokens_per_second: float = Field(30_000.0, ge=100, le=1e12)
    """Context that one replica computes in a second."""
    overhead_milliseconds: float = Field(13.0, ge=0, le=1e6)
    """What the engine's host adds to each decode step; nothing is added to an emulated engine."""
    request_overhead_microseconds: float = Field(40.0, ge=0, le=1e9)
    """The same, for every running request."""
    train_flops: float = Field(260e12, ge=1e6, le=1e18)
    """Operations a second that one trainer GPU gets out of training, at 6 a parameter and token."""
    mini_batch_seconds: float = Field(3.0, ge=0, le=1e6)
    """What an optimizer update costs besides its tokens."""
    load_bytes_per_second: float = Field(117e9, ge=1e3, le=1e15)
    """At which a replica takes new weights from its machine's memory."""
    publish_bytes_per_second: float = Field(102e9, ge=1e3, le=1e15)
    """At which the trainer copies a version into its machine's memory."""
    gpus_per_machine: int = Field(8, ge=1, le=16_384)
    """GPUs that share a relay."""
    num_steps: int = Field(10, ge=2, le=10_000)
    """Steps simulated; the first three tenths are not measured."""
    seed: int = Field(0, ge=0)
    """Seed of lengths and environment times."""
