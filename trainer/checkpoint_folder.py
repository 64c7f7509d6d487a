"""The folder of checkpoints: when one counts, which is the newest, how one appears and goes. Files only, no torch.

Invariants: a checkpoint is written in `step_000020.tmp` and appears by one rename once all files are checksummed and synced;
the pointer `latest` moves after that; leftovers of a killed save are never a checkpoint, and the next save removes them; an
older checkpoint goes only after a newer one is complete, and one that is seen to be damaged takes no other's place.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import xxhash

from laminar.errors import ConfigError
from laminar.whole_file import sync

logger = logging.getLogger("laminar.trainer.checkpoint")

FORMAT_VERSION = 2
"""Written into every manifest; a reader refuses what it does not know."""

MANIFEST = "manifest.json"
EXTRA = "extra.json"
ASIDE = ".superseded"
"""Ending of a later checkpoint that a resume fell back from; it is no checkpoint any more, and the user's to remove."""
POINTER = "latest"
NAME = re.compile("step_[0-9]+")
_CHUNK_BYTES = 1 << 24


class ForeignFormatError(ConfigError):
    """A checkpoint of another version of Laminar. To fall back from it would lose work and say nothing."""


def begin(root: Path, step: int) -> Path:
    """Remove leftovers of killed saves, and make the empty folder to write this step's files into."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob("*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    temporary = temporary_path(root, step)
    temporary.mkdir()
    return temporary


def complete(root: Path, step: int, facts: dict[str, Any], keep: int) -> Path:
    """Turn the folder that `begin` made, now full, into a checkpoint, point to it, and let the oldest ones go.

    Those of later steps are set aside: training fell back behind them, and writes these steps anew.

    Args:
        root: folder of checkpoints.
        step: number of the last trained step.
        facts: JSON-able entries for the manifest.
        keep: complete checkpoints to keep, at least 1.
    """
    temporary, final = temporary_path(root, step), checkpoint_path(root, step)
    replaced = final.with_suffix(".replaced.tmp")
    _seal(temporary, step, facts)
    if final.exists():  # the same step, trained again after a resume from an older checkpoint
        final.rename(replaced)
    temporary.rename(final)
    sync(root)
    pointer = root / f"{POINTER}.tmp"
    pointer.write_text(final.name)
    sync(pointer)
    pointer.replace(root / POINTER)
    sync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    _thin_out(root, step, keep)
    return final


def _seal(folder: Path, step: int, facts: dict[str, Any]) -> None:
    """Write the manifest, and have everything on the disk."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    checksums = {str(file.relative_to(folder)): _checksum(file) for file in files}
    manifest = {"format_version": FORMAT_VERSION, "step": step, **facts, "checksums": checksums}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"checksum": _checksum_of(manifest)}, indent=1))
    for place in (*folder.rglob("*"), folder):
        sync(place)


def _thin_out(root: Path, step: int, keep: int) -> None:
    """Remove what is older than the newest `keep` whole checkpoints up to this step; set aside what is later."""
    there = complete_checkpoints(root)
    whole = [path for path in there if _step_of(path) <= step and _looks_whole(path)]
    oldest = _step_of(whole[-keep]) if len(whole) >= keep else 0
    for path in there:
        if _step_of(path) < oldest:
            shutil.rmtree(path)
        elif _step_of(path) > step:  # a resume has fallen back from it: it would not go on with the spool as it is now
            aside = path.with_suffix(ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def find_latest(root: Path) -> Path | None:
    """The newest whole checkpoint, the one pointed to before all others; None if there is none at all.

    A damaged one is announced, by the file's name, and passed over.

    Raises:
        ConfigError: if there are checkpoints and every one is damaged, or the newest whole one has another format.
    """
    pointer = root / POINTER
    pointed = root / pointer.read_text(errors="replace").strip() if pointer.exists() else None
    first_fault = ""
    newest_first = sorted(complete_checkpoints(root), key=lambda path: (path == pointed, _step_of(path)), reverse=True)
    for path in newest_first:
        try:
            read_manifest(path)
        except ForeignFormatError:
            raise
        except ConfigError as error:
            logger.warning("%s; falling back to an older checkpoint", error)
            first_fault = first_fault or str(error)
        else:
            return path
    if newest_first:
        raise ConfigError(
            f"every checkpoint in {root} is damaged ({first_fault}): restore that file, or move "
            "the folder away to start afresh"
        )
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, every file of which was found to have its checksum.

    Raises:
        ConfigError: if a file is missing or damaged, by name, or the format is not ours.
    """
    manifest = _read_facts(path)
    for name, checksum in manifest["checksums"].items():
        try:
            found = _checksum(path / name)
        except OSError as error:
            raise ConfigError(f"checkpoint file {path / name} cannot be read ({error})") from error
        if found != checksum:
            raise ConfigError(f"checkpoint file {path / name} is damaged: its checksum is not the one in {MANIFEST}")
    return manifest


def read_extra(path: Path) -> dict[str, Any]:
    """What rank 0's loop added to a checkpoint."""
    extra: dict[str, Any] = json.loads((path / EXTRA).read_text())
    return extra


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that were completed, oldest first; leftovers and a user's copies do not count."""
    return sorted((path for path in root.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()), key=_step_of)


def oldest_step(root: Path) -> int:
    """Step of the oldest complete checkpoint; a resume may have to start there. 0 without any."""
    return min(map(_step_of, complete_checkpoints(root)), default=0)


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of a step's checkpoint."""
    return root / f"step_{step:06d}"


def temporary_path(root: Path, step: int) -> Path:
    """Folder that a step's checkpoint is written in."""
    return checkpoint_path(root, step).with_suffix(".tmp")


def _read_facts(path: Path) -> dict[str, Any]:
    """The manifest, and every file is there; raises as `read_manifest`, without looking into the files."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint file {file} cannot be read ({error})") from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"checkpoint file {file} is damaged: it is no JSON object")
    checksum = manifest.pop("checksum", None)  # the first checkpoints had none
    if checksum is not None and checksum != _checksum_of(manifest):
        raise ConfigError(f"checkpoint file {file} is damaged: its checksum does not match")
    theirs, step = manifest.get("format_version"), manifest.get("step")
    if theirs != FORMAT_VERSION:
        raise ForeignFormatError(
            f"checkpoint {path} has format version {theirs}, but this program reads {FORMAT_VERSION}: resume the run with "
            "the Laminar that wrote it, or move the folder away to start afresh"
        )
    if not isinstance(step, int) or (NAME.fullmatch(path.name) and step != _step_of(path)):
        raise ConfigError(f"checkpoint file {file} is damaged: it is of step {step}")
    if not isinstance(manifest.get("checksums"), dict):
        raise ConfigError(f"checkpoint file {file} is damaged: it has no checksums")
    for name in manifest["checksums"]:
        if not (path / name).exists():
            raise ConfigError(f"checkpoint file {path / name} is missing")
    return manifest


def _looks_whole(path: Path) -> bool:
    try:
        _read_facts(path)
    except ConfigError:
        return False
    return True


def _checksum_of(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest).encode())


def _step_of(path: Path) -> int:
    return int(path.name.partition("_")[2])


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())
