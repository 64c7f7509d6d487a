"""What a trajectory's home and the replica that it is a guest of say to each other, as messages of one socket.

The socket is the seat: as long as it stands, the trajectory is open at the destination. msgpack; ids and log-probs are raw
bytes. It knows neither sockets nor engines.
"""

import msgspec
import numpy as np

from laminar.types import FinishReason, Int32Array, SamplingParameters, Segment, WeightVersion
from rollout.generation import Generation


class SegmentWire(msgspec.Struct, frozen=True):
    """A sampled segment: int32 ids, float32 log-probs."""

    ids: bytes
    logprobs: bytes
    version: str
    masked: int

    @classmethod
    def of(cls, segment: Segment) -> "SegmentWire":
        """As bytes."""
        assert segment.logprobs is not None
        return cls(segment.token_ids.tobytes(), segment.logprobs.tobytes(), str(segment.version), segment.masked_head_tokens)

    def segment(self) -> Segment:
        """As arrays."""
        ids, logprobs = np.frombuffer(self.ids, np.int32), np.frombuffer(self.logprobs, np.float32)
        return Segment(ids, logprobs, WeightVersion.parse(self.version), self.masked)


class Sit(msgspec.Struct, frozen=True, tag="sit"):
    """Home asks for a seat on an engine of this version (empty: any), for a trajectory of so many tokens."""

    version: str
    context_tokens: int
    sampled_tokens: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """It is granted; the engine holds this version."""

    version: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """It is not."""

    reason: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Home asks for tokens; one request at a time."""

    request_id: str
    ids: bytes
    temperature: float
    max_new_tokens: int
    seed: int
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    streams: bool

    @classmethod
    def of(cls, request_id: str, input_ids: Int32Array, sampling: SamplingParameters, streams: bool) -> "Ask":
        """A request as a message; texts that stop are matched at home."""
        return cls(
            request_id,
            input_ids.tobytes(),
            sampling.temperature,
            sampling.max_new_tokens,
            sampling.seed,
            sampling.top_p,
            sampling.top_k,
            sampling.stop_token_ids,
            streams,
        )

    def input_ids(self) -> Int32Array:
        """(T,) int32."""
        return np.frombuffer(self.ids, np.int32)

    def sampling(self) -> SamplingParameters:
        """How tokens are drawn."""
        return SamplingParameters(
            self.temperature, self.max_new_tokens, self.seed, self.top_p, self.top_k, self.stop_token_ids
        )


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Home ends the request; its answer comes."""

    request_id: str


class Part(msgspec.Struct, frozen=True, tag="part"):
    """New tokens of a streamed answer."""

    request_id: str
    segment: SegmentWire


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The whole answer."""

    request_id: str
    segments: tuple[SegmentWire, ...]
    finish_reason: str
    cached_tokens: int

    @classmethod
    def of(cls, request_id: str, generation: Generation) -> "Answer":
        """As a message."""
        segments = tuple(map(SegmentWire.of, generation.segments))
        return cls(request_id, segments, str(generation.finish_reason), generation.cached_tokens)

    def generation(self) -> Generation:
        """As a value."""
        segments = tuple(wire.segment() for wire in self.segments)
        return Generation(segments, FinishReason(self.finish_reason), self.cached_tokens)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine answered wrongly, or not at all."""

    request_id: str
    text: str


class MoveOn(msgspec.Struct, frozen=True, tag="move_on"):
    """The host wants to be empty: home should move the trajectory to the replica whose door is there."""

    url: str


FromHome = Sit | Ask | Abort
FromHost = Welcome | Refusal | Part | Answer | Failed | MoveOn
encode = msgspec.msgpack.Encoder().encode
decode_from_home = msgspec.msgpack.Decoder(FromHome).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
