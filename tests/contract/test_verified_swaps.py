"""Swaps of a real engine from a real store, verified: cases D13, D14 and D16, and weights that are not what they should be.

On the torch engine and on SGLang's CPU server.
"""

import asyncio
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from laminar.cluster.roles import RoleContext
from laminar.config.rollout import RolloutConfig
from laminar.config.root import LaminarConfig
from laminar.types import FinishReason, SamplingParameters, WeightVersion
from relay.probe import Probe, probe_tokens
from relay.publisher import Publisher
from relay.puller import Puller
from relay.store import WEIGHTS_NAME, VersionStore
from rollout.engines.tiny_model import write_tiny_model
from rollout.replica import Replica
from rollout.start_engine import engine_starter
from rollout.verification import Check
from rollout.worker_counts import WorkerCounts

SGLANG_PYTHON = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
NEEDS_SGLANG = (pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="needs `make sglang-cpu`"))
SGLANG = pytest.param("sglang", marks=NEEDS_SGLANG)
PINNED = pytest.param("sglang pinned", marks=NEEDS_SGLANG)
"""Its ranks load slots by themselves."""
PROMPT = np.arange(3, 103, dtype=np.int32)
ANSWER = (7, 90, 4, 33, 61, 12, 12, 100)
ONE, TWO = WeightVersion(0, 1), WeightVersion(0, 2)


def logprobs_of(model, ids):
    """Plain forward in float64 of the softmax: log-prob of each token but the first."""
    with torch.no_grad():
        lines = model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
    return [lines[place - 1, ids[place]].item() for place in range(1, len(ids))]


class Site:
    """A trainer's model that is published into a store, and the replica that follows it."""

    def __init__(self, root: Path, logs: Path, kind: str, *, tied: bool = True) -> None:
        folder = write_tiny_model(root / "model", tied=tied)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.store = VersionStore(root, "run", "node", mapping_readers=2)
        self.publisher = Publisher(self.store, folder)
        kind, _, weight_load = kind.partition(" ")
        engine = {"kind": kind, "max_running": 16, "max_cached_tokens": 16384, "start_seconds": 400}
        engine |= {"python": str(SGLANG_PYTHON), "weight_load": weight_load or "disk"} if kind == "sglang" else {}
        (logs / "logs").mkdir()
        config = LaminarConfig.model_validate(
            {"model": {"path": str(folder), "dtype": "float32"}, "data": {"path": "none"}, "rollout": {"engine": engine}}
        )
        context = RoleContext("rollout-0", "run", "secret", "", logs)
        self.replica = Replica(config.rollout.engine, Puller(self.store), engine_starter(context, config))

    def publish(self, version: WeightVersion, factor: float = 1.05, probe: Probe | None = None) -> WeightVersion:
        """Scale every weight, then publish all of them, tied ones under both names, with the trainer's probe."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)
        ids = probe_tokens(self.model.config.vocab_size)
        probe = probe or Probe(ids, tuple(logprobs_of(self.model, ids)))
        assert not self.publisher.publish(version, self.model.state_dict().items(), probe).skipped
        return version

    def generate(self, prompt=PROMPT, new=200, on_segment=None):
        """Greedily: these weights then run into a loop without an end id."""
        sampling = SamplingParameters(0.0, new, 0)
        return asyncio.create_task(self.replica.generate(prompt, sampling, uuid.uuid4().hex, on_segment))


@pytest.fixture
async def make_site(tmp_path):
    sites = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:

        async def make(kind, **settings):
            site = Site(Path(root), tmp_path, kind, **settings)
            sites.append(site)
            site.publish(ONE)
            await site.replica.start()
            return site

        yield make
        for site in sites:
            await site.replica.kill()
            site.publisher.close()


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), SGLANG])
async def test_weights_that_do_not_give_the_trainer_s_log_probs_are_unknown_and_their_tokens_reach_nobody(make_site, kind):
    site = await make_site(kind)
    ids = probe_tokens(site.model.config.vocab_size)
    elsewhere = Probe(ids, tuple(logprobs_of(site.model, ids)))  # of version 1, sent along with version 2
    heard, begun = [], asyncio.Event()

    def listen(segment):
        heard.append(segment)
        begun.set()

    running = [site.generate(PROMPT[index:], new=1500, on_segment=listen) for index in range(4)]
    await asyncio.wait_for(begun.wait(), 60)
    await site.replica.swap(site.publish(TWO, factor=1.5, probe=elsewhere))
    verdict = site.replica.last_verdict
    assert (verdict.check, verdict.is_accepted) == (Check.PROBE, False)
    assert "log-probs of the probe of 0.2 differ" in site.replica.problem()
    assert site.replica.version is None
    await site.replica.kill()
    answers = await asyncio.gather(*running)
    assert all(answer.finish_reason is FinishReason.ABORT for answer in answers)
    assert {segment.version for answer in answers for segment in answer.segments} <= {ONE}
    assert {segment.version for segment in heard} == {ONE}
    await site.replica.restart()  # the damaged version is refused at the start, too
    assert site.replica.version is None
    assert "the engine was started on 0.2: log-probs of the probe" in site.replica.problem()
    site.publish(WeightVersion(0, 3), factor=1 / 1.5)
    await site.replica.restart()
    answer = await site.generate(new=4)
    assert {segment.version for segment in answer.segments} == {WeightVersion(0, 3)}


@pytest.mark.slow
async def test_a_sibling_s_prompt_counts_as_a_hit_of_the_cache(make_site):
    """Of two equal prompts a whole one was there already."""
    site = await make_site("torch")
    counts = WorkerCounts(RolloutConfig())
    assert "engine/prefix_hit_ratio" not in counts.metrics(site.replica, None)
    await site.generate(new=4)
    assert counts.metrics(site.replica, None)["engine/prefix_hit_ratio"] == 0
    await site.generate(new=4)
    assert counts.metrics(site.replica, None)["engine/prefix_hit_ratio"] == 0.5


@pytest.mark.slow
async def test_a_byte_that_changed_in_shared_memory_is_read_back_and_named(make_site):
    site = await make_site("torch")
    site.publish(TWO)
    with (site.store.folder_of(TWO) / WEIGHTS_NAME).open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff")
    await site.replica.swap(TWO)
    assert site.replica.last_verdict.check is Check.RANKS
    assert "rank 0 read 0.2 back: piece 0 of 1 is not what was published" in site.replica.problem()


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), SGLANG, PINNED])
async def test_five_updates_in_a_row_abort_none_of_sixteen_long_requests(make_site, kind):
    """Cases D13."""
    site = await make_site(kind)
    begun = [asyncio.Event() for _ in range(16)]
    running = [site.generate(PROMPT[i:], 400, lambda _, event=event: event.set()) for i, event in enumerate(begun)]
    for event in begun:
        await asyncio.wait_for(event.wait(), 60)
    later = []
    for number in range(2, 7):
        swap = asyncio.create_task(site.replica.swap(site.publish(WeightVersion(0, number), factor=1.01)))
        later.append(site.generate(PROMPT[20 + number :], new=3))
        await swap
        assert site.replica.version == WeightVersion(0, number)
        assert site.replica.last_verdict.difference < 1e-3
    answers = await asyncio.gather(*running)
    assert all(answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) for answer in answers)
    assert all(answer.num_tokens == 400 for answer in answers if answer.finish_reason is FinishReason.LENGTH)
    for answer in answers:
        numbers = [segment.version.number for segment in answer.segments]
        assert numbers == sorted(set(numbers))  # one change a version, never back
    assert all(answer.num_tokens == 3 for answer in await asyncio.gather(*later))


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), SGLANG, PINNED])
async def test_ten_updates_leave_nothing_of_older_weights_in_the_cache(make_site, kind):
    """Cases D14: a fixed answer behind a cached prompt is scored as a fresh model scores it, each time."""
    site = await make_site(kind)
    ids = (*PROMPT.tolist(), *ANSWER)
    before = logprobs_of(site.model, ids)[-8:]
    for number in range(2, 12):
        first = await site.generate(new=2)
        await site.replica.swap(site.publish(WeightVersion(0, number)))
        again = await site.generate(new=2)
        assert first.segments[0].version.number + 1 == again.segments[0].version.number
        assert again.cached_tokens == 0
        version, scored = await site.replica.client.score(ids)
        assert version == WeightVersion(0, number)
        assert scored[-8:] == pytest.approx(logprobs_of(site.model, ids)[-8:], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(scored[-8:], before, strict=True)) > 1e-3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), SGLANG, PINNED])
async def test_an_output_head_follows_its_embedding_if_tied_and_is_sent_on_its_own_if_not(make_site, kind, tied):
    """Cases D16: only embedding and, if it has one of its own, head change."""
    site = await make_site(kind, tied=tied)
    embedding, head = site.model.get_input_embeddings().weight, site.model.get_output_embeddings().weight
    assert (head is embedding) == tied
    for number, changed in enumerate((embedding, head), 2):
        with torch.no_grad():
            changed.add_(torch.randn(changed.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
        await site.replica.swap(site.publish(WeightVersion(0, number), factor=1.0))
        assert site.replica.last_verdict.is_accepted
        assert site.replica.last_verdict.difference < 1e-3
        with site.store.lease(WeightVersion(0, number)) as folder:
            names = transformers.modeling_utils.load_state_dict(folder / WEIGHTS_NAME).keys()
        assert ("lm_head.weight" in names) == (not tied)


@pytest.mark.parametrize("kind", [PINNED])
async def test_a_rank_that_cannot_load_a_version_is_named_and_the_weights_are_unknown(make_site, kind):
    """Cases D15 (b): the file lost a tensor behind the checks of names and shapes."""
    site = await make_site(kind)
    site.publish(TWO)
    path = site.store.folder_of(TWO) / WEIGHTS_NAME
    content = path.read_bytes().replace(b'"model.norm.weight"', b'"model.form.weight"')
    path.write_bytes(content)
    site.replica.client._tensor_forms = None
    await site.replica.swap(TWO)
    assert "rank 0 of 1 did not load 0.2: ValueError: model.form.weight" in site.replica.problem()
    assert site.replica.version is None
