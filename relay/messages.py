"""What two relays say to each other: small heads, some of which announce a body. MessagePack, never pickle.

A downstream asks (`Want`), is offered a version (`Offer`), fetches what it lacks of the model's files (`FetchFiles`), then
names the pieces it misses (`Pull`) and grants as many as it can take (`More`); the upstream sends each as soon as it is
verified there (`Chunk`). `Alive` is said when there is nothing else to say.
Does not know who says what when (`relay.sender`, `relay.receiver`).
"""

import msgspec

from laminar.errors import RelayError


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Downstream: who I am; `nonce` is to be answered with a proof that the run's token is known."""

    run_id: str
    node_id: str
    nonce: bytes


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """Upstream: my proof, and a nonce for yours."""

    proof: bytes
    nonce: bytes


class Proof(msgspec.Struct, tag="proof", frozen=True):
    """Downstream: my proof."""

    proof: bytes


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Upstream: ask."""


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    """Upstream: no, and why; nothing follows."""

    reason: str


class Want(msgspec.Struct, tag="want", frozen=True):
    """Downstream: offer me what is newer than `newer_than`, or `resuming` if you have it; versions as text, empty: none."""

    newer_than: str
    resuming: str


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """Upstream: a version; `files` are the names and checksums of the model's other files."""

    version: str
    manifest: str
    files: dict[str, str]


class FetchFiles(msgspec.Struct, tag="fetch_files", frozen=True):
    """Downstream: the model's other files, please."""


class Files(msgspec.Struct, tag="files", frozen=True):
    """Upstream: they follow in the body, one after another; `sizes` are (name, bytes)."""

    sizes: list[tuple[str, int]]


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """Downstream: send the pieces `missing` ([first, last + 1) each), at most `credits` until I say `More`."""

    version: str
    missing: list[tuple[int, int]]
    credits: int


class More(msgspec.Struct, tag="more", frozen=True):
    """Downstream: `credits` further pieces; `again` came broken."""

    version: str
    credits: int
    again: list[int]


class Chunk(msgspec.Struct, tag="chunk", frozen=True):
    """Upstream: one piece of the weights file, in the body."""

    version: str
    index: int


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """Upstream: I have that version no more; ask again."""

    version: str


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """Either: nothing to say, but here."""


Message = (
    Hello | Challenge | Proof | Welcome | Refusal | Want | Offer | FetchFiles | Files | Pull | More | Chunk | Gone | Alive
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message's head."""
    return _encoder.encode(message)


def decode(head: bytes) -> Message:
    """Read a head.

    Raises:
        RelayError: if it is none of the messages.
    """
    try:
        return _decoder.decode(head)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RelayError(f"a relay said what is no message ({error}): all relays must run the same release") from error


def to_ranges(indices: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges [first, last + 1)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
