"""Data rows become prompts, checked before anything starts: ids, contents, columns, lengths.

Invariants: a prompt's id depends on its row only, so it is the same in every run; its fields are plain JSON values.
This module does not know the order in which prompts are played.
"""

import datetime
import decimal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar.config.root import LaminarConfig
from laminar.config.system import DataConfig
from laminar.errors import ConfigError
from laminar.types import Message, Prompt
from rollout.rewards.scorer import build_scorer
from rollout.rows import read_rows
from rollout.tokens import load_tokenizer

_ID_COLUMNS = ("prompt_id", "id")
_ROLES = ("system", "user", "assistant", "tool", "developer")


def load_run_prompts(config: LaminarConfig, config_folder: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts and held-out prompts of a run, every one encoded once and shown to the rewards.

    Raises:
        ConfigError: a row, a length or a reference answer is wrong; names the row and the remedy.
    """
    prompts = load_prompts(config.data, config_folder, min_prompts=config.trainer.prompts_per_step)
    held_out = _read_held_out(config, config_folder)
    _check(prompts + held_out, config, config_folder)
    return prompts, held_out


def load_held_out(config: LaminarConfig, config_folder: Path) -> list[Prompt]:
    """The held-out prompts alone, checked likewise.

    Raises:
        ConfigError: a row, a length or a reference answer is wrong, or `eval.path` is empty.
    """
    held_out = _read_held_out(config, config_folder)
    if not held_out:
        raise ConfigError("`eval.path` is empty: name the held-out prompts, such as eval.path=data/heldout.jsonl")
    _check(held_out, config, config_folder)
    return held_out


def _read_held_out(config: LaminarConfig, config_folder: Path) -> list[Prompt]:
    if not config.eval.path:
        return []
    held_out_data = config.data.model_copy(update={"path": config.eval.path, "split": config.eval.split})
    return load_prompts(held_out_data, config_folder)[: config.eval.num_prompts]


def _check(prompts: Sequence[Prompt], config: LaminarConfig, config_folder: Path) -> None:
    load_tokenizer(_model_folder(config, config_folder)).check_prompts(prompts, config.data.max_prompt_tokens)
    build_scorer(config.rewards).check(prompts)


def load_prompts(data: DataConfig, base: Path, *, min_prompts: int = 1) -> list[Prompt]:
    """The prompts of `[data]`, in the order of the rows.

    Args:
        data: names the data set and its prompt column.
        base: where a relative path counts from, before the working folder.
        min_prompts: fewest prompts that make sense, usually `trainer.prompts_per_step`.

    Raises:
        ConfigError: a row is malformed, an id appears twice, or there are too few prompts.
    """
    stem = Path(data.path.partition(":")[0]).stem or "data"
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for index, (place, row) in enumerate(read_rows(data.path, data.split, base)):
        prompt = _to_prompt(row, place, data.prompt_column, f"{stem}-{index:06d}")
        if prompt.prompt_id in places:
            raise ConfigError(f"{place}: id {prompt.prompt_id!r} is also of {places[prompt.prompt_id]}; make ids unique")
        places[prompt.prompt_id] = place
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"data.path {data.path!r} has no rows; give a data set with prompts")
    if len(prompts) < min_prompts:
        raise ConfigError(
            f"data.path {data.path!r} has {len(prompts)} prompts, fewer than trainer.prompts_per_step = {min_prompts}; "
            "add rows or lower prompts_per_step"
        )
    return prompts


def _to_prompt(row: dict[str, Any], place: str, prompt_column: str, default_id: str) -> Prompt:
    if prompt_column not in row:
        raise ConfigError(f"{place} has no column {prompt_column!r}, only {sorted(row)}; set data.prompt_column")
    content = _content(row[prompt_column], f"{place}, column {prompt_column!r}")
    id_column = next((name for name in _ID_COLUMNS if row.get(name) is not None), None)
    prompt_id = default_id if id_column is None else row[id_column]
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int) or prompt_id == "":
        raise ConfigError(f"{place}, column {id_column!r}: {prompt_id!r:.80} is no id; give text or a whole number")
    fields = {
        name: _json_value(value, f"{place}, column {name!r}")
        for name, value in row.items()
        if name not in (prompt_column, id_column)
    }
    return Prompt(str(prompt_id), content, fields)


def _content(value: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{where} is {value!r:.80}; give text that is not empty, or a list of chat messages")
    return tuple(_message(message, f"{where}, message {number}") for number, message in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or value.get("role") not in _ROLES:
        raise ConfigError(f'{where} is {value!r:.80}; give {{"role": one of {", ".join(_ROLES)}, "content": text}}')
    if value.get("tool_calls") or value.get("function_call"):
        raise ConfigError(f"{where} calls tools, which a prompt's message cannot carry; write the call into its content")
    return Message(value["role"], value["content"])


def _json_value(value: Any, where: str) -> Any:
    """A plain JSON value; dates and decimals become text."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item, where) for item in value]
    if isinstance(value, dict):
        return {str(name): _json_value(item, where) for name, item in value.items()}
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise ConfigError(
        f"{where} holds a {type(value).__name__}, which a prompt cannot carry; drop the column or make it text"
    )


def _model_folder(config: LaminarConfig, config_folder: Path) -> str:
    name = config.model.tokenizer or config.model.path
    folder = next((base / name for base in (config_folder, Path.cwd()) if (base / name).is_dir()), None)
    return name if folder is None else str(folder)
