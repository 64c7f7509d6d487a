"""LoRA: only adapters are trained, what is published is merged, the engine computes with it, a checkpoint holds both."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laminar.errors import ConfigError
from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.store import VersionStore
from rollout.engines.tiny_model import write_tiny_model
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.wire import GenerateWire, SamplingWire
from trainer import checkpoint
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.packing import make_row, pack_rows
from trainer.publishing import WeightPublisher
from trainer.step import train_step

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

pytestmark = pytest.mark.heavy

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
STAGES = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model, stage=0, **lora):
    zero = {"zero_stage": stage, "max_whole_parameter": 40}
    return oracle.make_config(model, lora=LORA | lora, deepspeed=zero, max_tokens_per_micro_batch=40)


def train(engine, steps=2, algorithm=None):
    return [
        train_step(engine, algorithm or PolicyGradient(GrpoOptions()), oracle.make_groups(s), s) for s in range(1, steps + 1)
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_loads_what_was_published_samples_with_the_trainers_own_logprobs(stage, model_path, ranks, tmp_path):
    engine = TrainerEngine(config_of(model_path, stage), ranks)
    train(engine)
    store = VersionStore(tmp_path, "run", "node")
    WeightPublisher(Publisher(store, model_path), engine).publish(WeightVersion(0, 2))
    sampler = TorchEngine(model_path, "0.0")
    sampler.book.pause("retract")
    sampler.book.update_weights(store.folder_of(WeightVersion(0, 2)), "0.2", flush_cache=True)
    sampler.book.resume()
    sampling = SamplingWire(max_new_tokens=12, sampling_seed=0, ignore_eos=True)
    output = sampler.add(GenerateWire(input_ids=[5, 9, 17, 33], rid="a", sampling_params=sampling))
    while sampler.book.has_work:
        sampler.step()
    chain = oracle.Chain((oracle.given([5, 9, 17, 33]), oracle.sampled(output.ids, output.logprobs, WeightVersion(0, 2))))
    row = make_row(chain, name="a", prompt=0, temperature=1.0, advantage=1.0, sequence_tokens=12)
    own = engine.score(pack_rows([row], share_prompts=False, device=ranks.device))
    assert own[0, 4:].tolist() == pytest.approx(output.logprobs, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(stage, model_path, ranks, tmp_path):
    config = config_of(model_path, stage)
    engine = TrainerEngine(config, ranks)
    train(engine, 1)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    resumed = TrainerEngine(config, ranks)
    checkpoint.load(folder, resumed)
    for one in (engine, resumed):
        train_step(one, PolicyGradient(GrpoOptions()), oracle.make_groups(2), 2)
    expected = oracle.weights(engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in oracle.weights(resumed).items())
    assert any(
        not torch.equal(expected[name], tensor) for name, tensor in load_file(model_path / "model.safetensors").items()
    )


def test_only_adapters_learn_and_the_saved_model_is_the_base_with_them_merged(model_path, ranks, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = TrainerEngine(config_of(model_path), ranks)
    train(engine, 1)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    base, merged = (load_file(path / "model.safetensors") for path in (model_path, folder / "model"))
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
    assert base.keys() == merged.keys()
    assert {name.split(".")[-2] for name in changed} == set(LORA["targets"])
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), folder / "adapter")
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        if name in merged:
            torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_of_a_kl_term_is_the_base_and_leaves_training_as_a_copy_of_it_does(stage, model_path, ranks):
    algorithm = PolicyGradient(GrpoOptions(kl_coef=0.5))
    weights, metrics = [], []
    for reference in ("", str(model_path)):
        config = config_of(model_path, stage)
        config = config.model_copy(update={"model": config.model.model_copy(update={"reference": reference})})
        engine = TrainerEngine(config, ranks, algorithm.needs)
        metrics.append(train(engine, 2, algorithm)[-1].metrics["train/kl"])
        weights.append(oracle.weights(engine))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)
    assert metrics[0] != 0
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-6, atol=1e-8)


def test_a_checkpoint_with_adapters_and_a_run_without_are_told_apart(model_path, ranks, tmp_path):
    folder = checkpoint.save(tmp_path, 1, TrainerEngine(config_of(model_path), ranks), {}, keep=1)
    with pytest.raises(ConfigError, match=r"with adapters, this run has none: set trainer\.lora"):
        checkpoint.load(folder, TrainerEngine(config_of(model_path, rank=0), ranks))
    with pytest.raises(ConfigError, match=r"is of another model than trainer\.lora describes"):
        checkpoint.load(folder, TrainerEngine(config_of(model_path, rank=3), ranks))


def test_any_seed_that_a_run_may_have_draws_adapters(model_path, ranks):
    engines = []
    for seed in (5, 2**64 + 6):
        config = config_of(model_path)
        engines.append(TrainerEngine(config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}), ranks))
    ours, theirs = (dict(engine.adapters.tensors()) for engine in engines)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (["nothing"], "do not fit the model"),
        (["q_proj", "v_prj"], "'v_prj', but no layer"),  # else it would be left out in silence
        (["embed_tokens"], "only the linear"),
    ],
)
def test_targets_that_cannot_be_published_are_refused(targets, sentence, model_path, ranks):
    with pytest.raises(ConfigError, match=sentence):
        TrainerEngine(config_of(model_path, targets=targets), ranks)
