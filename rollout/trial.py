"""Tokens of weights whose verdict is still out stay back, and go with the weights if that is against them.

An engine answers no probe during a pause, so after a swap requests go on before the verdict is known. What the new version
samples for them reaches nobody until then.

Invariants: one trial at a time; held parts are passed on in their order; a rejected version's tokens never are, also those
that come later. One object lives as long as one engine process.
It does not know what is checked.
"""

import asyncio
from dataclasses import replace

from laminar.types import FinishReason, Segment, WeightVersion
from rollout.generation import Generation, OnSegment


class Trial:
    """One engine's weights on trial."""

    def __init__(self) -> None:
        self._pending: WeightVersion | None = None
        self._rejected: WeightVersion | None = None
        self._held: list[tuple[OnSegment, Segment]] = []
        self._ended = asyncio.Event()

    def begin(self, version: WeightVersion) -> None:
        """From now on tokens of this version stay back; `end` must follow."""
        self._pending, self._ended = version, asyncio.Event()

    def end(self, *, accepted: bool) -> None:
        """Pass on what was held, or drop it; harmless when repeated."""
        version, self._pending = self._pending, None
        held, self._held = self._held, []
        if version is not None and not accepted:
            self._rejected = version
        for on_segment, segment in held if accepted else []:
            on_segment(segment)
        self._ended.set()

    def guard(self, on_segment: OnSegment) -> OnSegment:
        """The same listener, spared what is on trial or was rejected."""

        def on_part(segment: Segment) -> None:
            if segment.version == self._rejected:
                return
            if segment.version == self._pending:
                self._held.append((on_segment, segment))
            else:
                on_segment(segment)

        return on_part

    async def settle(self, generation: Generation) -> Generation:
        """An answer once the verdict on its tokens is known; without those that were rejected, then as aborted.

        Waits for `end`, which comes within the deadline of the probe's own request.
        """
        while self._pending is not None and any(segment.version == self._pending for segment in generation.segments):
            await self._ended.wait()
        kept = tuple(segment for segment in generation.segments if segment.version != self._rejected)
        if len(kept) == len(generation.segments):
            return generation
        return replace(generation, segments=kept, finish_reason=FinishReason.ABORT)
