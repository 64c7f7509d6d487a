"""What sinks write, read back by others; and that a slow or failing one harms nobody."""

import json
import struct
import threading
from collections import Counter

import pytest

from laminar.telemetry.files import MetricsFile
from laminar.telemetry.sinks.base import ThreadedSink, read_position, scalars
from laminar.telemetry.sinks.trace import TraceSink, process_of, turns_of
from laminar.telemetry.sinks.trace_file import TraceFile
from laminar.telemetry.stream import Event
from laminar.telemetry.timeline import old_file


def step_line(step, **metrics):
    return {
        "format_version": 1,
        "kind": "step",
        "step": step,
        "event": f"{step}-0",
        "time": 1e9 + step,
        "batch": "b",
        **metrics,
    }


MARK = {"kind": "mark", "step": 1, "event": "1-1", "time": 1e9, "what": "control", "text": "supervisor: bound 1 -> 2"}


def test_scalars_of_a_line_are_its_metrics_and_nothing_else():
    assert scalars(step_line(3, **{"train/loss": 0.5, "train/tokens": 7})) == {"train/loss": 0.5, "train/tokens": 7}


class Notes:
    """A writer that notes what it is told, and waits or fails when it is told so."""

    failures = (OSError,)

    def __init__(self, gate=None, error=None):
        self.steps, self.calls, self.gate, self.error = [], [], gate, error

    def write(self, line):
        if self.gate:
            self.gate.wait(20)
        if self.error:
            raise self.error
        self.steps.append(line["step"])

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def files(tmp_path):
    return tmp_path / "metrics.jsonl", tmp_path / ".position"


def test_a_sink_gets_lines_in_order_and_the_next_life_gives_it_what_it_lacks(files):
    metrics, position = files
    first = Notes()
    sink = ThreadedSink("notes", lambda: first, metrics, position)
    for step in (1, 2):
        sink.add_line(step_line(step))
    sink.rewind(1)
    sink.close()
    assert (first.steps, first.calls[-2:], read_position(position)) == ([1, 2], [("rewind", 1), "close"], (2, 0))
    file = MetricsFile(metrics)
    for step in (1, 2, 3):
        file.append("step", step, {"time": 0.0}, f"{step}-0")
    second = Notes()
    ThreadedSink("notes", lambda: second, metrics, position).close()
    assert (second.steps, second.calls[0]) == ([3], ("rewind", 2))  # in case that step 3 was taken and not noted


def test_a_sink_that_hangs_leaves_lines_out_and_holds_nobody_up(files):
    gate = threading.Event()
    sink = ThreadedSink("slow", lambda: Notes(gate), *files, max_waiting=4)
    for step in range(1, 101):
        sink.add_line(step_line(step))  # returns at once
    assert sink.left_out >= 95
    gate.set()
    sink.close()


def test_a_sink_that_fails_is_given_up_with_a_warning(files, caplog):
    sink = ThreadedSink("broken", lambda: Notes(error=OSError("no room")), *files)
    sink.add_line(step_line(1))
    sink.close()
    sink.add_line(step_line(2))  # nobody is there, and nobody minds
    assert "sink broken failed" in caplog.text
    assert "no room" in caplog.text


def test_a_sink_that_cannot_be_opened_is_given_up_with_a_warning(files, caplog):
    def open_writer():
        raise OSError("No space left on device")

    sink = ThreadedSink("broken", open_writer, *files)
    sink.add_line(step_line(1))
    sink.close()
    assert "sink broken failed and is off for the rest of this life: No space left on device" in caplog.text


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_written_also_after_a_resume_below_the_last_step(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from laminar.telemetry.sinks.tensorboard import TensorBoardWriter

    writer = TensorBoardWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step_line(step, **{"train/loss": step / 4}))
    writer.write(MARK)
    writer.write({"kind": "evaluation", "step": 3, "time": 1e9, "eval/accuracy": 0.5})
    writer.close()
    later = TensorBoardWriter(tmp_path)
    later.rewind(2)
    later.write(step_line(3, **{"train/loss": 9.0}))
    later.close()
    read = event_accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert [point.wall_time for point in read.Scalars("train/loss")] == [1e9 + 1, 1e9 + 2, 1e9 + 3]
    assert read.Tensors("marks")[0].tensor_proto.string_val == [b"supervisor: bound 1 -> 2"]


def leveldb_records(data, offset):
    """Records of LevelDB's log format (blocks of 32 kB; checksum, length, type), which W&B writes after 7 bytes."""
    place, whole = 0, b""
    while place + 7 <= len(data):
        left = 32_768 - (offset + place) % 32_768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or last
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_writes_a_whole_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    from laminar.telemetry.sinks.weights_and_biases import WandbWriter

    monkeypatch.setenv("WANDB_API_KEY", "")
    writer = WandbWriter(tmp_path, "run-1", "offline", "laminar", {"run": {"name": "a"}})
    for step in (1, 2):
        writer.write(step_line(step, **{"train/loss": step / 4}))
    writer.write(MARK)
    writer.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-run-1.wandb")
    rows = []
    for data in leveldb_records(file.read_bytes()[7:], offset=7):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    losses = [(row["train/step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 0.25), (2, 0.5)]
    assert any(row.get("mark") == MARK["text"] for row in rows)


def told_episode(start, phases, name="0001-000"):
    return {
        "id": name, "start": start, "seconds": phases[-1][2], "phases": phases, "tokens": 9, "turns": 2, "version": "0.3",
        "outcome": "reward 1",
    }  # fmt: skip


PHASES = [
    ["environment", 0.0, 0.1],
    ["generate", 0.1, 1.1],
    ["environment", 1.1, 1.5],
    ["generate", 1.5, 2.5],
    ["environment", 2.5, 2.6],
    ["reward", 2.6, 3.0],
]


def test_phases_make_turns_each_an_answer_and_what_the_environment_did_about_it():
    names = [[phase[0] for phase in turn] for turn in turns_of(PHASES)]
    assert names == [["environment"], ["generate", "environment"], ["generate", "environment"], ["reward"]]


def traced(tmp_path, **settings):
    path = tmp_path / "trace.json"
    sink = TraceSink(path, **settings)
    worker = {"spans": [["decode", 100.0, 100.5]], "episodes": [told_episode(100.0, PHASES)], "pulls": [[103.0, 103.2]]}
    sink.add_event(Event("rollout-0", "worker", 100.5, {"worker/moved_trajectories": 2.0, "engine/running": 3.0}, worker))
    sink.add_event(
        Event("rollout-0", "worker", 101.0, {"worker/moved_trajectories": 2.0}, {"spans": [["decode", 100.5, 101.0]]})
    )
    sink.add_event(Event("rollout-0", "worker", 101.5, {}, {"spans": [["swap", 101.0, 101.5]]}))
    fields = {"train_started": 101.0, "train_ended": 104.0}
    sink.add_event(Event("trainer-0", "step", 104.0, {"train/step": 7.0, "train/loss": 0.5}, fields))
    sink.add_event(Event("relay-0", "relay", 105.0, {"weights/broadcast_seconds": 2.0}, {}))
    sink.add_event(Event("supervisor", "control", 106.0, {}, {"text": "bound 1 -> 2"}))
    sink.add_line(step_line(7, **{"experience/ready_groups": 4, "experience/open_groups": 5}))
    return sink, path


def test_the_trace_shows_states_steps_pulls_moves_marks_and_counters(tmp_path):
    sink, path = traced(tmp_path)
    sink.close()
    events = json.loads(path.read_text())
    slices = {(e["name"], e["pid"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert slices == {
        ("decode", process_of("rollout-0")): (100_000_000, 1_000_000),  # two reports, one slice
        ("swap", process_of("rollout-0")): (101_000_000, 500_000),
        ("pull", process_of("rollout-0")): (103_000_000, 200_000),
        ("step 7", process_of("trainer-0")): (101_000_000, 3_000_000),
        ("receive", process_of("relay-0")): (103_000_000, 2_000_000),
    }
    moments = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "i"]
    assert moments == [("move", 100_500_000, {"trajectories": 2.0}), ("control", 106_000_000, {"text": "bound 1 -> 2"})]
    counters = [(e["name"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [("requests", {"running": 3.0}), ("groups", {"ready": 4, "in flight": 5}), ("staleness", {"mean": 0})]
    named = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == {process_of(r): r for r in ("rollout-0", "trainer-0", "relay-0", "supervisor")}


def test_an_episode_is_nested_turn_by_turn_and_closed_in_reverse(tmp_path):
    sink, path = traced(tmp_path)
    sink.close()
    stack, drawn = [], []
    for event in json.loads(path.read_text()):
        if event["ph"] == "b":
            assert event["id"] == "0001-000"
            stack.append(event)
        elif event["ph"] == "e":
            begun = stack.pop()
            assert begun["name"] == event["name"]
            drawn.append((len(stack), begun["name"], begun["ts"] - 100_000_000, event["ts"] - 100_000_000))
    assert stack == []
    assert drawn == [
        (1, "environment", 0, 100_000),
        (2, "decode", 100_000, 1_100_000),
        (2, "environment", 1_100_000, 1_500_000),
        (1, "turn 0", 100_000, 1_500_000),
        (2, "decode", 1_500_000, 2_500_000),
        (2, "environment", 2_500_000, 2_600_000),
        (1, "turn 1", 1_500_000, 2_600_000),
        (1, "reward", 2_600_000, 3_000_000),
        (0, "episode", 0, 3_000_000),
    ]


def test_the_trace_is_whole_at_every_moment_is_rotated_and_survives_a_torn_end(tmp_path):
    path = tmp_path / "trace.json"
    names = [{"ph": "M", "name": "process_name"}]
    for number in range(50):
        TraceFile(path, max_bytes=600).append([{"ph": "i", "ts": number}, {"ph": "i", "ts": number}], names)
        assert json.loads(path.read_text())[0] == names[0]
    assert path.stat().st_size < 700
    assert json.loads(old_file(path).read_text())[-1]["ts"] == json.loads(path.read_text())[1]["ts"] - 1
    path.write_bytes(path.read_bytes()[:-9])
    TraceFile(path, max_bytes=10_000).append([{"ph": "i", "ts": 99}], names)
    counts = Counter(event.get("ts") for event in json.loads(path.read_text()))
    assert (counts[49], counts[99]) == (1, 1)  # the torn one is gone
