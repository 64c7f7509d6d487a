"""Saving and restoring a rank's whole state: weights, optimizer, random states, and what rank 0's loop adds.

A checkpoint holds `model/` (a loadable Hugging Face folder), `optimizer_000.safetensors` for each share of the optimizer
state, with adapters `adapter/` (as peft writes it; `model/` has them merged), with a critic `critic.safetensors` and
`critic_optimizer_000.safetensors` likewise, `rng_000.json` for each rank, and `extra.json`. No file is a pickle. All ranks
save and load together, and fail together; the learning rate needs no state (`trainer.schedule`). Any number of ranks at any
ZeRO stage loads what any other saved (`trainer.optimizer_shares`). `trainer.checkpoint_folder` says what makes a checkpoint.
"""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.errors import ConfigError, EnvironmentSetupError, reason
from relay.model_files import copy_model_files
from trainer import checkpoint_folder
from trainer.engine import TrainerEngine
from trainer.optimizer_shares import SavedShares
from trainer.ranks import Ranks
from trainer.weight_file import WeightFile, write_weights

_MODEL = "model/model.safetensors"
_ADAPTER = "adapter/adapter_model.safetensors"
_CRITIC = "critic.safetensors"
_OPTIMIZER = "optimizer"


def save(root: Path, step: int, engine: TrainerEngine, extra: dict[str, Any], keep: int) -> Path:
    """Save a checkpoint; all ranks call it together.

    Args:
        root: folder of the run's checkpoints, on storage that all ranks share.
        step: number of the last trained step.
        engine: this rank's engine.
        extra: JSON-able state of rank 0's loop (frontier, lineage, counters); only rank 0's is read.
        keep: complete checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        EnvironmentSetupError: on all ranks, if any could not write; older checkpoints are untouched.
    """
    ranks, temporary = engine.ranks, checkpoint_folder.temporary_path(root, step)

    def make() -> None:
        if ranks.is_first:
            copy_model_files(Path(engine.config.model.path), checkpoint_folder.begin(root, step) / "model")
            if engine.adapters is not None:
                (temporary / _ADAPTER).parent.mkdir()
                engine.adapters.write_config((temporary / _ADAPTER).parent)

    def finish() -> None:
        (temporary / checkpoint_folder.EXTRA).write_text(json.dumps(extra))
        checkpoint_folder.complete(root, step, {"num_ranks": ranks.world_size}, keep)

    try:
        _together(ranks, f"make {temporary}", make)
        for write in (_write_policy, _write_adapters, _write_critic, _write_own):
            _together(ranks, f"write {temporary}", partial(write, temporary, engine))
        _together(ranks, f"complete {temporary}", lambda: finish() if ranks.is_first else None)
    except EnvironmentSetupError:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk, others need the room
        raise
    return checkpoint_folder.checkpoint_path(root, step)


def load(path: Path, engine: TrainerEngine) -> tuple[int, dict[str, Any]]:
    """Restore the engine and the random states; all ranks call it together.

    Returns:
        The step's number, and `extra`, on every rank.

    Raises:
        ConfigError: if the checkpoint is damaged (it names the file), or is of another model.
    """
    ranks = engine.ranks
    manifest = json.loads(ranks.decide(lambda: json.dumps(checkpoint_folder.read_manifest(path)).encode()))
    if (path / _ADAPTER).exists() != (engine.adapters is not None):
        has, lacks = ("adapters", "none") if engine.adapters is None else ("no adapters", "some")
        raise ConfigError(
            f"checkpoint {path} is of a run with {has}, this run has {lacks}: set trainer.lora as it was saved"
        )
    weights = path / (_MODEL if engine.adapters is None else _ADAPTER)
    with WeightFile(weights) as model, SavedShares(sorted(path.glob(f"{_OPTIMIZER}_*"))) as optimizer:
        engine.load_state(model, optimizer)
    if engine.critic is not None:
        if not (path / _CRITIC).exists():
            raise ConfigError(f"checkpoint {path} is of a run without a critic: resume with the algorithm that saved it")
        with WeightFile(path / _CRITIC) as model, SavedShares(sorted(path.glob(f"critic_{_OPTIMIZER}_*"))) as optimizer:
            engine.critic.load_state(model, optimizer)
    random_states = path / f"rng_{ranks.rank:03d}.json"
    if random_states.exists():  # else more ranks resume than saved it
        _restore_random_states(json.loads(random_states.read_text()))
    return manifest["step"], checkpoint_folder.read_extra(path)


def agree_on_latest(root: Path, ranks: Ranks) -> Path | None:
    """The newest whole checkpoint as rank 0 sees it, on every rank; see `checkpoint_folder.find_latest`."""
    name = ranks.decide(lambda: str(checkpoint_folder.find_latest(root) or "").encode()).decode()
    return Path(name) if name else None


def _write_policy(folder: Path, engine: TrainerEngine) -> None:
    """All ranks: gather the policy's weights; rank 0 writes them."""
    file = folder / _MODEL if engine.ranks.is_first else None
    write_weights(file, engine.state_shapes(), engine.state_tensors())


def _write_adapters(folder: Path, engine: TrainerEngine) -> None:
    """The same of its adapters, if it has any."""
    if engine.adapters is not None:
        file = folder / _ADAPTER if engine.ranks.is_first else None
        write_weights(file, engine.adapters.shapes(), engine.adapters.tensors())


def _write_critic(folder: Path, engine: TrainerEngine) -> None:
    """The same of the critic, if there is one."""
    if engine.critic is not None:
        file = folder / _CRITIC if engine.ranks.is_first else None
        write_weights(file, engine.critic.state_shapes(), engine.critic.state_tensors())


def _write_own(folder: Path, engine: TrainerEngine) -> None:
    """Write what only this rank holds: its shares of the optimizer state, its random states."""
    number = f"{engine.ranks.rank:03d}"
    if engine.ranks.is_first or not engine.optimizer_is_replicated:
        _write_optimizer(folder / f"{_OPTIMIZER}_{number}.safetensors", engine.optimizer_tensors())
        if engine.critic is not None:
            _write_optimizer(folder / f"critic_{_OPTIMIZER}_{number}.safetensors", engine.critic.optimizer_tensors())
    (folder / f"rng_{number}.json").write_text(json.dumps(_random_states()))


def _write_optimizer(file: Path, tensors: dict[str, Tensor]) -> None:
    if tensors:  # before the first update there is no state
        write_weights(file, tensors.items(), iter(tensors.items()))


def _together(ranks: Ranks, what: str, work: Callable[[], object]) -> None:
    """Do each rank's part; if one fails, all raise, so that none waits.

    Raises:
        EnvironmentSetupError: naming the rank and the system's reason.
    """
    problem = ""
    try:
        work()
    except OSError as error:
        problem = reason(error)
    for rank, text in enumerate(ranks.gather_texts(problem)):
        if text:
            raise EnvironmentSetupError(
                f"checkpoint: rank {rank} could not {what}: {text}; older ones stand: make room for one more than "
                "checkpoint.keep, then resume"
            )


def _random_states() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
    }


def _restore_random_states(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
