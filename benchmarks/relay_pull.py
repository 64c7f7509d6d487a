"""From a version in shared memory to the first log-probs of the CPU engine, for `benchmarks.relay`; the same from the heap.

Both arms score the same 32 tokens with the same weights in the same engine. One takes them from a slot of the store: it maps
the file, checks names and shapes, and reads through page tables that are new. The other finds them as tensors on the heap,
touched before. Pausing and HTTP are in neither.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from laminar.types import WeightVersion
from relay.probe import probe_tokens
from relay.publisher import Publisher
from relay.store import VersionStore
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.torch_model import assign

TOLERANCE = 1e-4


def write_model(folder: Path) -> dict[str, torch.Tensor]:
    """A random Llama of 256 MB in float32 (64 million parameters); its config goes to `folder`."""
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=8192, hidden_size=768, intermediate_size=2304, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
        dtype=torch.float32, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.empty(shape).uniform_(-0.02, 0.02, generator=generator) for name, shape in shapes.items()}


def measure_pull(repeats: int) -> dict[str, float]:
    """Median seconds of both arms, alternating; every result is compared with the other arm's.

    Raises:
        RuntimeError: if the log-probs are not the same.
    """
    tokens = probe_tokens(8192)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        store = VersionStore(Path(root), "bench", "node", mapping_readers=1)
        model_files = Path(root) / "model"
        model_files.mkdir()
        weights = write_model(model_files)
        publisher = Publisher(store, model_files)
        publisher.publish(WeightVersion(0, 0), weights.items())
        with torch.inference_mode():
            engine = TorchEngine(store.folder_of(WeightVersion(0, 0)), "0.0")
            engine.model.score(tokens)
            heap, pulled = [], []
            for number in range(1, repeats + 1):
                publisher.publish(WeightVersion(0, number), weights.items())
                started = time.perf_counter()
                engine.book.update_weights(store.folder_of(WeightVersion(0, number)), f"0.{number}", flush_cache=True)
                found = engine.model.score(tokens)
                pulled.append(time.perf_counter() - started)
                started = time.perf_counter()
                assign(engine.model._model, weights)
                expected = engine.model.score(tokens)
                heap.append(time.perf_counter() - started)
                if max(abs(a - b) for a, b in zip(found, expected, strict=True)) > TOLERANCE:
                    raise RuntimeError("the engine's log-probs are not those of the published weights")
            engine.close()
        publisher.close()
    return {
        "megabytes": sum(tensor.nbytes for tensor in weights.values()) / 1024**2,
        "pull_seconds": statistics.median(pulled),
        "heap_seconds": statistics.median(heap),
    }
