"""What is wrong with the history of a run that has ended: lost, trained twice, missing, told twice, left behind."""

from benchmarks.run_processes import told_steps
from laminar.cluster.processes import end_processes, marked_processes
from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder
from trainer.audit import audit_run
from trainer.spool import ReplaySpool


def history_problems(folder: RunFolder, num_prompts: int, *, num_steps: int | None, step_trajectories: int) -> list[str]:
    """One sentence a problem, of a run in which nothing is filtered.

    Args:
        folder: the run's; processes that outlived it are ended.
        num_prompts: rows of its data.
        num_steps: that it should have trained; None: as many as its history holds.
        step_trajectories: trained in each.
    """
    problems = []
    if left := marked_processes(folder.path.name):
        problems.append(f"{len(left)} processes outlived the run")
        end_processes(folder.path.name, 10.0)
    audit = audit_run(folder.checkpoints, num_prompts)
    expected, steps = num_steps or audit.num_steps, told_steps(folder)
    if not audit.counters.is_balanced or audit.counters.trained != expected * step_trajectories:
        problems.append(f"the counters do not add up: {audit.counters}")
    if audit.num_steps != expected or audit.missing_steps:
        problems.append(f"{audit.num_steps} of {expected} steps are in the history")
    if steps != list(range(1, expected + 1)):
        problems.append(f"metrics.jsonl holds the steps {steps}")
    problems += [f"prompt {place} was trained twice" for place in audit.twice]
    problems += [f"prompt {place} was lost" for place in audit.unaccounted]
    return problems + differing_batches(folder)


def differing_batches(folder: RunFolder) -> list[str]:
    """Steps whose logged batch is not the one in the committed history."""
    digests = {line["step"]: line["batch"] for line in read_lines(folder.metrics) if line["kind"] == "step"}
    history = ReplaySpool(folder.checkpoints).history()
    return [
        f"step {entry.step} trained {entry.batch}, metrics.jsonl says {digests[entry.step]}"
        for entry in history
        if digests.get(entry.step, entry.batch) != entry.batch
    ]
