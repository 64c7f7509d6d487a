"""The GPU check on a machine without one, and what it says it leaves out."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check, gpu_checks

SGLANG_PYTHON = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"


def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main(lambda: 0) == 2
    assert capsys.readouterr().out == "there is no GPU that PyTorch can use here, so nothing was checked\n"


def test_what_cannot_run_is_named_with_its_reason(tmp_path, monkeypatch):
    reasons = gpu_check.reasons_to_skip(1, str(tmp_path / "python"))
    assert reasons.keys() == {"collective", "packed", "sglang"} <= gpu_checks.CHECKS.keys()
    assert reasons["packed"].startswith("flash-attn is not installed")
    assert "two GPUs" in reasons["collective"]
    assert "make sglang" in reasons["sglang"]
    monkeypatch.setattr(gpu_check, "is_flash_attn_2_available", lambda: True)
    assert gpu_check.reasons_to_skip(2, sys.executable) == {}


def test_a_check_that_fails_is_a_failure_in_words():
    with pytest.raises(RuntimeError, match="the slot is not pinned"):
        gpu_checks.require(False, "the slot is not pinned memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in gpu_checks.CHECKS if name not in ("sglang", "deepspeed")])
def test_the_checks_hold_without_a_gpu_by_the_same_code(name):
    gpu_checks.CHECKS[name](gpu_checks.Place(on_gpu=False))


@pytest.mark.sglang
@pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="needs `make sglang-cpu`")
def test_the_sglang_check_holds_on_its_cpu_engine():
    gpu_checks.CHECKS["sglang"](gpu_checks.Place(str(SGLANG_PYTHON), on_gpu=False))
