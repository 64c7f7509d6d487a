"""An engine's stream of tokens as segments."""

from laminar.types import WeightVersion, sampled
from rollout.engines.answers import OnTokens
from rollout.generation import OnSegment


def as_segments(on_segment: OnSegment, *, masked_heads: bool) -> OnTokens:
    """Turn an engine's parts into segments; with `masked_heads` a later version's first token is masked (in-place swaps)."""
    last: WeightVersion | None = None

    def on_tokens(ids: list[int], logprobs: list[float], version: WeightVersion) -> None:
        nonlocal last
        masked = int(masked_heads and last is not None and version != last)
        last = version
        on_segment(sampled(ids, logprobs, version, masked))

    return on_tokens
