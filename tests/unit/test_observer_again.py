"""An observer that is started again writes what is missing and nothing twice; sums go on over restarts and lives."""

from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.observer import Observer
from laminar.telemetry.stream import Event
from laminar.telemetry.timeline import read_timeline
from laminar.telemetry.totals import Total
from laminar.telemetry.view import RunView

WAITED, DROPPED = "experience/producer_wait_seconds", "staleness/dropped_groups"


class Stream:
    """Events with ids; a reader of it begins at the first."""

    def __init__(self):
        self.events = []

    def add(self, role, kind, metrics=None, **fields):
        time = float(len(self.events))
        self.events.append(Event(role, kind, time, metrics or {}, fields, f"1000-{len(self.events) + 1}"))

    def step(self, number, dropped=0.0):
        metrics = {"train/step": number, "train/tokens": 10.0, "time/step_seconds": 1.0, DROPPED: dropped}
        self.add("trainer-0", "step", metrics, train_started=0.0, train_ended=0.0, batch="b", groups=[])

    def worker(self, waited, tokens=0.0):
        spans = [["decode", float(len(self.events)), len(self.events) + 1.0]]
        self.add("rollout-0", "worker", {WAITED: waited, "engine/generated_tokens": tokens}, spans=spans)

    def reader(self):
        return Reader(list(self.events))


class Reader:
    def __init__(self, events):
        self.events = events

    async def read(self):
        events, self.events = self.events, []
        return events


class Sink:
    def __init__(self):
        self.lines, self.events = [], []

    def add_line(self, line):
        self.lines.append(line)

    def add_event(self, event):
        self.events.append(event.event_id)

    def rewind(self, step):
        return None

    def close(self):
        return None


async def observed(stream, folder):
    sink = Sink()
    file = MetricsFile(folder.metrics)
    await Observer(stream.reader(), file, RunView(10), lambda event: None, folder, [sink]).drain()
    return sink


def lines(folder, kind="step"):
    return [line for line in read_lines(folder.metrics) if line["kind"] == kind]


async def test_an_observer_that_is_started_again_adds_only_what_has_no_line(tmp_path):
    folder, stream = RunFolder.create(tmp_path, "a"), Stream()
    stream.add("trainer-0", "restored", step=0, lineage=0, text="")
    stream.step(1)
    stream.add("supervisor", "control", text="bound 1 -> 2")
    first = await observed(stream, folder)
    stream.step(2)
    stream.add("rollout-0", "notice", text="engine restarted")
    second = await observed(stream, folder)
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert [line["text"] for line in lines(folder, "mark")] == ["supervisor: bound 1 -> 2", "rollout-0: engine restarted"]
    assert [line["step"] for line in lines(folder, "mark")] == [1, 2]
    assert (first.events, second.events) == (["1000-1", "1000-2", "1000-3"], ["1000-4", "1000-5"])


async def test_a_lineage_opened_in_the_past_is_not_rewound_to_by_the_next_observer(tmp_path):
    folder, stream = RunFolder.create(tmp_path, "a"), Stream()
    stream.step(1)
    stream.add("trainer-0", "restored", step=1, lineage=1, text="")
    stream.step(2)
    await observed(stream, folder)
    await observed(stream, folder)
    assert [line["step"] for line in lines(folder)] == [1, 2]


async def test_marks_after_a_restart_in_the_past_stand_at_the_step_that_was_gone_back_to(tmp_path):
    """Else the next observer, which goes back to that step again, drops them, and they have been told already."""
    folder, stream = RunFolder.create(tmp_path, "a"), Stream()
    for step in (1, 2, 3):
        stream.step(step)
    stream.add("trainer-0", "restored", step=1, lineage=1, text="")
    stream.add("trainer-0", "notice", text="rank 1 died")
    for _ in range(2):
        await observed(stream, folder)
        assert [(line["step"], line["text"]) for line in lines(folder, "mark")] == [(1, "trainer-0: rank 1 died")]


async def test_spans_are_drawn_once_whoever_reads_them_again(tmp_path):
    folder, stream = RunFolder.create(tmp_path, "a"), Stream()
    stream.worker(0.0)
    await observed(stream, folder)
    stream.worker(0.0)
    await observed(stream, folder)
    spans = [line["spans"] for line in read_timeline(folder.timeline) if line["kind"] == "spans"]
    assert spans == [[["decode", 0.0, 1.0]], [["decode", 1.0, 2.0]]]


async def test_sums_go_on_over_a_restarted_worker_trainer_and_observer_and_over_a_resume(tmp_path):
    folder, stream = RunFolder.create(tmp_path, "a"), Stream()
    stream.worker(5.0)
    stream.step(1, dropped=2.0)
    stream.worker(8.0)  # 3 more
    await observed(stream, folder)  # the first observer dies here
    stream.worker(1.0)  # a restarted worker: 1 more
    stream.step(2, dropped=3.0)  # 1 more
    stream.step(3, dropped=1.0)  # a restarted trainer: 1 more
    await observed(stream, folder)
    assert [(line[WAITED], line[DROPPED]) for line in lines(folder)] == [(5.0, 2.0), (9.0, 3.0), (9.0, 4.0)]
    resumed = Stream()  # a new life begins with an empty stream and fresh counters
    resumed.events = [Event("none", "waiting", 0.0, {}, {}, "2000-0")]
    resumed.worker(2.0)
    resumed.step(4, dropped=0.0)
    resumed.events = [Event(e.role, e.kind, e.time, e.metrics, e.fields, f"2{e.event_id}") for e in resumed.events]
    await observed(resumed, folder)
    assert (lines(folder)[-1][WAITED], lines(folder)[-1][DROPPED]) == (11.0, 4.0)


async def test_an_observer_that_is_started_again_tells_the_same_throughput(tmp_path):
    folder, stream = RunFolder.create(tmp_path, "a"), Stream()
    stream.worker(0.0, tokens=0.0)
    stream.worker(0.0, tokens=1000.0)
    stream.step(1)  # at 2.0
    await observed(stream, folder)
    stream.worker(0.0, tokens=1200.0)
    stream.step(2)  # at 4.0
    await observed(stream, folder)
    assert [line["throughput/generated_tokens_per_second"] for line in lines(folder)] == [500.0, 300.0]


def test_a_total_counts_what_is_new_and_a_smaller_count_as_a_new_start():
    total = Total(10.0)
    total.remember("a", 4.0)
    assert [total.report("a", 6.0), total.report("b", 1.0), total.report("a", 2.0)] == [12.0, 13.0, 15.0]
