"""A run's settings as a simulation: the run says what is played and by which rules, `[simulate]` how fast everything is."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from laminar.config.root import LaminarConfig
from laminar.config.sizes import groups_within_bytes, plays_greedy, read_model_size, repack_limits
from laminar.errors import ConfigError
from laminar.plugins import resolve
from laminar.policies.samplers import SAMPLERS
from laminar.simulate.cluster import Cluster, Engine, Trainer, Transfers
from laminar.simulate.system import Repack, System
from laminar.simulate.timings import FloatArray, Lengths, StepTimes, load_lengths, load_step_times
from laminar.simulate.workload import Quantiles, Workload

QUANTILE = re.compile(r"p\d+(\.\d+)?", re.ASCII)
DEFAULT_PARAMETERS = 32.8e9


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything a simulation needs."""

    workload: Workload
    cluster: Cluster
    system: System
    num_steps: int
    seed: int

    @property
    def num_gpus(self) -> int:
        """Trainer and replicas together."""
        return self.cluster.num_gpus

    def with_split(self, train_gpus: int, num_replicas: int) -> "Setting":
        """The same on other numbers of GPUs."""
        trainer = replace(self.cluster.trainer, num_gpus=train_gpus)
        return replace(self, cluster=replace(self.cluster, trainer=trainer, num_replicas=num_replicas))

    def with_even_shares(self) -> "Setting":
        """The same with no replica allowed more groups than its share of all that may be outstanding.

        Whoever asks first gets as many groups as it has room for: with more room than that, the last replicas get none.
        """
        share = math.ceil(min(self.most_outstanding, 1e9) / self.cluster.num_replicas)
        limit = min(self.system.max_in_flight_groups, share)
        return replace(self, system=replace(self.system, max_in_flight_groups=limit))

    @property
    def most_outstanding(self) -> float:
        """Groups that may be outstanding at once, by staleness and by the buffer's capacity."""
        bound, capacity = self.system.max_staleness, self.system.max_outstanding_groups
        by_bound = math.inf if bound is None else (bound + 1) * self.workload.prompts_per_step
        return min(by_bound, math.inf if capacity is None else capacity)


def setting_of(config: LaminarConfig) -> Setting:
    """The simulation of a run's settings.

    Raises:
        ConfigError: naming what cannot be simulated.
    """
    if 0 < config.rollout.engine.num_gpus < 1 or 0 < config.trainer.num_gpus_per_rank < 1:
        raise ConfigError(
            f"`rollout.engine.num_gpus` = {config.rollout.engine.num_gpus:g} and `trainer.num_gpus_per_rank` = "
            f"{config.trainer.num_gpus_per_rank:g}: roles that share a GPU slow each other down, which is not simulated; "
            "set both to whole numbers to see what they do on GPUs of their own"
        )
    is_emulated = config.rollout.engine.kind == "emulated"
    pace = _emulated_pace(config) if is_emulated else _Pace()
    workload = _workload(config, pace)
    return Setting(workload, _cluster(config, pace), _system(config), config.simulate.num_steps, config.simulate.seed)


@dataclass(frozen=True, slots=True)
class _Pace:
    """How an emulated engine's time and tokens stand to the real engine's."""

    latency: str = ""
    lengths: str = ""
    length_scale: float = 1.0
    time_factor: float = 1.0
    token_scale: float = 1.0
    prefill_tokens_per_second: float | None = None


def _emulated_pace(config: LaminarConfig) -> _Pace:
    options: Mapping[str, Any] = config.rollout.engine.options
    prefill = options.get("prefill-tokens-per-second", 30_000.0)
    return _Pace(
        latency=str(options.get("latency", "32B_TP4")),
        lengths=str(options.get("lengths", "32B_math")),
        length_scale=float(options.get("length-scale", 1.0)),
        time_factor=float(options.get("time-factor", 1.0)),
        token_scale=float(options.get("token-scale", 1)),
        prefill_tokens_per_second=float(prefill),
    )


def _workload(config: LaminarConfig, pace: _Pace) -> Workload:
    chosen = config.simulate
    scale = pace.length_scale / pace.token_scale
    if chosen.length_quantiles:
        shares, values = _points(chosen.length_quantiles, "simulate.length_quantiles")
        lengths = Lengths(shares, values * scale)
    else:
        lengths = load_lengths(pace.lengths or chosen.lengths, scale)
    turn_seconds = None
    if chosen.turn_seconds_quantiles:
        turn_seconds = Quantiles(*_points(chosen.turn_seconds_quantiles, "simulate.turn_seconds_quantiles"))
    prompt = config.data.max_prompt_tokens // 2 if chosen.prompt_tokens is None else chosen.prompt_tokens
    return Workload(
        lengths=lengths,
        prompt_tokens=prompt,
        max_new_tokens=config.rollout.max_new_tokens,
        group_size=config.rollout.group_size,
        num_greedy=int(plays_greedy(config)),
        prompts_per_step=config.trainer.prompts_per_step,
        num_turns=chosen.num_turns,
        turn_seconds=turn_seconds,
        observation_tokens=chosen.observation_tokens,
    )


def _cluster(config: LaminarConfig, pace: _Pace) -> Cluster:
    chosen, engine, trainer = config.simulate, config.rollout.engine, config.trainer
    parameters = _parameters(config)
    is_emulated = engine.kind == "emulated"
    times = _scaled(load_step_times(pace.latency), pace) if is_emulated else _step_times(config)
    prefill = pace.prefill_tokens_per_second
    return Cluster(
        engine=Engine(
            times=times,
            num_gpus=engine.tensor_parallel_size,
            capacity_tokens=engine.max_cached_tokens,
            max_running=engine.max_running,
            prefill_tokens_per_second=(
                chosen.prefill_tokens_per_second if prefill is None else prefill * pace.time_factor / pace.token_scale
            ),
            overhead_seconds=0.0 if is_emulated else chosen.overhead_milliseconds / 1e3,
            request_overhead_seconds=0.0 if is_emulated else chosen.request_overhead_microseconds / 1e6,
        ),
        num_replicas=config.rollout.num_workers,
        trainer=Trainer(
            num_gpus=trainer.num_ranks,
            tokens_per_second=chosen.train_flops / (6 * parameters) / trainer.epochs,
            mini_batches=trainer.mini_batches * trainer.epochs,
            mini_batch_seconds=chosen.mini_batch_seconds,
            step_seconds=tuple(trainer.emulated.step_seconds) if trainer.kind == "emulated" else (),
        ),
        transfers=Transfers(
            model_bytes=0.0 if is_emulated else 2 * parameters,
            publish_bytes_per_second=chosen.publish_bytes_per_second,
            load_bytes_per_second=chosen.load_bytes_per_second,
            gpus_per_machine=chosen.gpus_per_machine,
        ),
    )


def _system(config: LaminarConfig) -> System:
    rollout, staleness = config.rollout, config.staleness
    repack = None
    if rollout.wants_manager(rollout.num_workers):
        repack = Repack(repack_limits(config), rollout.repack.interval_seconds)
    return System(
        kind="laminar",
        weight_update=rollout.effective_weight_update,
        repack=repack,
        max_staleness=staleness.bound,
        policy=staleness.policy,
        over_provision=rollout.over_provision,
        max_wait_seconds=staleness.max_wait_seconds,
        no_progress_seconds=config.run.no_progress_seconds,
        max_hold_seconds=rollout.max_hold_seconds,
        max_in_flight_groups=rollout.max_in_flight_groups,
        adapt_in_flight=rollout.adapt_in_flight,
        max_outstanding_groups=groups_within_bytes(config),
        sampler=resolve(config.experience.sampler, SAMPLERS, "experience.sampler"),
        keeps_cache=rollout.engine.swap == "in_place",
    )


def _step_times(config: LaminarConfig) -> StepTimes:
    chosen = config.simulate
    if not chosen.decode_milliseconds:
        return load_step_times(chosen.latency)
    for name in chosen.decode_milliseconds:
        if not (name.isdecimal() and name.isascii()) or name.startswith("0"):
            raise ConfigError(f'`simulate.decode_milliseconds` has the key "{name}"; write batch sizes such as "1" and "64"')
    if "1" not in chosen.decode_milliseconds or len(chosen.decode_milliseconds) < 2:
        raise ConfigError('`simulate.decode_milliseconds` needs the batch "1" and a larger one')
    rows = sorted((int(batch), value / 1000) for batch, value in chosen.decode_milliseconds.items())
    batch, seconds = np.array(rows, np.float64).T
    return StepTimes(batch, seconds, float(chosen.decode_context_tokens))


def _scaled(times: StepTimes, pace: _Pace) -> StepTimes:
    """Per emulated token and in seconds of this machine."""
    factor = pace.token_scale / pace.time_factor
    return StepTimes(times.batch, times.seconds * factor, times.context_tokens / pace.token_scale)


def _points(quantiles: Mapping[str, float], where: str) -> tuple[FloatArray, FloatArray]:
    """Shares from 0 to 1 and values; the outermost values are taken to the ends."""
    for name in quantiles:
        if not QUANTILE.fullmatch(name) or float(name[1:]) > 100:
            raise ConfigError(
                f'`{where}` has the key "{name}"; write quantiles from "p0" to "p100", such as "p50" or "p99.9"'
            )
    rows = sorted((float(name[1:]) / 100, value) for name, value in quantiles.items())
    shares, values = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    if (np.diff(shares) <= 0).any():
        raise ConfigError(f"`{where}` gives a quantile twice ({', '.join(quantiles)}); keep one of each")
    if (np.diff(values) < 0).any():
        raise ConfigError(
            f"`{where}` has values that fall ({', '.join(f'{v:g}' for v in values)}); higher quantiles are larger"
        )
    return np.concatenate([[0.0], shares, [1.0]]), np.concatenate([values[:1], values, values[-1:]])


def _parameters(config: LaminarConfig) -> float:
    if config.simulate.model_parameters is not None:
        return config.simulate.model_parameters
    size = read_model_size(Path(config.model.path))
    return float(size.num_parameters) if size is not None else DEFAULT_PARAMETERS
