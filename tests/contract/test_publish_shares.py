"""Two ranks of one machine write one version: byte for byte what rank 0 alone writes, under every ZeRO stage.

The file is its own rank program: the fixture starts it twice.
"""

import importlib.util
import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from laminar.errors import DeadlineError
from laminar.types import WeightVersion
from relay.manifest import load_layout
from relay.publisher import Publisher
from relay.share import even_stretches
from relay.store import MANIFEST_NAME, WEIGHTS_NAME, VersionStore
from trainer.gathering import is_partitioned
from trainer.publishing import WeightPublisher
from trainer.session import TrainingSession
from trainer.shares import WeightShares, join_shares, own_stretches

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

CASES = [(stage, model, dtype) for stage in range(4) for model in ("tied", "untied") for dtype in ("float32", "bfloat16")]
LARGEST_WHOLE = 40
"""The norms, of 32 numbers, stay whole under ZeRO 3; biases of 49 are split, and the second half is padded."""


def config_of(model, stage, dtype="auto", **trainer):
    settings = {"deepspeed": {"zero_stage": stage, "max_whole_parameter": LARGEST_WHOLE}, "max_tokens_per_micro_batch": 40}
    config = oracle.make_config(model, **settings | trainer)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def save_model(path, *, tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 49, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, mlp_bias=True, tie_word_embeddings=tied))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # else zeros, as padding might be
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def told(tmp_path_factory, run_two_ranks):
    """Where two ranks left what they saw."""
    folder = tmp_path_factory.mktemp("shares")
    for name in ("tied", "untied"):
        save_model(folder / name, tied=name == "tied")
    run_two_ranks(__file__, folder / "tied", folder, 170.0)
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_are_byte_for_byte_what_rank_0_writes_alone(case, told):
    alone, shared = (read_version(told / name_of(case), WeightVersion(0, number)) for number in (1, 2))
    assert alone == shared


def test_under_zero_3_a_rank_writes_its_own_half_and_no_parameter_is_whole_meanwhile(told):
    for rank in range(2):
        seen = json.loads((told / f"rank{rank}.json").read_text())
        for case in CASES:
            written, total, whole = seen[name_of(case)]
            assert abs(written - total / 2) < 100  # one number for each of the split parameters, at most
            assert case[0] < 3 or whole == 0


def test_a_copy_beside_a_step_is_of_the_weights_before_it_and_the_next_of_those_after(told):
    before, beside, gathered, after = (read_version(told / "session", WeightVersion(0, number))[0] for number in range(1, 5))
    assert beside == before
    assert gathered != before
    assert after == gathered


def test_all_ranks_skip_a_version_together_and_offer_it_again(told):
    seen = json.loads((told / "rank0.json").read_text())
    assert seen["skipped"] == [True, False]


def test_a_rank_that_dies_half_way_leaves_no_version_and_a_slot_that_can_be_written_again(told):
    seen = json.loads((told / "rank0.json").read_text())
    assert seen["after_death"] == ["0.1"]
    first, again = (read_version(told / "death", WeightVersion(0, number)) for number in (1, 3))
    assert first == again


def name_of(case):
    return "-".join(map(str, case))


def read_version(folder, version):
    """A version's bytes, and their checksums as its manifest has them."""
    path = open_store(folder).folder_of(version)
    return (path / WEIGHTS_NAME).read_bytes(), json.loads((path / MANIFEST_NAME).read_text())["checksums"]


def open_store(folder):
    folder.mkdir(exist_ok=True)
    return VersionStore(folder, "run", "node", keep_versions=4)


def publish_both_ways(engine, shares, store, model):
    """Rank 0 alone, then both: the elements this rank wrote, all there are, how many split parameters are whole."""
    ranks, layout = engine.ranks, load_layout(engine.state_shapes())
    if ranks.is_first:
        publisher = Publisher(store, model)
        publisher.prepare(layout)
        publisher.publish(WeightVersion(0, 1), engine.state_tensors())
        publisher.publish(
            WeightVersion(0, 2), fill=partial(shares.fill, lambda order: ranks.decide(order.encode)), tensors=()
        )
        publisher.close()
    else:
        for _ in engine.state_tensors():
            pass
        shares.begin(ranks.decide(lambda: b"").decode())
        shares.finish()
    split = [p for p in engine.model.parameters() if is_partitioned(p) and p.ds_numel > LARGEST_WHOLE]
    written = sum(len(stretch.values) for stretch in own_stretches(engine))
    total = sum(place.nbytes for place in layout.tensors.values()) // engine.model.dtype.itemsize
    return written, total, sum(parameter.numel() > 0 for parameter in split)


def publish_beside_a_step(session, store, model):
    """Rank 0, the other follows: by shares before the step, alone and by shares after it."""
    publisher = Publisher(store, model)
    weights = WeightPublisher(publisher, session, fill=session.fill)
    assert not weights.publish(WeightVersion(0, 1)).skipped
    begun = weights.publish(WeightVersion(0, 2), beside=True)
    assert (begun.skipped, begun.num_bytes > 0) == (False, True)
    assert session.train(oracle.make_groups(9), 1, free_weights=weights.free_weights).skipped_reason is None
    assert not WeightPublisher(publisher, session).publish(WeightVersion(0, 3), beside=True).skipped
    assert weights.publish(WeightVersion(0, 4), beside=True).copy_seconds > 0
    weights.settle()
    publisher.close()


def meet_leased_slots(session, folder, model):
    """Rank 0, the other follows: whether a version was skipped while all slots were leased, and whether it is later."""
    folder.mkdir()
    store = VersionStore(folder, "run", "node", keep_versions=1)
    weights = WeightPublisher(Publisher(store, model), session, fill=session.fill)
    weights.publish(WeightVersion(0, 1))
    with store.lease(WeightVersion(0, 1)):
        weights.publish(WeightVersion(0, 2))
        with store.lease(WeightVersion(0, 2)):
            skipped = weights.publish(WeightVersion(0, 3), beside=True).skipped
    weights.offer_again()
    assert store.newest() == WeightVersion(0, 3 if not weights.has_unpublished else 2)
    return [skipped, weights.has_unpublished]


def die_half_way(rank, store, folder, model):
    """Rank 1 ends after its first stretch, rank 0 goes on alone; what versions there were in between."""
    named = [("a", torch.arange(300.0)), ("b", torch.arange(301.0))]
    layout = load_layout(named)

    def own():
        stretches = even_stretches(named, rank, 2)
        yield stretches[0]
        if rank == 1:
            os._exit(0)
        yield from stretches[1:]

    shares = WeightShares(rank, 2, store, layout, own, seconds=3.0)
    if rank == 1:
        shares.begin(store.get("order").decode())
        shares.finish()
        raise AssertionError("rank 1 lives")
    versions = open_store(folder)
    publisher = Publisher(versions, model)
    publisher.prepare(layout)
    publisher.publish(WeightVersion(0, 1), named)
    fill = partial(shares.fill, lambda order: store.set("order", order))
    publisher.publish(WeightVersion(0, 2), (), until="begun", fill=fill)
    with pytest.raises(DeadlineError, match="the shares of trainer ranks 1 "):
        publisher.finish_copy()
    seen = list(map(str, versions.versions()))
    publisher.close()
    again = Publisher(versions, model)  # as a restarted rank 0: nobody holds anything
    again.publish(WeightVersion(0, 3), named)
    again.close()
    return seen


def rank_program(model, folder, port, rank):
    """What each of the two ranks does; see the tests above."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    groups = {group[0].group_id: group for group in oracle.make_groups(9)}
    fetch = lambda ids: [groups[name] for name in ids]  # noqa: E731
    session = TrainingSession(config_of(model, 3, num_ranks=2), folder / "none", rank, store, fetch, "node")
    result = {}
    for case in CASES:
        stage, name, dtype = case
        engine, _ = oracle.train(config_of(folder / name, stage, dtype), session.engine.ranks, 1)
        shares = join_shares(engine, PrefixStore(name_of(case), store), "node")
        result[name_of(case)] = publish_both_ways(engine, shares, open_store(folder / name_of(case)), folder / name)
    assert join_shares(session.engine, store, f"node-{rank}") is None
    if rank == 0:
        publish_beside_a_step(session, open_store(folder / "session"), model)
        result["skipped"] = meet_leased_slots(session, folder / "skips", model)
        session.dismiss()
    else:
        session.follow()
        (folder / "rank1.json").write_text(json.dumps(result))
    result["after_death"] = die_half_way(rank, PrefixStore("death", store), folder / "death", model)
    (folder / "rank0.json").write_text(json.dumps(result))
    os._exit(0)  # DeepSpeed would wait for the other


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # all is written and left; how the libraries' threads end with a process is not tested
