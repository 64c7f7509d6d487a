"""LoRA: low-rank adapters beside frozen weights (Hu et al. 2021, arXiv 2106.09685, section 4.1), through `peft`.

A layer W x becomes W x + (alpha / rank) B (A x); A is random, B starts at 0, and only they are trained. What is published is
the merged weight W + (alpha / rank) B A, under the name that W has without an adapter: nobody else knows of adapters.
Memory of a merge: all A and B, and one merged weight at a time.
"""

import contextlib
import importlib.util
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar.config.trainer import LoraConfig
from laminar.errors import ConfigError
from trainer.gathering import gathered, load_tensors, without_data

_NAME = "default"
_BASE = ".base_layer"


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> "Adapters":
    """Put adapters into a model, the same on every rank; freezes all other weights.

    Args:
        model: changed in place.
        config: with a rank above 0.
        seed: of the random start of A.

    Raises:
        ConfigError: if `peft` is not installed, or a target is no layer of the model.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError('`trainer.lora.rank` is set, but peft is not installed: pip install "laminar-rl[lora]"')
    import peft

    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=config.targets or "all-linear", lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**32)
        try:
            peft.inject_adapter_in_model(settings, model, _NAME)
        except ValueError as error:
            raise ConfigError(f"`trainer.lora.targets` {config.targets} do not fit the model: {error}") from error
    return Adapters(model, settings, config)


class Adapters:
    """The adapters of one model.

    Args:
        model: with adapters in it.
        settings: peft's description of them.
        config: ours.

    Raises:
        ConfigError: if one is on a layer whose weight could not be published, or a target is no layer of the model.
    """

    def __init__(self, model: PreTrainedModel, settings: Any, config: LoraConfig) -> None:
        from peft.tuners.lora import LoraLayer

        self._model, self._settings = model, settings
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        for name, layer in self._layers.items():
            if _NAME not in layer.lora_A or layer is model.get_output_embeddings():
                raise ConfigError(
                    f"`trainer.lora.targets` {config.targets} include {name}, which is an embedding or the output head: "
                    "only the linear layers between them can have adapters"
                )
        for target in config.targets:
            if not any(f".{name}".endswith(f".{target}") for name in self._layers):
                raise ConfigError(f"`trainer.lora.targets` has {target!r}, but no layer of the model is named so")
        named = list(model.named_parameters())
        self._own = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every A and B as peft's files name them; under ZeRO 3 all ranks iterate together."""
        return ((_file_name(name), tensor) for name, tensor in gathered(self._own))

    def shapes(self) -> Iterator[tuple[str, Tensor]]:
        """What `tensors` will give, without data."""
        return ((_file_name(name), without_data(parameter)) for name, parameter in self._own)

    def load(self, saved: Mapping[str, Tensor], origin: str) -> None:
        """Restore what `tensors` gave; see `gathering.load_tensors`."""
        load_tensors([(_file_name(name), parameter) for name, parameter in self._own], saved, origin)

    def merged_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """What `merged_tensors` will give, without data."""
        return ((name.replace(_BASE, ""), without_data(parameter)) for name, parameter in self._frozen)

    @torch.no_grad()
    def merged_tensors(self) -> Generator[tuple[str, Tensor]]:
        """The model's weights with the adapters added to them, by the names they have without; in the model's type.

        The product is made and added in float32. Under ZeRO 3 all ranks iterate together.
        """
        own = {name: tensor.float() for name, tensor in gathered(self._own)}
        with contextlib.closing(gathered(self._frozen)) as weights:
            for name, weight in weights:
                layer = name.removesuffix(f"{_BASE}.weight")
                if name.endswith(f"{_BASE}.weight") and layer in self._layers:
                    product = own[f"{layer}.lora_B.{_NAME}.weight"] @ own[f"{layer}.lora_A.{_NAME}.weight"]
                    merged = (weight.float() + self._layers[layer].scaling[_NAME] * product).to(weight.dtype)
                    yield f"{layer}.weight", merged
                else:
                    yield name.replace(_BASE, ""), weight

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, the model computes with the frozen weights alone; without gradient."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def write_config(self, folder: Path) -> None:
        """Describe the adapters as peft does, so that `peft.PeftModel.from_pretrained` reads the folder."""
        self._settings.save_pretrained(folder)


def _file_name(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"
