"""The checks of `benchmarks.gpu_check`, each for a process of its own; a check that fails raises.

Nothing here has run on a GPU yet; without one, the same code runs on the CPU in tests (gloo instead of NCCL, no pinning).
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.types import SamplingParameters, WeightVersion
from relay.probe import Probe, probe_tokens
from relay.publisher import Publisher
from relay.puller import Puller
from relay.store import WEIGHTS_NAME, VersionStore
from relay.transports.base import LinkLostError
from relay.transports.collective import CollectiveTransport
from rollout.engines.ranks.laminar_weights import Slots
from rollout.engines.tiny_model import write_tiny_model
from rollout.replica import Replica
from rollout.start_engine import engine_starter

SHARED_MEMORY = "/dev/shm"
BODY_BYTES = 64 * 1024**2
EDGE_SECONDS = 120.0


@dataclass(frozen=True)
class Place:
    """Where checks run.

    Attributes:
        sglang_python: interpreter of SGLang's environment.
        on_gpu: false in tests: the same code without a GPU.
    """

    sglang_python: str = ""
    on_gpu: bool = True

    def device(self, index: int) -> str:
        """Name of a device."""
        return f"cuda:{index}" if self.on_gpu else "cpu"

    def settle(self) -> None:
        """Wait for what was started on the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


def require(condition: bool, what: str) -> None:
    """Raise if a check does not hold."""
    if not condition:
        raise RuntimeError(what)


def check_pinned(place: Place) -> None:
    """A slot is registered once, and its tensors reach the GPU as they are."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root:
        store, publisher = _store(Path(root), write_tiny_model(Path(root) / "model"))
        values = {"a": torch.randn(1000, 1000), "b": torch.randn(77).bfloat16()}
        publisher.publish(WeightVersion(0, 1), values.items())
        slots = Slots()
        for _ in range(2):
            stored = slots.tensors(store.folder_of(WeightVersion(0, 1)) / WEIGHTS_NAME, pinned=place.on_gpu)
            are_pinned = not place.on_gpu or all(tensor.is_pinned() for tensor in stored.values())
            require(are_pinned, "the slot is not pinned memory")
            for name, tensor in stored.items():
                there = tensor.to(place.device(0), non_blocking=True)
                place.settle()
                require(torch.equal(there.cpu(), values[name]), f"{name} did not arrive as it was")


def check_publish(place: Place) -> None:
    """Tensors of the GPU reach the store as they are."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root:
        store, publisher = _store(Path(root), write_tiny_model(Path(root) / "model"))
        device = place.device(0)
        values = {"a": torch.randn(3000, 1000, device=device), "b": torch.randn(77, device=device)}
        publisher.publish(WeightVersion(0, 1), values.items())
        Puller(store).verify(WeightVersion(0, 1))
        stored = Slots().tensors(store.folder_of(WeightVersion(0, 1)) / WEIGHTS_NAME, pinned=False)
        require(
            all(torch.equal(stored[name], value.cpu()) for name, value in values.items()), "the store holds other values"
        )


def check_collective(place: Place) -> None:
    """A body goes from one process's GPU to another's by NCCL, and a dead end is noticed."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    peer = context.Process(target=_serve_edge, args=(theirs, place), daemon=True)
    peer.start()
    require(mine.poll(EDGE_SECONDS), "the other process did not start")
    address = mine.recv()
    asyncio.run(asyncio.wait_for(_use_edge(address, place), EDGE_SECONDS))
    peer.join(EDGE_SECONDS)
    require(peer.exitcode == 0, f"the other process ended with status {peer.exitcode}")


def _serve_edge(pipe: multiprocessing.connection.Connection, place: Place) -> None:
    asyncio.run(asyncio.wait_for(_echo_once(pipe, place), EDGE_SECONDS))


async def _echo_once(pipe: multiprocessing.connection.Connection, place: Place) -> None:
    transport, done = CollectiveTransport("127.0.0.1", place.device(1) if place.on_gpu else ""), asyncio.Event()

    async def echo(connection: object) -> None:
        body = bytearray(BODY_BYTES)
        received = await connection.receive(lambda head, n: memoryview(body))  # type: ignore[attr-defined]
        await connection.send(received.head, memoryview(body))  # type: ignore[attr-defined]
        await connection.receive()  # type: ignore[attr-defined]
        done.set()

    pipe.send(await transport.start())
    serving = asyncio.create_task(transport.serve(echo))
    await done.wait()
    serving.cancel()
    await transport.close()


async def _use_edge(address: str, place: Place) -> None:
    transport = CollectiveTransport("127.0.0.1", place.device(0) if place.on_gpu else "")
    await transport.start()
    connection = await transport.connect(address)
    body, back = np.random.default_rng(0).bytes(BODY_BYTES), bytearray(BODY_BYTES)
    await connection.send(b"there", memoryview(body))
    received = await connection.receive(lambda head, n: memoryview(back))
    require((received.head, bytes(back)) == (b"there", body), "the body came back otherwise")
    await connection.send(b"bye")
    try:
        await connection.receive()
        raise RuntimeError("the end of the other side went unnoticed")
    except LinkLostError:
        await connection.close()
    await transport.close()


def check_deepspeed(place: Place) -> None:
    """A step on the GPU moves the weights, and the probe is that of a plain forward pass."""
    from transformers import AutoModelForCausalLM

    from trainer.engine import TrainerEngine
    from trainer.packing import pack_rows
    from trainer.probing import probe_row, score_probe
    from trainer.ranks import join_ranks

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model")
        ranks = join_ranks(0, 1, use_gpu=place.on_gpu)
        engine = TrainerEngine(_config(model, trainer={"num_gpus_per_rank": int(place.on_gpu)}), ranks)
        before = score_probe(engine)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ids = probe_tokens(plain.config.vocab_size)
        require(before is not None and before.difference(logprobs_of(plain, ids)) < 1e-3, "the probe is not the model's")
        batch = pack_rows([probe_row(ids)], share_prompts=False, device=ranks.device)
        logprobs, _ = engine.forward(batch, is_last=True)
        engine.backward(-logprobs.sum())
        require(engine.update(1e-2).applied, "the update was not applied")
        after = score_probe(engine)
        require(after is not None and before is not None, "a log-prob is not finite")
        require(sum(after.logprobs) > sum(before.logprobs), "the step did not raise what it should")  # type: ignore[union-attr]
        ranks.leave()


def check_packed(place: Place) -> None:
    """Two rows packed one behind the other, on a GPU by flash attention, have the hidden states of the rows alone."""
    from laminar.config.system import ModelConfig
    from trainer.layout import TOLERANCE, packing_error, uses_flash
    from trainer.model import load_model

    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder) / "model")
        config = ModelConfig(path=str(path), dtype="bfloat16" if place.on_gpu else "float32")
        model = load_model(config, gradient_checkpointing=False, flash=place.on_gpu).to("cuda" if place.on_gpu else "cpu")
        require(uses_flash(model) == place.on_gpu, "the model was loaded with another attention")
        error = packing_error(model)
        require(error <= TOLERANCE[model.dtype], f"packed rows are off by {error:.3g}")


def check_sglang(place: Place) -> None:
    """The server generates, takes a version by each way of loading, and gives the trainer's log-probs."""
    for weight_load in ("disk", "pinned"):
        asyncio.run(_swap_sglang(place, weight_load))


async def _swap_sglang(place: Place, weight_load: str) -> None:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root:
        folder = write_tiny_model(Path(root) / "model")
        store, publisher = _store(Path(root), folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = {
            "kind": "sglang",
            "python": place.sglang_python,
            "num_gpus": int(place.on_gpu),
            "weight_load": weight_load,
            "start_seconds": 400,
        }
        config = _config(folder, rollout={"engine": engine | {"max_cached_tokens": 16384}})
        (Path(root) / "logs").mkdir()
        context = RoleContext("rollout-0", "gpu", uuid.uuid4().hex, "", Path(root))
        replica = Replica(config.rollout.engine, Puller(store), engine_starter(context, config))
        _publish(publisher, model, 1)
        await replica.start()
        try:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            _publish(publisher, model, 2)
            await replica.swap(WeightVersion(0, 2))
            verdict = replica.last_verdict
            require(verdict is not None and verdict.is_accepted and verdict.difference is not None, str(verdict))
            prompt = np.arange(3, 40, dtype=np.int32)
            answer = await replica.generate(prompt, SamplingParameters(0.0, 8, 0), uuid.uuid4().hex)
            expected = logprobs_of(model, [*prompt.tolist(), *answer.token_ids().tolist()])[-answer.num_tokens :]
            found = np.concatenate([segment.logprobs for segment in answer.segments])
            require(bool(np.abs(found - expected).max() < 1e-2), f"log-probs differ by {weight_load}: {found} {expected}")
        finally:
            await replica.kill()
            publisher.close()


def _publish(publisher: Publisher, model: torch.nn.Module, number: int) -> None:
    ids = probe_tokens(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    publisher.publish(WeightVersion(0, number), model.state_dict().items(), Probe(ids, tuple(logprobs_of(model, ids))))


def logprobs_of(model: Callable, ids: object) -> list[float]:
    """Log-prob of each token but the first by a plain forward pass."""
    tokens = torch.tensor([list(ids)])  # type: ignore[call-overload]
    with torch.no_grad():
        lines = model(tokens).logits[0].double().log_softmax(-1)
    return lines[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def _store(root: Path, model: Path) -> tuple[VersionStore, Publisher]:
    store = VersionStore(root, "gpu", "node", mapping_readers=1)
    return store, Publisher(store, model)


def _config(model: Path, **sections: Mapping[str, object]) -> LaminarConfig:
    tree = {"model": {"path": str(model), "dtype": "float32"}, "data": {"path": "-"}}
    return LaminarConfig.model_validate(tree | sections)


CHECKS: dict[str, Callable[[Place], None]] = {
    "pinned": check_pinned,
    "publish": check_publish,
    "collective": check_collective,
    "deepspeed": check_deepspeed,
    "packed": check_packed,
    "sglang": check_sglang,
}
"""What is checked, by name."""
