"""What a weights file's header tells, and which files an engine must not see."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from laminar.errors import EngineError
from rollout.engines.weights_file import check_same_forms, read_forms

TENSORS = {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_forms_are_dtype_and_shape_by_name(tmp_path):
    assert read_forms(write(tmp_path, TENSORS)) == {"a": ("F32", (2, 3)), "b": ("F16", (4,))}


def test_a_truncated_or_absent_file_is_refused(tmp_path):
    path = write(tmp_path / "v", TENSORS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EngineError, match="not a whole safetensors file"):
        read_forms(tmp_path / "v")
    with pytest.raises(EngineError, match="not a whole safetensors file"):
        read_forms(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": None}, r"missing \['a'\]"),
        ({"c": np.zeros(1, np.float32)}, r"not known \['c'\]"),
        ({"a": np.zeros((3, 2), np.float32)}, r"dtype or shape \['a'\]"),
        ({"b": np.ones(4, np.float32)}, r"dtype or shape \['b'\]"),
    ],
)
def test_other_tensors_than_the_first_files_are_refused_by_name(tmp_path, changes, words):
    expected = read_forms(write(tmp_path / "first", TENSORS))
    changed = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    with pytest.raises(EngineError, match=words):
        check_same_forms(expected, read_forms(write(tmp_path / "second", changed)), "second")


def test_the_same_tensors_with_other_values_pass(tmp_path):
    first = read_forms(write(tmp_path / "first", TENSORS))
    check_same_forms(first, read_forms(write(tmp_path / "second", {n: t + 1 for n, t in TENSORS.items()})), "second")
