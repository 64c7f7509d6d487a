"""A version's folder is a checkpoint that `transformers` loads as it is."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.puller import Puller
from relay.store import VersionStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_each_version_loads_with_the_published_weights_and_log_probs(tmp_path, tied, dtype):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        dtype=dtype,
    )
    torch.manual_seed(0)
    # Not `.to(dtype)`: that would round the rotary frequencies too, which no checkpoint holds.
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model_files = tmp_path / "model"
    config.save_pretrained(model_files)
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(model_files)
    store = VersionStore(tmp_path, "run", "node")
    publisher, puller = Publisher(store, model_files), Puller(store)
    ids = torch.tensor([[1, 9, 4, 30]])
    for number in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        publisher.publish(WeightVersion(0, number), model.state_dict().items())
        assert puller.manifest(WeightVersion(0, number)).tied == (
            {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        )
        with puller.lease(WeightVersion(0, number)) as folder:
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert loaded.dtype == dtype
            assert loaded.generation_config.eos_token_id == [3, 5]
            assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
            with torch.no_grad():
                assert torch.equal(loaded(ids).logits, model(ids).logits)
