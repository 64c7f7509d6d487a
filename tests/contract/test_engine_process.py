"""The engine process: start, failure to start, lifelines, group kill; and answers that an engine must not give."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from laminar.errors import ConfigError, DeadlineError, EngineError
from laminar.types import FinishReason, WeightVersion
from rollout.engines.answers import AnswerStream, read_answer, read_scores
from rollout.engines.client import EngineClient
from rollout.engines.launch import SGLANG_LAUNCH, EngineLaunch, sglang_command
from rollout.engines.process import EngineProcess

V0 = WeightVersion(0, 0)


def launch(tmp_path, program, **changes):
    """An engine whose interpreter is a small program of ours, so that it starts at once."""
    path = tmp_path / "engine"
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(program))
    path.chmod(0o755)
    return EngineLaunch(tmp_path / "m", V0, "secret", "run-1", tmp_path / "engine.log", python=str(path), **changes)


LISTENS = """
    import json, os, sys, time
    from rollout.engines.lifeline import die_with_parent

    die_with_parent()
    (flag,) = [flag for flag in sys.argv if flag.startswith("--ready-fd=")]
    content = {"url": "http://127.0.0.1:9", "threads": os.environ["OMP_NUM_THREADS"]}
    os.write(int(flag.partition("=")[2]), json.dumps(content).encode() + b"\\n")
    time.sleep(600)
"""


async def gone(pid, seconds=20.0):
    async with asyncio.timeout(seconds):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_an_engine_that_dies_while_starting_is_reported_with_its_own_words(tmp_path):
    process = EngineProcess(launch(tmp_path, "import sys; sys.exit('no such model')"))
    with pytest.raises(EngineError, match=r"engine\.log ends with: no such model"):
        await process.start(60)
    assert process.returncode not in (None, 0)


async def test_an_interpreter_without_sglang_is_named_with_the_remedy(tmp_path):
    launch = EngineLaunch(tmp_path / "m", V0, "secret", "run-1", tmp_path / "engine.log", kind="sglang")
    with pytest.raises(EngineError, match=r"has no SGLang; run `make sglang`"):
        await EngineProcess(launch).start(60)


def test_sglang_is_told_its_device_its_dtype_and_the_options_last(tmp_path):
    def flags(**settings):
        return sglang_command(
            EngineLaunch(tmp_path / "m", V0, "secret", "run-1", tmp_path / "log", kind="sglang", python="py", **settings), 5
        )

    cpu = flags(dtype="float32", options={"mem-fraction-static": 0.1, "disable-overlap-schedule": False})
    assert cpu[:4] == ["py", str(SGLANG_LAUNCH), "--ready-fd=5", "--"]
    assert {"--device=cpu", "--attention-backend=torch_native", "--dtype=float32", "--mem-fraction-static=0.1"} <= set(cpu)
    assert "--skip-tokenizer-init" in cpu
    assert "--disable-overlap-schedule" not in cpu
    gpu = flags(dtype="bfloat16", num_gpus=2, tensor_parallel_size=2)
    assert {"--dtype=bfloat16", "--tensor-parallel-size=2", "--weight-version=0.0"} <= set(gpu)
    assert not any(flag.startswith(("--device", "--attention-backend")) for flag in gpu)
    assert not any("secret" in flag for flag in gpu)


async def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="torch"):
        EngineProcess(launch(tmp_path, "", kind="tourch"))


async def test_a_start_past_its_deadline_is_killed_and_named(tmp_path):
    process = EngineProcess(launch(tmp_path, "import time; time.sleep(600)"))
    with pytest.raises(DeadlineError, match="engine to start"):
        await process.start(0.3)
    assert process.returncode == -signal.SIGKILL


async def test_kill_ends_the_whole_group_and_calls_fail_from_then_on(tmp_path):
    process = EngineProcess(launch(tmp_path, LISTENS))
    client = EngineClient(await process.start(60), token="secret", control_seconds=10)
    assert os.getpgid(process.pid) == process.pid
    await process.kill()
    assert await process.wait() == -signal.SIGKILL
    with pytest.raises(EngineError):
        await client.health()
    await client.close()


async def test_an_engine_dies_with_its_parent_even_by_kill_9(tmp_path):
    engine = launch(tmp_path, LISTENS)
    program = f"""
        import asyncio
        from pathlib import Path, PosixPath
        from laminar.types import WeightVersion
        from rollout.engines.launch import EngineLaunch
        from rollout.engines.process import EngineProcess

        async def main():
            process = EngineProcess({engine!r})
            await process.start(60)
            print(process.pid, flush=True)
            await process.wait()

        asyncio.run(main())
    """
    parent = subprocess.Popen(  # noqa: ASYNC220 starting takes no time
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    try:
        child = int(await asyncio.to_thread(parent.stdout.readline))
        assert psutil.pid_exists(child)
    finally:
        parent.kill()
        parent.wait()
    await gone(child)


def answer(ids, logprobs, **meta):
    triples = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]
    info = {
        "id": "a",
        "finish_reason": {"type": "stop", "matched": 2},
        "completion_tokens": len(ids),
        "weight_version": "0.3",
        "output_token_logprobs": triples,
    }
    return {"output_ids": ids, "meta_info": info | meta}


def test_an_answer_becomes_segments_by_version():
    spans = [{"version": "0.3", "start": 0, "end": 3}, {"version": "0.4", "start": 3, "end": 5}]
    generation = read_answer(
        answer([11, 12, 13, 14, 15], [-0.1, -0.2, -0.3, -0.4, -0.5], weight_versions=spans, cached_tokens=4),
        masked_heads=True,
    )
    assert [(s.version.number, len(s), s.masked_head_tokens) for s in generation.segments] == [(3, 3, 0), (4, 2, 1)]
    assert generation.cached_tokens == 4
    assert generation.finish_reason is FinishReason.STOP


def test_an_answer_without_spans_counts_as_one_version():
    (segment,) = read_answer(answer([11], [-0.1]), masked_heads=False).segments
    assert segment.version == WeightVersion(0, 3)


@pytest.mark.parametrize(("masked_heads", "masked"), [(True, 1), (False, 0)])
def test_a_first_token_by_other_weights_than_those_at_sending_counts_as_a_later_versions(masked_heads, masked):
    """Its prompt may have been taken from the prefix cache of the weights before."""
    content = answer([11, 12], [-0.1, -0.2])
    (segment,) = read_answer(content, masked_heads=masked_heads, sent_under=WeightVersion(0, 2)).segments
    assert segment.masked_head_tokens == masked
    (segment,) = read_answer(content, masked_heads=masked_heads, sent_under=WeightVersion(0, 3)).segments
    assert segment.masked_head_tokens == 0


def test_an_abort_in_the_queue_without_counts_is_an_empty_answer():
    meta = {"id": "a", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "0.3"}
    generation = read_answer({"output_ids": [], "meta_info": meta}, masked_heads=False)
    assert (generation.segments, generation.finish_reason) == ((), FinishReason.ABORT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (answer([11, 12], [-0.1]), "2 ids, 1 log-probs"),
        (answer([11, 12], [-0.1, -0.2], completion_tokens=3), "3 counted"),
        (answer([11], [-0.1], output_token_logprobs=[[-0.1, 12, None]]), "must match"),
        (answer([11], [float("nan")]), "not finite"),
        (answer([11, 12], [-0.1, -0.2], weight_versions=[{"version": "0.3", "start": 0, "end": 1}]), "do not cover"),
        (answer([11, 12], [-0.1, -0.2], weight_versions=[{"version": "0.3", "start": 1, "end": 2}]), "do not cover"),
    ],
)
def test_an_answer_that_does_not_add_up_is_an_error_never_padded(wrong, message):
    with pytest.raises(EngineError, match=message):
        read_answer(wrong, masked_heads=False)


def streamed(part):
    stream = AnswerStream(lambda _: None, masked_heads=False)
    stream.add(part)
    return stream.whole()


MALFORMED = {
    "text only": {"text": "hi", "meta_info": answer([11], [-0.1])["meta_info"]},
    "no meta": {"output_ids": [11]},
    "a list": [answer([11], [-0.1])],
    "nothing": None,
    "an unknown end": answer([11], [-0.1], finish_reason={"type": "error"}),
    "an end that is not an engine's": answer([11], [-0.1], finish_reason={"type": "wall_time"}),
    "no version": answer([11], [-0.1], weight_version=None),
    "an odd version": answer([11], [-0.1], weight_version="default"),
    "pairs without ids": answer([11], [-0.1], output_token_logprobs=[[-0.1]]),
    "a huge id": answer([2**40], [-0.1]),
    "a negative id": answer([-1], [-0.1]),
    "half an id": answer([5.5], [-0.1]),
    "a probability above 1": answer([11], [0.5]),
    "cached tokens in words": answer([11], [-0.1], cached_tokens="few"),
}


@pytest.mark.parametrize("wrong", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_an_engine_error_whole_or_streamed(wrong):
    with pytest.raises(EngineError, match=r"malformed .*protocol"):
        read_answer(wrong, masked_heads=False)
    with pytest.raises(EngineError, match=r"malformed .*protocol"):
        streamed(wrong)


def test_scores_without_a_version_or_log_probs_are_an_engine_error():
    for wrong in ({}, {"meta_info": {}}, {"meta_info": {"input_token_logprobs": [[None], [-0.5]]}}):
        with pytest.raises(EngineError):
            read_scores(wrong, 2)


def test_a_stream_marks_the_same_tokens_as_a_whole_answer_does():
    """Also the first token, if other weights answer than those at sending."""
    spans = [{"version": "0.3", "start": 0, "end": 2}, {"version": "0.4", "start": 2, "end": 4}]
    parts = [
        answer([11], [-0.1], completion_tokens=1, weight_versions=[{"version": "0.3", "start": 0, "end": 1}]),
        answer([12, 13, 14], [-0.2, -0.3, -0.4], completion_tokens=4, weight_versions=spans),
    ]
    heard = []
    stream = AnswerStream(heard.append, masked_heads=True, sent_under=WeightVersion(0, 2))
    for part in parts:
        stream.add(part)
    assert [(len(s), s.version.number, s.masked_head_tokens) for s in heard] == [(1, 3, 1), (1, 3, 0), (2, 4, 1)]
    for generation in (stream.whole(), stream.broken_off()):
        assert [(len(s), s.version.number, s.masked_head_tokens) for s in generation.segments] == [(2, 3, 1), (2, 4, 1)]
