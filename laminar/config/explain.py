"""What a config amounts to, in plain text: how many of everything, how much memory, how stale at worst.

Pure, but for reading the headers of a local model. At most 100 columns.
"""

import textwrap
from collections import Counter
from pathlib import Path

from laminar.config.peers import PEER_NAMES, PEER_NOTES
from laminar.config.root import LaminarConfig
from laminar.config.sizes import (
    bytes_per_group,
    groups_within_bytes,
    groups_within_staleness,
    is_one_machine,
    longest_row_tokens,
    most_admitted_groups,
    most_micro_batch_tokens,
    most_micro_batches,
    num_row_shares,
    num_weight_slots,
    peak_buffer_bytes,
    peak_spool_bytes,
    plays_greedy,
    published_bytes,
    read_model_size,
    shares,
    slot_bytes,
)

_COLUMNS = 100
_LABEL = 20
_COUNT = 12
_KNOWN_ELSEWHERE = (
    "rollout.group_size",
    "trainer.prompts_per_step",
    "trainer.mini_batches",
    "trainer.max_tokens_per_micro_batch",
    "staleness.max_staleness",
    "rollout.max_in_flight_groups",
    "rollout.weight_update",
    "rollout.max_new_tokens",
)


def explain(config: LaminarConfig) -> str:
    """The whole explanation."""
    sections = {
        "One step": _step_lines(config),
        "The run": _run_lines(config),
        "Staleness": _paragraphs(staleness_in_words(config)),
        "Buffer": _buffer_lines(config),
        "Weights": _weight_lines(config),
        "What others call it": _synonym_lines(),
    }
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items()) + "\n"


def staleness_in_words(config: LaminarConfig) -> list[str]:
    """The worst case for a trained token, one paragraph for each thing to know."""
    bound, batch = config.staleness.bound, config.trainer.prompts_per_step
    if bound is None:
        fitting = groups_within_bytes(config)
        paragraphs = [
            "Unbounded: a trained token may be any number of versions older than the weights it trains. Only the buffer's "
            f"capacity holds generation back: {fitting} groups, or {fitting / batch:.1f} steps' worth."
        ]
    elif bound == 0:
        paragraphs = [
            "On-policy: every trained token was sampled by the very weights it trains. Generation and training take turns: "
            f"{batch} groups are played, trained and published before the next {batch} begin."
        ]
    else:
        paragraphs = [
            f"A trained token is at most {bound} version{'s' if bound > 1 else ''} older than the weights it trains. Time "
            "in flight (while the rest of its group is sampled) and time in the queue count together, and a group is as old "
            f"as its oldest token: at worst it starts on version n and is trained on version n + {bound}.",
            f"At most ({bound} + 1) x {batch} = {(bound + 1) * batch} groups are admitted and not yet trained. An engine "
            f"that is d versions behind is granted new work only while they are fewer than ({bound} + 1 - d) x {batch}.",
            _policy_in_words(config),
        ]
    updates = config.trainer.mini_batches * config.trainer.epochs
    if updates > 1:
        paragraphs.append(
            f"Versions are counted, not updates: the last of a step's {updates} updates trains weights that its earlier "
            "ones have already moved."
        )
    return paragraphs


def _policy_in_words(config: LaminarConfig) -> str:
    if config.staleness.policy == "mask":
        return (
            'Policy "mask": nobody waits and nothing in flight is dropped; tokens that are too old when they are trained '
            "leave the loss, their rewards stay in their group's statistics, and groups without a token left are evicted."
        )
    if config.staleness.policy == "drop":
        return (
            'Policy "drop": unfinished groups that would pass the bound are dropped at once and their prompts issued again. '
            "Nobody waits, but long answers are trained less often than short ones."
        )
    return (
        f'Policy "wait": the trainer waits for unfinished groups that would pass the bound, at most '
        f"{config.staleness.max_wait_seconds:g} s; then the fewest, oldest ones are evicted."
    )


def _step_lines(config: LaminarConfig) -> list[str]:
    trainer, group_size = config.trainer, config.rollout.group_size
    groups = shares(trainer.prompts_per_step, trainer.mini_batches)
    largest = shares(max(groups) * group_size, num_row_shares(config))
    together = trainer.sequence_parallel_size
    sharing = "a rank" if together == 1 else f"{together} ranks that share each row"
    whose = "a mini-batch" if together == 1 else f"a mini-batch and {sharing}"
    longest = longest_row_tokens(config)
    return [
        _row("prompts", trainer.prompts_per_step, "trainer.prompts_per_step"),
        _row("groups", trainer.prompts_per_step, "one a prompt"),
        _row("trajectories", trainer.prompts_per_step * group_size, f"x {group_size} (rollout.group_size)"),
        *(
            [_row("greedy answers", trainer.prompts_per_step, "one a group, to compare with")]
            if plays_greedy(config)
            else []
        ),
        _row("mini-batches", trainer.mini_batches, f"of {_tally(groups)} groups" + _unevenness(groups)),
        _row(
            "trainer ranks",
            trainer.num_ranks,
            f"trajectories {whose}: {_tally(largest)}" + _unevenness(largest),
        ),
        _row(
            "micro-batches",
            f"<= {most_micro_batches(config, max(largest))}",
            f"{sharing} and mini-batch: {most_micro_batch_tokens(config)} tokens each, longest row {longest}",
        ),
        _row(
            "optimizer steps",
            trainer.mini_batches * trainer.epochs,
            f"one a mini-batch{_times(trainer.epochs)}; the step then publishes one weight version",
        ),
    ]


def _run_lines(config: LaminarConfig) -> list[str]:
    steps, trainer = config.run.max_steps, config.trainer
    trajectories = steps * trainer.prompts_per_step * config.rollout.group_size
    epochs = config.data.max_epochs
    return [
        _row("steps", steps, "run.max_steps" + (f", or fewer: {epochs} passes over the data" if epochs else "")),
        _row("optimizer steps", steps * trainer.mini_batches * trainer.epochs, ""),
        _row("trajectories", trajectories, f"from {steps * trainer.prompts_per_step} prompts"),
        _row("sampled tokens", f"<= {trajectories * config.rollout.max_new_tokens}", ""),
        _row("checkpoints", -(-steps // config.checkpoint.every_steps), f"the last {config.checkpoint.keep} are kept"),
    ]


def _buffer_lines(config: LaminarConfig) -> list[str]:
    allowed, fitting = groups_within_staleness(config), groups_within_bytes(config)
    limit = "experience.max_bytes" if allowed is None or fitting < allowed else "the staleness bound"
    return [
        _row("bytes a group", _in_bytes(bytes_per_group(config)), "reserved at claim, for the longest answers"),
        _row("admitted groups", f"<= {most_admitted_groups(config)}", f"limited by {limit}"),
        _row(
            "peak",
            _in_bytes(peak_buffer_bytes(config)),
            f"of {_in_bytes(config.experience.max_bytes)} (experience.max_bytes)",
        ),
        _row("replay spool", f"<= {_in_bytes(peak_spool_bytes(config))}", "on disk: the steps since the oldest checkpoint"),
    ]


def _weight_lines(config: LaminarConfig) -> list[str]:
    slots = num_weight_slots(config)
    engines = f", {config.rollout.num_workers} for engines that map" if config.rollout.engine.may_map_weights else ""
    others = "" if is_one_machine(config) else ", 1 being passed on"
    kept = f"{config.relay.keep_versions} kept, 1 being written{engines}{others}"
    lines = [
        _row("slots a machine", slots, f"{kept}; in {config.relay.root}"),
        _row("replicas", config.rollout.num_workers, f"take new weights in mode {config.rollout.effective_weight_update}"),
    ]
    size = read_model_size(Path(config.model.path))
    if size is None:
        return [*lines, *_paragraphs([f"The size of {config.model.path} is unknown until its files are on this machine."])]
    one = published_bytes(config, size)
    return [
        *lines,
        _row("parameters", size.num_parameters, ""),
        _row("bytes a version", _in_bytes(one), f"model.dtype = {config.model.dtype}"),
        _row(
            "shared memory",
            _in_bytes(slot_bytes(one) * slots),
            "on each machine that runs engines or trains, 4 MiB beside each slot",
        ),
    ]


def _synonym_lines() -> list[str]:
    lines: list[str] = []
    for ours in _KNOWN_ELSEWHERE:
        same = ", ".join(name for name, path in PEER_NAMES.items() if path == ours)
        differing = ", ".join(name for name, note in PEER_NOTES.items() if note.split("`")[1:2] == [ours])
        theirs = "; ".join(filter(None, (same, differing and f"in another form: {differing}")))
        indent = " " * (2 + 36)
        lines += textwrap.wrap(theirs, _COLUMNS, initial_indent=f"  {ours:<36}", subsequent_indent=indent)
    return lines


def _row(label: str, value: int | str, comment: str) -> str:
    row = f"  {label:<{_LABEL}}{value!s:>{_COUNT}}  {comment}".rstrip()
    return "\n".join(textwrap.wrap(row, _COLUMNS, subsequent_indent=" " * (_LABEL + _COUNT + 4), replace_whitespace=False))


def _paragraphs(texts: list[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, _COLUMNS, initial_indent="  ", subsequent_indent="  ")]


def _times(epochs: int) -> str:
    return f" and epoch ({epochs} trainer.epochs)" if epochs > 1 else ""


def _tally(counts: list[int]) -> str:
    """`[5, 5, 5, 5, 4]` as `4 x 5 + 1 x 4`; equal counts as the count alone."""
    tally = Counter(counts)
    return str(counts[0]) if len(tally) == 1 else " + ".join(f"{times} x {count}" for count, times in tally.items())


def _unevenness(counts: list[int]) -> str:
    return "" if len(set(counts)) == 1 else " (uneven, as planned)"


def _in_bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
