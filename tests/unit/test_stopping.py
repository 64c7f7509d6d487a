"""What a run that is told to stop says and does, by the moment and by how often it is told."""

import pytest

from laminar.cluster.stopping import Phase, Stopping, what_follows
from laminar.run_folder import RunFolder
from laminar.telemetry.stream import Event
from laminar.telemetry.view import RunView


@pytest.fixture
def stopping(tmp_path):
    """Make one of a run at a moment; `cuts` has an entry for each time that it was ended at once."""

    def make(phase, *, step=0, has_begun=True, saved=None):
        folder, view, cuts = RunFolder.create(tmp_path, "a"), RunView(9, step=step), []
        if has_begun:
            view.apply(Event("trainer-0", "clock", 1.0, {}, {}))
        if saved is not None:
            (folder.checkpoints / "latest").write_text(f"step_{saved:06d}")
        made = Stopping(folder, view, cuts.append)
        made.phase = phase
        return made, cuts

    return make


@pytest.mark.parametrize(
    ("phase", "step", "said"),
    [
        (Phase.TRAINING, 0, "ending after the first step, if it has begun; once more to end at once"),
        (Phase.TRAINING, 4, "finishing the step and saving a checkpoint; once more to end at once"),
        (Phase.EVALUATING, 9, "ending without the rest of the evaluation; every step is saved; once more to end at once"),
        (Phase.ENDING, 9, "everything is being ended; once more to end at once"),
    ],
)
def test_the_first_order_lets_what_has_begun_end(stopping, phase, step, said):
    told, cuts = stopping(phase, step=step, has_begun=phase is Phase.TRAINING)  # then the trainer has ended, in order
    assert told.tell() == said
    assert (told.is_told.is_set(), told.reason, cuts) == (True, "", [])


@pytest.mark.parametrize(("phase", "has_begun"), [(Phase.STARTING, False), (Phase.STARTING, True), (Phase.TRAINING, False)])
def test_an_order_before_a_step_can_have_begun_ends_the_run_at_once(stopping, phase, has_begun):
    told, cuts = stopping(phase, has_begun=has_begun)
    assert told.tell() == "ending, for no step has begun"
    assert (told.reason, cuts) == ("told to stop while it was starting", [0.0])


@pytest.mark.parametrize(
    ("step", "saved", "follows"),
    [
        (0, None, "no step had ended; a resume begins with the first"),
        (4, None, "there is no checkpoint; a resume replays all 4 steps"),
        (14, 10, "a resume replays the steps since the checkpoint of step 10"),
        (10, 10, "the checkpoint of step 10 holds every step"),
    ],
)
def test_the_second_order_ends_all_at_once_and_says_what_is_saved(stopping, step, saved, follows):
    told, cuts = stopping(Phase.TRAINING, step=step, saved=saved)
    told.tell()
    assert told.tell() == f"ending everything at once; {follows}"
    assert (told.reason, cuts) == (f"told to stop at once; {follows}", [0.0])
    assert told.tell() == "everything is being ended already"
    assert cuts == [0.0]
    assert what_follows(step, saved) == follows


def test_a_request_is_answered_before_all_is_ended(stopping):
    told, cuts = stopping(Phase.TRAINING, step=3)
    assert told.cut(0.5) == "ending everything at once; there is no checkpoint; a resume replays all 3 steps"
    assert cuts == [0.5]


@pytest.mark.parametrize("phase", [Phase.EVALUATING, Phase.ENDING])
def test_once_all_is_saved_the_second_order_changes_nothing_about_why_the_run_ended(stopping, phase):
    told, cuts = stopping(phase, step=9, saved=9)
    told.tell()
    assert told.tell() == "ending everything at once"
    assert (told.reason, cuts) == ("", [0.0])
