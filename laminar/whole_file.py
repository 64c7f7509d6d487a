"""A small file that is there whole: who reads it meanwhile, or after a kill, finds the old content or the new.

It is replaced in one rename. It does not survive a loss of power: nothing is synced to the disk.
"""

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file in one rename.

    Args:
        path: of the file; beside it the same name with the ending `.tmp` is used, so one process at a time writes it.
        content: text is written as UTF-8.
        mode: permissions, before the process's mask.

    Raises:
        OSError: it cannot be written; a file that was there stands.
    """
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)
