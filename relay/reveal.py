"""How a version appears: a hidden folder of hard links and the manifest, then one rename.

Invariant: whoever dies in between leaves a hidden folder, which the next writer of the store removes.
"""

import os
import shutil
from contextlib import ExitStack

from relay.manifest import Manifest
from relay.model_files import finished_files
from relay.slots import Slot, room_for
from relay.store import MANIFEST_NAME, WEIGHTS_NAME, VersionStore


def reveal(store: VersionStore, manifest: Manifest, slot: Slot) -> None:
    """Make a filled slot visible as a version, and unlock it.

    Args:
        store: where; its `model_files` go along.
        manifest: of the version, whose every byte was verified.
        slot: holds it; locked by the caller.

    Raises:
        EnvironmentSetupError: the store's memory is full; nothing of the version is left.
    """
    folder = store.partial_folder(manifest.version)
    shutil.rmtree(folder, ignore_errors=True)
    text = manifest.to_json()
    with ExitStack() as undo, room_for("a version's manifest and folder", store.folder, len(text)):
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        for path in finished_files(store.model_files):
            os.link(path, folder / path.name)
        (folder / MANIFEST_NAME).write_text(text)
        os.link(slot.path, folder / WEIGHTS_NAME)
        undo.pop_all()
    # Unlocked first: a reader that finds the name must find the slot free to share.
    slot.unlock()
    os.rename(folder, store.folder_of(manifest.version))
