"""Data rows, read from wherever they lie: JSONL, Parquet, a Hugging Face dataset saved to disk, in a folder, or on the hub.

A row comes with its place in words, for errors. This module does not know what the columns mean.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from laminar.errors import ConfigError, first_line

Row = tuple[str, dict[str, Any]]
"""Where the row lies (`train.jsonl line 7`), and its columns."""


def read_rows(path: str, split: str, base: Path) -> Iterator[Row]:
    """All rows of a data set, in order.

    Args:
        path: a `.jsonl` or `.parquet` file, a folder, or a hub dataset (`owner/name` or `owner/name:configuration`).
        split: which split of a Hugging Face dataset.
        base: where a relative path counts from, before the working folder.

    Raises:
        ConfigError: it cannot be found or read; names the place and the remedy.
    """
    location = next((folder / path for folder in (base, Path.cwd()) if (folder / path).exists()), None)
    if location is None:
        if Path(path).suffix in (".jsonl", ".parquet") or path.startswith(("/", ".")):
            raise ConfigError(f"data file {path} exists neither under {base} nor under {Path.cwd()}; check the path")
        return _hub_rows(path, split)
    if location.is_dir():
        return _folder_rows(location, split)
    if location.suffix == ".jsonl":
        return _jsonl_rows(location)
    if location.suffix == ".parquet":
        return _parquet_rows(location)
    raise ConfigError(f"data file {location} is neither .jsonl nor .parquet; convert it, or give a Hugging Face dataset")


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    row = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
                    if not isinstance(row, dict):
                        raise ValueError(f"a {type(row).__name__}, not an object with columns")
                    yield place, row
            except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON included
                raise ConfigError(f"{place} is malformed: {error}; every line must be one JSON object") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.80} is too large a number")
    return number


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        table = pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}; write it again") from error
    return _table_rows(table, str(file))


def _folder_rows(folder: Path, split: str) -> Iterator[Row]:
    import datasets

    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        dataset = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder), split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"dataset folder {folder}, split {split!r}: {first_line(error)}; check data.path and data.split"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise ConfigError(f"dataset folder {folder} has no split {split!r}, only {sorted(dataset)}; set data.split")
        dataset = dataset[split]
    return _table_rows(dataset.with_format("arrow")[:], str(folder))


def _hub_rows(path: str, split: str) -> Iterator[Row]:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        dataset = datasets.load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"data.path {path!r} is no file or folder here, and as a hub dataset (split {split!r}) it fails: "
            f"{first_line(error)}; check the name, or download it and give the folder"
        ) from error
    return _table_rows(dataset.with_format("arrow")[:], path)


def _table_rows(table: Any, place: str) -> Iterator[Row]:
    """Rows of an Arrow table, undecoded, so that an image column costs nothing until it is refused."""
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            yield f"{place} row {number}", row
            number += 1
