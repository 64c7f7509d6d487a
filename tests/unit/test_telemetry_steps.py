"""One point a step in `metrics.jsonl`, also when steps are replayed, told again after an outage, or told late."""

from laminar.json_lines import read_lines
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.follower import Follower
from laminar.telemetry.observer import Observer
from laminar.telemetry.stream import Event
from laminar.telemetry.view import RunView
from trainer.step_log import StepLog


def step_event(step, batch="b", time=1.0):
    metrics = {"train/step": step, "train/tokens": 10.0, "time/step_seconds": 1.0, "reward/mean": 0.5}
    return Event("trainer-0", "step", time, metrics, {"train_started": time, "train_ended": time, "batch": batch})


def restored(step, lineage):
    return Event("trainer-0", "restored", 1.0, {}, {"step": step, "lineage": lineage, "text": f"at {step}"})


class Reader:
    """Hands out the given events once."""

    def __init__(self, *events):
        self.events = list(events)

    async def read(self):
        events, self.events = self.events, []
        return events


async def observed(path, *events):
    view = RunView(max_steps=10)
    await Observer(Reader(*events), MetricsFile(path), view, lambda event: None).drain()
    return view, [(line["step"], line["batch"]) for line in read_lines(path)]


async def test_replayed_steps_are_points_only_where_none_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    await observed(path, step_event(1), step_event(2, "first"))
    replayed = [step_event(2, "again", 7.0), step_event(3, "untold", 8.0), restored(3, lineage=1), step_event(4)]
    view, points = await observed(path, *replayed)
    assert points == [(1, "b"), (2, "first"), (3, "untold"), (4, "b")]
    assert view.restores == ["at 3"]


async def test_a_replayed_step_counts_as_progress_and_not_as_throughput(tmp_path):
    path = tmp_path / "metrics.jsonl"
    await observed(path, step_event(1), step_event(2))
    view = RunView(max_steps=10)
    last_step = MetricsFile(path).last_step
    follower = Follower(Reader(step_event(2, time=50.0)), view, last_step, lambda event: None)
    before = follower.last_progress
    await follower.drain()
    assert follower.last_progress > before
    assert view.trained_tokens == 0


async def test_a_lineage_below_the_last_point_takes_the_points_above_it_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _, points = await observed(
        path, step_event(1), step_event(2), step_event(3, "dead"), restored(2, 1), step_event(3, "new")
    )
    assert points == [(1, "b"), (2, "b"), (3, "new")]


class Telemetry:
    """Drops events while it is away, as the real writer does."""

    def __init__(self):
        self.dropped, self.away, self.steps = 0, False, []

    async def emit(self, kind, metrics, *, fields):
        if self.away:
            self.dropped += 1
        else:
            self.steps.append(metrics["train/step"])


async def test_steps_that_could_not_be_told_are_told_in_order_later():
    telemetry = Telemetry()
    log = StepLog(telemetry)
    await log.add({"train/step": 1}, {})
    telemetry.away = True
    await log.add({"train/step": 2}, {})
    await log.add({"train/step": 3}, {})
    telemetry.away = False
    await log.add({"train/step": 4}, {})
    assert telemetry.steps == [1, 2, 3, 4]


async def test_after_a_lost_tail_the_last_steps_are_told_once_more():
    telemetry = Telemetry()
    log = StepLog(telemetry)
    await log.add({"train/step": 1}, {})
    telemetry.away = True
    await log.add({"train/step": 2}, {})
    telemetry.away = False
    await log.repeat()
    assert telemetry.steps == [1, 1, 2]
