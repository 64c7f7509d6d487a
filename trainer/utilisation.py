"""How much of the devices a step took: their arithmetic (model FLOPs utilisation) and their memory.

PaLM (arXiv 2204.02311), appendix B: for each token 6 N operations forward and backward for N parameters, and 12 L H Q T for
attention, of L layers with H heads of size Q over T tokens. What is computed again, or only to score, does not count; what
rows share counts for each of them. Adapters count as if all parameters were trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from laminar.config.trainer import TrainerConfig

PEAK_FLOPS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIE": 756e12,
    "H100": 989e12,
    "H800 PCIE": 756e12,
    "H800": 989e12,
    "GH200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}
"""Dense bfloat16 operations a second by the vendors' data sheets, by the words that name a GPU; slower builds come first."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model its arithmetic hangs on.

    Attributes:
        num_parameters: N, tied ones once.
        attention_width: L H Q: layers times heads times size of a head.
    """

    num_parameters: int
    attention_width: int

    def flops(self, row_tokens: Iterable[int]) -> float:
        """Operations forward and backward of rows of so many tokens each."""
        tokens = list(row_tokens)
        return 6.0 * self.num_parameters * sum(tokens) + 12.0 * self.attention_width * sum(n * n for n in tokens)


def model_shape(num_parameters: int, config: PretrainedConfig) -> ModelShape:
    """Of a model by its transformers config; a config without attention heads counts no attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) or 0
    head_size = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // heads if heads else 0)
    return ModelShape(num_parameters, getattr(text, "num_hidden_layers", 0) * heads * head_size)


def peak_flops(device_name: str) -> float | None:
    """Of a device by its name, such as `NVIDIA H100 80GB HBM3`; None if it is not known."""
    words = set(device_name.upper().replace("-", " ").split())
    return next((peak for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)


def device_peak(config: TrainerConfig, device: torch.device, dtype: torch.dtype) -> float | None:
    """As the settings say, or by the GPU's name; None if neither tells."""
    if config.peak_flops is not None or device.type != "cuda" or dtype != torch.bfloat16:
        return config.peak_flops
    return peak_flops(torch.cuda.get_device_name(device))


def device_memory(device: torch.device) -> dict[str, float]:
    """The most memory that this rank's tensors took on its GPU since the last call; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    peak = float(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return {"system/device_memory_bytes": peak}
