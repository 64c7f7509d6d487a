"""How fast is the torch engine? `python -m benchmarks.engine [--quick]`.

Side by side in one process, one thread, alternating, medians, in seconds of CPU time of that thread (so other load on the
machine weighs less; wall seconds are reported too); start-up is not counted. SmolLM2-135M, float32.

- equal: `batch` requests of one length, against `transformers.generate` on the same batch. Bar: 1.0x at 1, 8 and 32.
- tail: groups of 8 on one prompt, most answers short, few long. Useful tokens a second against `generate`, which prefills
  every member and computes until the longest ends. Bar: 1.5x. This is the printed value.
- step: one decode step of 32 rows without sampling, against the bare matrix products of the model's linear layers on 32
  rows. Bar: at most 1.3x.

The engine also computes log-probs, `generate` does not.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from rollout.convert_smollm2 import convert
from rollout.engines.torch_engine import EngineOptions, TorchEngine
from rollout.engines.wire import GenerateWire, SamplingWire

MODEL = Path("models/smollm2-135m")
BARS = {"equal_1": 1.0, "equal_8": 1.0, "equal_32": 1.0, "tail": 1.5, "step": 1.3}
TAIL_LENGTHS = (2, 3, 4, 5, 6, 8, 12, 26)
STEP_CONTEXT = 64

Case = tuple[list[list[int]], list[int]]
"""Prompts and how many tokens each is to get."""


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of this thread, wall seconds."""
    wall, processor = time.perf_counter(), time.thread_time()
    work()
    return time.thread_time() - processor, time.perf_counter() - wall


def run_engine(engine: TorchEngine, case: Case) -> None:
    """Answer all requests of a case; nothing is shared with an earlier run."""
    engine.book.flush_cache()
    for place, (prompt, length) in enumerate(zip(*case, strict=True)):
        sampling = SamplingWire(max_new_tokens=length, sampling_seed=place, ignore_eos=True)
        engine.add(GenerateWire(input_ids=prompt, rid=f"r{place}", sampling_params=sampling))
    while engine.book.has_work:
        engine.step()


def run_generate(model: Any, case: Case) -> None:
    """The same by `transformers.generate`, without an end id, up to the longest answer."""
    prompts, lengths = case
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(lengths)
        )


def cases(quick: bool) -> dict[str, Case]:
    """Prompts of random ids, all different but for the siblings of a group."""
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return torch.randint(3, 40000, (count, tokens), generator=generator).tolist()

    new = {1: 16, 8: 8, 32: 5} if quick else {1: 64, 8: 64, 32: 64}
    made = {f"equal_{batch}": (prompts(batch, 8), [length] * batch) for batch, length in new.items()}
    groups, stretch, prompt_tokens = (2, 1, 32) if quick else (4, 8, 128)
    members = [prompt for prompt in prompts(groups, prompt_tokens) for _ in TAIL_LENGTHS]
    made["tail"] = (members, [length * stretch for length in TAIL_LENGTHS] * groups)
    return made


def compare(engine: TorchEngine, model: Any, case: Case, repeats: int, deadline: float) -> dict[str, float]:
    """Useful tokens a second of both sides, and their ratio; at least one run of each, more while there is time."""
    sides: dict[str, list[tuple[float, float]]] = {"engine": [], "generate": []}
    for repeat in range(repeats):
        if repeat and time.perf_counter() > deadline:
            break
        order = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        for side in order:
            work = (lambda: run_engine(engine, case)) if side == "engine" else (lambda: run_generate(model, case))
            sides[side].append(timed(work))
    useful = sum(case[1])
    rates = {side: useful / statistics.median(cpu for cpu, _ in runs) for side, runs in sides.items()}
    walls = {
        f"{side}_wall_tokens_per_second": useful / statistics.median(w for _, w in runs) for side, runs in sides.items()
    }
    return {
        "ratio": rates["engine"] / rates["generate"],
        "engine_tokens_per_second": rates["engine"],
        "generate_tokens_per_second": rates["generate"],
        **walls,
        "runs": len(sides["engine"]),
    }


def compare_step(engine: TorchEngine, model: Any, repeats: int) -> dict[str, float]:
    """One decode step of 32 rows against the bare matrix products."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {size: torch.randn(32, size) for size in {layer.in_features for layer in layers}}
    store = engine._store
    seconds: dict[str, list[float]] = {"products": [], "step": []}

    def products() -> None:
        for layer in layers:
            nn.functional.linear(inputs[layer.in_features], layer.weight)

    def step() -> None:
        engine.model.logits(engine.model.decode([5] * 32, [STEP_CONTEXT] * 32, store))

    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, work in (("products", products), ("step", step)):
                elapsed, _ = timed(work)
                if repeat:  # the first warms up
                    seconds[name].append(elapsed)
    step_seconds, product_seconds = (statistics.median(seconds[name]) for name in ("step", "products"))
    return {"ratio": step_seconds / product_seconds, "step_seconds": step_seconds, "products_seconds": product_seconds}


def main() -> int:
    """Print one JSON line last; exit code 0 whatever the outcome."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="end within 55 s")
    quick = parser.parse_args().quick
    started = time.perf_counter()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(convert(MODEL))
    engine = TorchEngine(MODEL, "0.0", EngineOptions(max_running=32))
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    warm_up: Case = ([[5, 6, 7]], [2])
    run_engine(engine, warm_up)
    run_generate(model, warm_up)
    started = time.perf_counter() if not quick else started
    deadline = started + (24 if quick else 1e9)
    figures = {"step": compare_step(engine, model, 4 if quick else 15)}
    for name, case in cases(quick).items():
        figures[name] = compare(engine, model, case, 3, deadline)
        print(name, {key: round(value, 2) for key, value in figures[name].items()}, flush=True)
    holds = {
        name: figures[name]["ratio"] <= bar if name == "step" else figures[name]["ratio"] >= bar
        for name, bar in BARS.items()
    }
    result = {
        "name": "engine",
        "value": round(figures["tail"]["ratio"], 3),
        "unit": "x useful tokens/s of transformers.generate, long-tailed lengths",
        "bar": BARS["tail"],
        "holds": all(holds.values()),
        "bars": BARS,
        "holds_each": holds,
        "figures": figures,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__, "threads": 1},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
