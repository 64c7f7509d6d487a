import os
import resource
from contextlib import contextmanager

import pytest

from laminar.errors import ConfigError, RelayError
from relay.manifest import checksum
from relay.model_files import copy_model_files, describe_files, stage_model_files, unpack_files


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("a" * 10_000)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


@pytest.fixture
def staged(tmp_path):
    folder = tmp_path / "staged"
    folder.mkdir()
    return folder


@contextmanager
def files_of_at_most(num_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_config_and_tokenizer_are_staged_and_no_weights(model, staged):
    stage_model_files(model, staged)
    assert {path.name: path.read_text() for path in staged.iterdir()} == {
        "config.json": "{}",
        "tokenizer.json": "a" * 10_000,
    }


STRAYS = (
    "optimizer.pt", "rng_state.pth", "scheduler.bin", "trainer_state.json", "training_args.bin", "adapter_config.json",
    "model.gguf", "model.onnx", "tf_model.h5", "flax_model.msgpack", "model-00001-of-00002.safetensors",
    "pytorch_model.bin.index.json", "train.log", "train.json", "notes.txt", ".hidden.model", "README.md", "setup.py",
)  # fmt: skip
NEEDED = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken", "tekken.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def test_what_a_model_is_loaded_with_goes_along_and_nothing_else_of_its_folder(model, tmp_path):
    for name in (*STRAYS, *NEEDED):
        (model / name).write_text("{}")
    for folder in ("checkpoint-500", "additional_chat_templates"):
        (model / folder).mkdir()
        (model / folder / "tools.jinja").write_text("x")
        (model / folder / "optimizer.pt").write_text("x")
    (model / "logs").symlink_to(tmp_path)
    (model / "dataset.json").symlink_to(model / "config.json")
    copy_model_files(model, tmp_path / "copy")
    copied = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert copied == {"config.json", "tokenizer.json", "additional_chat_templates/tools.jinja", *NEEDED}


def test_files_that_are_links_as_in_a_hubs_cache_are_copied_whole(model, tmp_path):
    (model / "tokenizer.json").rename(tmp_path / "blob")
    (model / "tokenizer.json").symlink_to(tmp_path / "blob")
    copy_model_files(model, tmp_path / "copy")
    assert not (tmp_path / "copy" / "tokenizer.json").is_symlink()
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "a" * 10_000


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
def test_a_models_own_code_goes_along_if_a_config_names_it(config, model, staged):
    (model / "modeling_mine.py").write_text("")
    stage_model_files(model, staged)
    assert not (staged / "modeling_mine.py").exists()
    (model / config).write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}')
    stage_model_files(model, staged)
    assert (staged / "modeling_mine.py").exists()


def test_a_folder_without_config_is_refused_and_replaces_nothing(model, staged):
    stage_model_files(model, staged)
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json: set model\.path"):
        stage_model_files(model, staged)
    assert (staged / "config.json").read_text() == "{}"


def test_a_copy_that_stops_half_way_leaves_the_old_files_whole(model, staged):
    stage_model_files(model, staged)
    before = describe_files(staged)
    (model / "config.json").write_text('{"new": 1}')
    (model / "tokenizer.json").write_text("b" * 10_000)
    with files_of_at_most(5_000), pytest.raises(OSError, match="too large"):
        stage_model_files(model, staged)
    assert describe_files(staged) == before
    stage_model_files(model, staged)
    assert sorted(path.name for path in staged.iterdir()) == ["config.json", "tokenizer.json"]
    assert (staged / "tokenizer.json").read_text() == "b" * 10_000


def test_a_file_that_stays_the_same_is_left_alone_and_one_that_goes_is_removed(model, staged):
    (model / "merges.txt").write_text("x")
    stage_model_files(model, staged)
    before = {name: os.stat(staged / name).st_ino for name in ("config.json", "tokenizer.json")}
    (model / "merges.txt").unlink()
    (model / "config.json").write_text("[]")
    stage_model_files(model, staged)
    after = {path.name: path.stat().st_ino for path in staged.iterdir()}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert after["config.json"] != before["config.json"]
    assert sorted(after) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", ["../evil", ".hidden", "a/b"])
def test_a_model_file_whose_name_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RelayError, match="no plain file name"):
        unpack_files(tmp_path, [(name, 3)], b"abc", {name: checksum(b"abc")})
    assert list(tmp_path.iterdir()) == []


def test_model_files_that_are_not_what_was_offered_replace_nothing(tmp_path):
    (tmp_path / "config.json").write_text("old")
    for sizes, body in (([("config.json", 3)], b"abX"), ([("config.json", 2)], b"abc"), ([], b"")):
        with pytest.raises(RelayError, match="came broken"):
            unpack_files(tmp_path, sizes, body, {"config.json": checksum(b"abc")})
    assert (tmp_path / "config.json").read_text() == "old"
