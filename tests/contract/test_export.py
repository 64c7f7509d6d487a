"""`laminar export`: from a checkpoint to a folder that `transformers` loads, bit for bit; a damaged one is refused."""

import json
import struct

import pytest
from typer.testing import CliRunner

from laminar.cli.main import app
from laminar.errors import ConfigError
from trainer.checkpoint_folder import begin, complete
from trainer.export import export_model, find_origin


def write_weights(path, dtype="F32", data=bytes(range(16))):
    header = json.dumps({"w": {"dtype": dtype, "shape": [len(data) // 4], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def save_checkpoint(root, step, dtype="F32", keep=9):
    folder = begin(root, step) / "model"
    folder.mkdir()
    write_weights(folder / "model.safetensors", dtype, bytes([step] * 16))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder.parent / "optimizer_000.safetensors").write_bytes(b"moments")
    return complete(root, step, {}, keep)


@pytest.fixture
def run_folder(tmp_path):
    """A run with checkpoints of steps 2 and 4."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (2, 4):
        save_checkpoint(run / "checkpoints", step)
    return run


def weights_of(folder):
    return (folder / "model.safetensors").read_bytes()[-16:]


def test_the_newest_checkpoint_of_a_run_is_exported_whole_and_nothing_else(run_folder, tmp_path):
    result = CliRunner().invoke(app, ["export", str(run_folder), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "after step 4" in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert weights_of(tmp_path / "out") == bytes([4] * 16)


def test_a_checkpoint_of_an_emulated_run_has_nothing_to_export(tmp_path):
    (begin(tmp_path / "run" / "checkpoints", 1) / "extra.json").write_text("{}")
    checkpoint = complete(tmp_path / "run" / "checkpoints", 1, {"emulated": True}, 1)
    for source in (tmp_path / "run", checkpoint):
        with pytest.raises(ConfigError, match=r'step_000001 has no model/: .* trainer.kind = "emulated"'):
            export_model(source, tmp_path / "out")


def test_an_older_step_and_a_checkpoint_itself_are_exported(run_folder, tmp_path):
    export_model(run_folder, tmp_path / "by_step", step=2)
    export_model(run_folder / "checkpoints" / "step_000002", tmp_path / "by_path")
    assert weights_of(tmp_path / "by_step") == weights_of(tmp_path / "by_path") == bytes([2] * 16)


def test_the_config_names_the_number_type_that_was_trained(run_folder, tmp_path):
    save_checkpoint(run_folder / "checkpoints", 6, dtype="BF16")
    export_model(run_folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_tokenizer_of_its_own_comes_along(run_folder, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"mine": 1}')
    (tokenizer / "model.safetensors").write_bytes(b"not wanted")
    (run_folder / "config.toml").write_text(f'[model]\npath = "somewhere"\ntokenizer = "{tokenizer}"\n[data]\npath = "d"\n')
    export_model(run_folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"mine": 1}'
    assert weights_of(tmp_path / "out") == bytes([4] * 16)


def test_a_damaged_checkpoint_is_refused_by_the_files_name_and_leaves_nothing(run_folder, tmp_path):
    path = run_folder / "checkpoints" / "step_000002" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        export_model(run_folder, tmp_path / "out", step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("source", "step", "words"),
    [
        ("run", 3, "there are those of: 2, 4"),
        ("nowhere", None, "neither a run folder"),
        ("empty", None, "no checkpoint yet"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_remedy(run_folder, tmp_path, source, step, words):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=words):
        export_model(tmp_path / source, tmp_path / "out", step=step)


def test_a_folder_in_use_is_not_touched(run_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export_model(run_folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_run_folders_config_is_found_beside_its_checkpoints(run_folder):
    assert find_origin(run_folder).config is None
    (run_folder / "config.toml").write_text("")
    assert find_origin(run_folder / "checkpoints" / "step_000002").config == (run_folder / "config.toml").resolve()


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_transformers_loads_an_exported_model_with_the_trained_parameters(ranks, tmp_path, zero_stage):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from laminar.config.root import LaminarConfig
    from rollout.tiny import make_model
    from trainer import checkpoint
    from trainer.engine import TrainerEngine

    make_model(tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tools.jinja").write_text("with tools")
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"of an older training")
    config = LaminarConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
            "data": {"path": "-"},
            "trainer": {"deepspeed": {"zero_stage": zero_stage}},
        }
    )
    engine = TrainerEngine(config, ranks)
    with torch.no_grad():
        for _, tensor in engine.state_tensors():
            tensor.add_(torch.randn_like(tensor))
    checkpoint.save(tmp_path / "run" / "checkpoints", 3, engine, {}, keep=1)
    export_model(tmp_path / "run", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    parameters = dict(loaded.named_parameters())
    assert loaded.dtype == torch.bfloat16
    for name, tensor in engine.state_tensors():
        assert torch.equal(parameters[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode([2, 3]) == "01"
    assert tokenizer.chat_template["tools"] == "with tools"
    assert not list(tmp_path.glob("run/**/optimizer.pt"))
