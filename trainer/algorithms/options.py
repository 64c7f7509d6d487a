"""Settings of the algorithms. No torch here, so that `laminar check` needs none."""

from typing import Literal, Self

from pydantic import Field, model_validator

from laminar.config.section import Section

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_denominator"]
Standardization = Literal["population", "sample", "none"]


class GrpoOptions(Section):
    """`[trainer.algorithm.options]` of `kind = "grpo"`."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high; more room upwards keeps rare tokens alive (clip-higher)."""
    std: Standardization = "sample"
    """Divisor of the centred rewards: standard deviation with n - 1 (`sample`), with n (`population`), or 1 (`none`)."""
    std_epsilon: float = Field(1e-6, ge=0)
    """Added to the standard deviation, in units of reward."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number: mean over tokens; mean over sequences of token means, or of token sums; or the sum
    over sequences x `fixed_tokens`."""
    fixed_tokens: int | None = Field(None, ge=1)
    """Tokens a sequence counts for under `fixed_denominator`."""
    mask_truncated: bool = False
    """Keep trajectories that a length limit ended out of the loss; they still count in their group's statistics."""
    filter_zero_variance: bool = True
    """Leave out groups whose rewards are all equal: they teach nothing."""
    variance_tolerance: float = Field(1e-6, ge=0)
    """Rewards that differ by no more than this are equal."""

    @model_validator(mode="after")
    def _fixed_tokens_belong_to_fixed_denominator(self) -> Self:
        if (self.aggregation == "fixed_denominator") != (self.fixed_tokens is not None):
            raise ValueError(
                f'fixed_tokens = {self.fixed_tokens} with aggregation = "{self.aggregation}": '
                'set fixed_tokens together with "fixed_denominator", and only then'
            )
        return self
