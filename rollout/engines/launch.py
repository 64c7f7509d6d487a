"""What to start as an engine, and its command line, by kind; a kind is one of `ENGINES`, or your own `EngineKind`.

Every command line ends up as a process that writes one JSON line with its `url` to a descriptor once it serves, and that
ends when its standard input does. This module starts nothing.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from laminar.config.rollout import EngineConfig
from laminar.config.section import Section
from laminar.errors import ConfigError
from laminar.plugins import resolve, validate_options
from laminar.simulate.timings import load_lengths, load_step_times
from laminar.types import WeightVersion
from rollout.engines.pinned_load import LOADER

Flag = str | int | float | bool

_DEFAULTS = EngineConfig()
SGLANG_LAUNCH = Path(__file__).with_name("sglang_launch.py")
SGLANG_CPU_FLAGS: dict[str, Flag] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.3,
}
"""What SGLang needs on a processor without AVX-512 and without its compiled kernels."""


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What a new engine process needs to know.

    Attributes:
        model: HF checkpoint folder.
        version: name of its weights.
        token: bearer token it will demand (handed over in the environment, not on the command line that everybody can read).
        run_id: the run that may change its weights.
        log: file for its output, appended.
        kind: engine kind, a key of `ENGINES` or `"package.module:Attr"`.
        python: interpreter; empty: ours.
        dtype: of the served weights; empty: the checkpoint's.
        num_gpus: GPUs set aside for it; 0: it runs on the CPU.
        tensor_parallel_size: GPUs over which the model is split.
        options: further flags, by name without dashes; true means a flag without value, false none.
        weights_request: file that names the slot to load, for an engine whose ranks do it by themselves.
    """

    model: Path
    version: WeightVersion
    token: str
    run_id: str
    log: Path
    kind: str = "torch"
    python: str = ""
    dtype: str = ""
    max_running: int = _DEFAULTS.max_running
    max_cached_tokens: int = _DEFAULTS.max_cached_tokens
    num_threads: int = _DEFAULTS.num_threads
    num_gpus: float = 0
    tensor_parallel_size: int = 1
    options: Mapping[str, Flag] = field(default_factory=dict)
    weights_request: Path | None = None


def torch_command(launch: EngineLaunch, ready_descriptor: int) -> list[str]:
    """Command line of the torch engine, which serves the checkpoint's dtype on the CPU."""
    values: dict[str, Flag] = {
        "model": str(launch.model),
        "weight-version": str(launch.version),
        "run-id": launch.run_id,
        "max-running": launch.max_running,
        "max-cached-tokens": launch.max_cached_tokens,
        "threads": launch.num_threads,
        "ready-fd": ready_descriptor,
        "lifeline": True,
    }
    return [launch.python or sys.executable, "-m", "rollout.engines.server", *as_flags({**values, **launch.options})]


def emulated_command(launch: EngineLaunch, ready_descriptor: int) -> list[str]:
    """Command line of the emulated engine, which takes the torch engine's flags and some of its own."""
    command = torch_command(launch, ready_descriptor)
    return ["rollout.engines.emulated_server" if part == "rollout.engines.server" else part for part in command]


def sglang_command(launch: EngineLaunch, ready_descriptor: int) -> list[str]:
    """Command line of SGLang, run by its own interpreter."""
    values: dict[str, Flag] = {
        "model-path": str(launch.model),
        "weight-version": str(launch.version),
        "dtype": launch.dtype or "auto",
        "max-running-requests": launch.max_running,
        "max-total-tokens": launch.max_cached_tokens,
        "tensor-parallel-size": launch.tensor_parallel_size,
        "skip-tokenizer-init": True,  # tokens in, tokens out
        "incremental-streaming-output": True,
        "log-level-http": "warning",
    }
    device = {} if launch.num_gpus else SGLANG_CPU_FLAGS
    flags = as_flags({**values, **device, **launch.options})
    own = [f"--ready-fd={ready_descriptor}"]
    if launch.weights_request is not None:
        own.append(f"--weights-request={launch.weights_request}")
        flags.append(f"--custom-weight-loader={LOADER}")
    return [launch.python or sys.executable, str(SGLANG_LAUNCH), *own, "--", *flags]


def as_flags(values: Mapping[str, Flag]) -> list[str]:
    """`--name=value` for each; `--name` for true, nothing for false."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items() if value is not False]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How a kind of engine is started, and what it does by itself. It speaks the protocol of `rollout/engines/README.md`.

    Attributes:
        command: the command line of a launch that says to the given descriptor, which it inherits, that it serves.
        checks_weights: it checks a weights file before it serves it; for others the client does.
        reads_back: its ranks tell what they hold.
        Options: model of `rollout.engine.options`; None: any flag is passed on.
    """

    command: Callable[[EngineLaunch, int], list[str]]
    checks_weights: bool = False
    reads_back: bool = False
    Options: type[Section] | None = None

    def flags(self, options: Mapping[str, Flag]) -> dict[str, Flag]:
        """What `[rollout.engine.options]` comes to, with the defaults of its model.

        Raises:
            ConfigError: the model does not take it.
        """
        if self.Options is None:
            return dict(options)
        own = validate_options(self, options, "rollout.engine.options")
        return own.model_dump(by_alias=True, exclude_none=True) if own else {}


class TorchOptions(Section):
    """`[rollout.engine.options]` of the torch engine."""

    max_prefill_tokens: int | None = Field(None, ge=1, alias="max-prefill-tokens")
    """Tokens prefilled in one step."""
    batch_invariant: bool | None = Field(None, alias="batch-invariant")
    """Same numbers however many requests run."""


class EmulatedOptions(Section):
    """`[rollout.engine.options]` of the emulated engine."""

    latency: str | None = None
    """Whose decode steps, of the paper's figure 4."""
    lengths: str | None = None
    """Whose answer lengths, of the paper's figure 17."""
    length_scale: float | None = Field(None, gt=0, alias="length-scale")
    """Factor on all lengths."""
    time_factor: float | None = Field(None, gt=0, alias="time-factor")
    """Seconds of the real engine in one second."""
    token_scale: int | None = Field(None, ge=1, alias="token-scale")
    """Tokens of the real engine that one of ours stands for."""
    step_tokens: int | None = Field(None, ge=1, alias="step-tokens")
    """Most tokens that one wake-up gives everybody."""
    stream_interval: int | None = Field(None, ge=1, alias="stream-interval")
    """Tokens that a stream's reader hears of at once."""
    prefill_tokens_per_second: float | None = Field(None, gt=0, alias="prefill-tokens-per-second")
    """Context computed, in real tokens."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        if self.latency is not None:
            load_step_times(self.latency)
        if self.lengths is not None:
            load_lengths(self.lengths)
        return self


TORCH = EngineKind(torch_command, checks_weights=True, reads_back=True, Options=TorchOptions)
EMULATED = EngineKind(emulated_command, checks_weights=True, reads_back=True, Options=EmulatedOptions)
SGLANG = EngineKind(sglang_command)

ENGINES: dict[str, str] = {
    "torch": "rollout.engines.launch:TORCH",
    "emulated": "rollout.engines.launch:EMULATED",
    "sglang": "rollout.engines.launch:SGLANG",
}
"""Engine kinds by name."""


def engine_kind(kind: str) -> EngineKind:
    """What a kind stands for.

    Raises:
        ConfigError: if there is none of that name, it cannot be imported, or is no `EngineKind`.
    """
    found = resolve(kind, ENGINES, "rollout.engine.kind")
    if not isinstance(found, EngineKind):
        raise ConfigError(
            f"`rollout.engine.kind` is {kind!r}: that is no EngineKind; make one of rollout.engines.launch with your command"
        )
    return found
