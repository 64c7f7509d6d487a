"""What a weights file holds, read from its header alone: for engines that load whatever they are given.

SGLang reports an update with missing tensors as a success, and a truncated file ends the whole server. This module knows
neither torch nor engines.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from laminar.errors import EngineError, reason

WEIGHTS_NAME = "model.safetensors"

TensorForms = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by tensor name."""


def read_forms(folder: Path) -> TensorForms:
    """The tensors in the folder's weights file.

    Raises:
        EngineError: if there is none, or it is not whole.
    """
    path = folder / WEIGHTS_NAME
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{path} is not a whole safetensors file ({reason(error)}); publish the version again") from error


def check_same_forms(expected: TensorForms, found: TensorForms, where: str) -> None:
    """Refuse a file with other tensors than the first one's.

    Raises:
        EngineError: naming what differs.
    """
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    changed = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if missing or extra or changed:
        raise EngineError(
            f"{where} does not fit the engine's first weights: missing {missing}, not known {extra}, "
            f"of another dtype or shape {changed}"
        )
