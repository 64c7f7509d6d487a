import json

import pyarrow
import pyarrow.parquet
import pytest

from laminar.config.system import DataConfig
from laminar.errors import ConfigError
from laminar.types import Message
from rollout.data import load_prompts

ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "2 + 2 =", "answer": 4, "tags": ["easy", {"by": None}]}]
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]


def write(folder, *lines, name="train.jsonl"):
    (folder / name).write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return DataConfig(path=name)


def complaint(data, folder, **settings):
    with pytest.raises(ConfigError) as caught:
        load_prompts(data, folder, **settings)
    return str(caught.value)


class TestJsonl:
    def test_columns_but_the_prompt_become_fields(self, tmp_path):
        prompts = load_prompts(write(tmp_path, *ROWS), tmp_path)
        assert [prompt.content for prompt in prompts] == ["1 + 1 =", "2 + 2 ="]
        assert prompts[1].fields == {"answer": 4, "tags": ["easy", {"by": None}]}
        assert [prompt.prompt_id for prompt in prompts] == ["train-000000", "train-000001"]

    def test_blank_lines_do_not_count(self, tmp_path):
        prompts = load_prompts(write(tmp_path, b"", ROWS[0], b"  ", ROWS[1], b""), tmp_path)
        assert [prompt.prompt_id for prompt in prompts] == ["train-000000", "train-000001"]

    def test_a_byte_order_mark_is_skipped(self, tmp_path):
        assert len(load_prompts(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode()), tmp_path)) == 1

    def test_messages_become_chat(self, tmp_path):
        (prompt,) = load_prompts(write(tmp_path, {"prompt": CHAT}), tmp_path)
        assert prompt.content == (Message("system", "Add."), Message("user", "1 + 1"))

    @pytest.mark.parametrize("column", ["prompt_id", "id"])
    def test_an_id_column_names_the_prompt(self, tmp_path, column):
        (prompt,) = load_prompts(write(tmp_path, {"prompt": "x", column: 17}), tmp_path)
        assert prompt.prompt_id == "17"
        assert prompt.fields == {}

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (b'{"prompt": "x"', "malformed"),
            (b"[1]", "not an object"),
            (b'{"prompt": NaN}', "NaN"),
            (b'{"prompt": "x", "answer": 1e999}', "too large"),
            (b'{"prompt": "x", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
            (b'{"prompt": "\xff"}', "utf-8"),
            ({"prompt": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "calls tools"),
            ({"question": "x"}, "no column 'prompt', only ['question']; set data.prompt_column"),
            ({"prompt": ""}, "give text"),
            ({"prompt": 3}, "is 3"),
            ({"prompt": []}, "give text"),
            ({"prompt": [{"role": "user"}]}, "message 0"),
            ({"prompt": [{"role": "robot", "content": "x"}]}, "one of system, user"),
            ({"prompt": [*CHAT, {"role": "user", "content": None}]}, "message 2"),
            ({"prompt": "x", "id": [1]}, "no id"),
            ({"prompt": "x", "id": ""}, "no id"),
            ({"prompt": "x", "big": 2**64}, "column 'big'"),
        ],
    )
    def test_a_malformed_row_is_named_by_file_and_line(self, tmp_path, line, words):
        text = complaint(write(tmp_path, ROWS[0], b"", line), tmp_path)
        assert "train.jsonl line 3" in text
        assert words in text
        assert "\n" not in text

    def test_an_id_used_twice_names_both_rows(self, tmp_path):
        text = complaint(write(tmp_path, {"prompt": "x", "id": 1}, {"prompt": "y", "id": "1"}), tmp_path)
        assert "line 2" in text
        assert "line 1" in text


class TestTooFew:
    def test_an_empty_file_is_refused(self, tmp_path):
        assert "has no rows" in complaint(write(tmp_path), tmp_path)

    def test_fewer_prompts_than_a_step_takes_are_refused(self, tmp_path):
        text = complaint(write(tmp_path, *ROWS), tmp_path, min_prompts=3)
        assert "2 prompts" in text
        assert "trainer.prompts_per_step = 3" in text


class TestPlaces:
    def test_a_path_counts_from_the_config_then_from_the_working_folder(self, tmp_path, monkeypatch):
        config_folder, working = tmp_path / "recipes", tmp_path / "work"
        config_folder.mkdir()
        working.mkdir()
        data = write(working, ROWS[0])
        monkeypatch.chdir(working)
        assert load_prompts(data, config_folder)[0].content == "1 + 1 ="
        write(config_folder, ROWS[1])
        assert load_prompts(data, config_folder)[0].content == "2 + 2 ="

    @pytest.mark.parametrize("path", ["trian.jsonl", "nowhere/train.parquet", "./data"])
    def test_a_missing_file_is_not_looked_for_on_the_hub(self, tmp_path, path):
        assert "exists neither under" in complaint(DataConfig(path=path), tmp_path)

    def test_an_unknown_kind_of_file_is_refused(self, tmp_path):
        (tmp_path / "train.csv").write_text("prompt\nx\n")
        assert "neither .jsonl nor .parquet" in complaint(DataConfig(path="train.csv"), tmp_path)


class TestParquet:
    def write(self, folder, columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
        return DataConfig(path="rows.parquet")

    def test_rows_read_as_from_jsonl(self, tmp_path):
        (prompt,) = load_prompts(self.write(tmp_path, {"prompt": [CHAT], "answer": [2]}), tmp_path)
        assert prompt.content[1] == Message("user", "1 + 1")
        assert prompt.fields == {"answer": 2}
        assert prompt.prompt_id == "rows-000000"

    def test_a_column_of_bytes_is_refused_by_name(self, tmp_path):
        text = complaint(self.write(tmp_path, {"prompt": ["x"], "image": [b"png"]}), tmp_path)
        assert "rows.parquet row 0, column 'image'" in text

    def test_a_broken_file_is_refused(self, tmp_path):
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        assert "cannot be read as Parquet" in complaint(DataConfig(path="rows.parquet"), tmp_path)


class TestHuggingFace:
    def test_saved_datasets_load_with_and_without_splits(self, tmp_path):
        import datasets

        dataset = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
        dataset.save_to_disk(str(tmp_path / "plain"))
        datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(str(tmp_path / "splits"))
        assert [prompt.content for prompt in load_prompts(DataConfig(path="plain"), tmp_path)] == ["a", "b"]
        assert [prompt.content for prompt in load_prompts(DataConfig(path="splits", split="test"), tmp_path)] == ["b"]
        assert "only ['test', 'train']" in complaint(DataConfig(path="splits", split="dev"), tmp_path)

    def test_a_folder_of_files_loads_through_the_library(self, tmp_path, monkeypatch):
        (tmp_path / "folder").mkdir()
        write(tmp_path / "folder", *[{"prompt": f"{n}"} for n in range(3)])
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
        prompts = load_prompts(DataConfig(path="folder"), tmp_path)
        assert [prompt.prompt_id for prompt in prompts] == ["folder-000000", "folder-000001", "folder-000002"]
