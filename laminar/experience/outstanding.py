"""A reader's copy of the outstanding groups, kept up by what changed since it last looked.

Invariants: in order of admission; what was seen in another life of the server is thrown away whole.

This module does not know how the changes are fetched.
"""

from collections.abc import Iterable
from operator import attrgetter

import msgspec

from laminar.experience.answers import Occurrence
from laminar.types import GroupHeader, GroupState


class _StoredHeader(msgspec.Struct):
    """The part of a stored header that the trainer sees."""

    id: str
    admission: int
    state: GroupState
    oldest: int
    newest: int
    bound: int
    bytes: int
    owner: str
    epoch: int
    position: int
    reissues: int


_decoder = msgspec.msgpack.Decoder(_StoredHeader)


class Outstanding:
    """What was seen.

    Attributes:
        life: of the server; empty before the first look.
        revision: up to which changes were seen in that life.
        headers: by group id.
        occurrences: which prompt each group plays.
    """

    def __init__(self) -> None:
        self.life, self.revision = "", 0
        self.headers: dict[str, GroupHeader] = {}
        self.occurrences: dict[str, Occurrence] = {}

    def apply(self, life: str, revision: int, stored: Iterable[bytes], gone: Iterable[bytes], *, is_whole: bool) -> None:
        """Take over an answer.

        Args:
            life: of the server that answered.
            revision: of the answer.
            stored: packed headers that changed, or all.
            gone: ids of the groups that left.
            is_whole: all headers are given.
        """
        if is_whole:
            self.headers, self.occurrences = {}, {}
        for group_id in gone:
            self.headers.pop(group_id.decode(), None)
            self.occurrences.pop(group_id.decode(), None)
        # A group that was seen before keeps its place; new ones were admitted after all others, so they come last.
        for row in sorted(map(_decoder.decode, stored), key=attrgetter("admission")):
            self.headers[row.id] = _public(row)
            self.occurrences[row.id] = (row.epoch, row.position, row.reissues)
        self.life, self.revision = life, revision


def _public(stored: _StoredHeader) -> GroupHeader:
    return GroupHeader(
        group_id=stored.id,
        admission=stored.admission,
        state=stored.state,
        oldest=stored.oldest,
        newest=stored.newest,
        max_staleness=None if stored.bound < 0 else stored.bound,
        num_bytes=stored.bytes,
        owner=stored.owner,
    )
