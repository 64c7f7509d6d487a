"""Saving and restoring a rank's whole state: weights, optimizer, random states, and what rank 0's loop adds.

A checkpoint holds `model/` (a loadable Hugging Face folder), `optimizer_000.safetensors` for each share of the optimizer
state, with a critic `critic.safetensors` and `critic_optimizer_000.safetensors` likewise, `rng_000.json` for each rank, and
`extra.json`. No file is a pickle. All ranks save and load together, and fail
together; the learning rate needs no state (`trainer.schedule`). `trainer.checkpoint_folder` says what makes a checkpoint.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from laminar.errors import ConfigError, EnvironmentSetupError
from trainer import checkpoint_folder
from trainer.engine import TrainerEngine
from trainer.ranks import Ranks

_MODEL = "model/model.safetensors"
_CRITIC = "critic.safetensors"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


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

    def finish() -> None:
        (temporary / checkpoint_folder.EXTRA).write_text(json.dumps(extra))
        checkpoint_folder.complete(root, step, {"optimizer_shares": _num_shares(engine)}, keep)

    _together(ranks, f"make {temporary}", lambda: checkpoint_folder.begin(root, step) if ranks.is_first else None)
    _together(ranks, f"write {temporary}", lambda: _write_share(temporary, engine))
    _together(ranks, f"complete {temporary}", lambda: finish() if ranks.is_first else None)
    return checkpoint_folder.checkpoint_path(root, step)


def load(path: Path, engine: TrainerEngine) -> tuple[int, dict[str, Any]]:
    """Restore the engine and the random states; all ranks call it together.

    Returns:
        The step's number, and `extra`, on every rank.

    Raises:
        ConfigError: if the checkpoint is damaged (it names the file), or does not fit the model or the number of ranks.
    """
    ranks = engine.ranks
    manifest = json.loads(ranks.decide(lambda: json.dumps(checkpoint_folder.read_manifest(path)).encode()))
    if manifest["optimizer_shares"] != _num_shares(engine):
        raise ConfigError(
            f"checkpoint {path} holds {manifest['optimizer_shares']} shares of optimizer state, but this run needs "
            f"{_num_shares(engine)}: resume with the trainer.num_ranks and zero_stage that it was saved with"
        )
    engine.load_state(load_file(path / _MODEL), load_file(path / _optimizer_name(engine)))
    if engine.critic is not None:
        if not (path / _CRITIC).exists():
            raise ConfigError(f"checkpoint {path} is of a run without a critic: resume with the algorithm that saved it")
        engine.critic.load_state(load_file(path / _CRITIC), load_file(path / f"critic_{_optimizer_name(engine)}"))
    random_states = path / f"rng_{ranks.rank:03d}.json"
    if random_states.exists():  # a replicated optimizer may be resumed on more ranks than saved it
        _restore_random_states(json.loads(random_states.read_text()))
    return manifest["step"], checkpoint_folder.read_extra(path)


def agree_on_latest(root: Path, ranks: Ranks) -> Path | None:
    """The newest whole checkpoint as rank 0 sees it, on every rank; see `checkpoint_folder.find_latest`."""
    name = ranks.decide(lambda: str(checkpoint_folder.find_latest(root) or "").encode()).decode()
    return Path(name) if name else None


def _write_share(folder: Path, engine: TrainerEngine) -> None:
    """Write what this rank holds: rank 0 the model, each holder its optimizer share, each rank its random states."""
    if engine.ranks.is_first:
        (folder / _MODEL).parent.mkdir()
        model = {name: tensor.detach().contiguous() for name, tensor in engine.state_tensors()}
        save_file(model, folder / _MODEL, {"format": "pt"})
        for file in sorted(Path(engine.config.model.path).iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, folder / "model" / file.name)
    _write_critic(folder, engine)
    if engine.ranks.rank < _num_shares(engine):
        optimizer = {name: tensor.contiguous() for name, tensor in engine.optimizer_tensors().items()}
        save_file(optimizer, folder / _optimizer_name(engine))
    (folder / f"rng_{engine.ranks.rank:03d}.json").write_text(json.dumps(_random_states()))


def _write_critic(folder: Path, engine: TrainerEngine) -> None:
    if engine.critic is None:
        return
    if engine.ranks.is_first:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in engine.critic.state_tensors().items()}, folder / _CRITIC
        )
    if engine.ranks.rank < _num_shares(engine):
        optimizer = {name: tensor.contiguous() for name, tensor in engine.critic.optimizer_tensors().items()}
        save_file(optimizer, folder / f"critic_{_optimizer_name(engine)}")


def _together(ranks: Ranks, what: str, work: Callable[[], object]) -> None:
    """Do each rank's part; if one fails, all raise, so that none waits.

    Raises:
        EnvironmentSetupError: naming the rank and the system's reason.
    """
    problem = ""
    try:
        work()
    except (OSError, SafetensorError) as error:
        problem = str(error) or type(error).__name__
    for rank, text in enumerate(ranks.gather_texts(problem)):
        if text:
            raise EnvironmentSetupError(f"checkpoint: rank {rank} could not {what}: {text}")


def _num_shares(engine: TrainerEngine) -> int:
    return 1 if engine.optimizer_is_replicated else engine.ranks.world_size


def _optimizer_name(engine: TrainerEngine) -> str:
    return f"optimizer_{0 if engine.optimizer_is_replicated else engine.ranks.rank:03d}.safetensors"


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
