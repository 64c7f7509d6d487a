"""What is known of a run's model from its files."""

from pathlib import Path

from laminar.config.root import LaminarConfig
from laminar.config.sizes import ModelSize, read_model_size
from laminar.dry_run.architecture import read_architecture, read_number_bytes
from laminar.dry_run.parts import Model


def read_model(config: LaminarConfig) -> Model | None:
    """The model of `model.path`: its `config.json`, and its weights' headers if they are there; None without a config."""
    folder = Path(config.model.path)
    architecture = read_architecture(folder)
    if architecture is None:
        return None
    number_bytes = read_number_bytes(folder, config.model.dtype)
    parameters = architecture.num_parameters
    size = read_model_size(folder) or ModelSize(parameters, parameters * number_bytes)
    return Model(size, architecture, number_bytes)
