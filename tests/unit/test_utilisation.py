"""Model FLOPs utilisation: the formula by hand and by torch's own counter; whose device it knows."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.config.trainer import TrainerConfig
from trainer.utilisation import ModelShape, device_memory, device_peak, model_shape, peak_flops


def test_the_operations_of_rows_by_hand():
    """6 * 10 * (3 + 5) for the parameters, 12 * 24 * (9 + 25) for attention."""
    assert ModelShape(num_parameters=10, attention_width=24).flops([3, 5]) == 480 + 9792


@pytest.mark.parametrize("num_tokens", [8, 200])
def test_the_formula_counts_what_torch_counts_forward_and_backward(num_tokens):
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
        num_key_value_heads=4, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, num_tokens, dtype=torch.long)).logits.sum().backward()
    shape = model_shape(model.num_parameters(), config)
    assert shape.flops([num_tokens]) == pytest.approx(counter.get_total_flops(), rel=0.01)  # norms multiply no matrices


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GeForce RTX 3060", None),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_a_gpu_is_known_by_the_word_that_names_it(name, peak):
    assert peak_flops(name) == peak


def test_a_cpu_has_the_peak_that_the_settings_give_it_or_none():
    cpu = torch.device("cpu")
    assert device_peak(TrainerConfig(), cpu, torch.bfloat16) is None
    assert device_peak(TrainerConfig(peak_flops=1e11), cpu, torch.float32) == 1e11


def test_a_gpus_peak_of_memory_is_that_since_the_last_look_and_a_cpu_has_none(monkeypatch):
    peaks = {"cuda:1": 5e9}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({str(device): 1e9}))
    gpu = torch.device("cuda", 1)
    assert [device_memory(gpu), device_memory(gpu)] == [{"system/device_memory_bytes": peak} for peak in (5e9, 1e9)]
    assert device_memory(torch.device("cpu")) == {}
