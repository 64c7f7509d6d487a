"""Settings of the policy-gradient algorithms. No torch here, so that `laminar check` needs none."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from laminar.config.section import Section

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_denominator"]
Standardization = Literal["population", "sample", "none"]
Baseline = Literal["group_mean", "leave_one_out", "greedy", "critic", "none"]
RatioTo = Literal["rollout", "proximal"]
Level = Literal["token", "sequence"]
Surrogate = Literal["clipped", "weighted_logprob"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
KlGradient = Literal["estimator", "straight_through"]
ClipLow = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class PolicyGradientOptions(Section):
    """`[trainer.algorithm.options]` of every policy-gradient algorithm; `presets.py` has the values of known ones."""

    baseline: Baseline = "group_mean"
    """What a reward is compared with: the mean of its group, the mean of the *other* members, a greedy answer that each
    group then plays besides (and does not train), a critic, or nothing."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of one trained token; read with a critic."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Of generalised advantage estimation: 0 trusts the critic's next value, 1 only the rewards; read with a critic."""
    value_clip: float | None = Field(0.2, gt=0)
    """The critic's loss counts moves of a value up to this far from where it was at batch start; read with a critic."""
    std: Standardization = "sample"
    """Divisor of the centred rewards: standard deviation with n - 1 (`sample`), with n (`population`), or 1 (`none`)."""
    std_epsilon: NonNegative = 1e-6
    """Added to a standard deviation, in units of reward."""
    whiten: bool = False
    """Then centre and scale the advantages of all trained tokens of the batch, all ranks together."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Answers that end within so many tokens of `max_new_tokens` are penalised, linearly up to `overlong_penalty`."""
    overlong_penalty: NonNegative = 1.0
    """Taken from the reward of an answer that used all its tokens, in units of reward."""
    mask_truncated: bool = False
    """Keep trajectories that a length limit ended out of the loss; they still count in their group's statistics."""
    filter_zero_variance: bool = True
    """Leave out groups whose rewards are all equal: they teach nothing."""
    variance_tolerance: NonNegative = 1e-6
    """Rewards that differ by no more than this are equal."""
    ratio_to: RatioTo = "rollout"
    """The ratio's denominator: the log-probs that the engine sampled with, or those recomputed at batch start (`proximal`;
    then `trainer.correction` bridges the two)."""
    ratio_level: Level = "token"
    """A ratio for each token, or one for each row: the geometric mean of its tokens'."""
    surrogate: Surrogate = "clipped"
    """PPO's clipped ratio x advantage, or the clipped ratio as a constant weight of advantage x log-prob."""
    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low; 1 switches the lower bound off."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped above at 1 + clip_high; more room upwards keeps rare tokens alive (clip-higher)."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, the loss is at most this times -advantage; only with surrogate `clipped`."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number: mean over tokens; mean over sequences of token means, or of token sums; or the sum
    over sequences x `fixed_tokens`."""
    fixed_tokens: int | None = Field(None, ge=1)
    """Tokens a sequence counts for under `fixed_denominator`."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the frozen reference; 0: no reference is loaded."""
    kl_in: KlPlace = "loss"
    """A term of the loss, or a cost in the reward of each token (its own and all later ones', no baseline)."""
    kl_estimator: KlEstimator = "k3"
    """Of log p/q = d: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (`trainer/algorithms/kl.py` has their gradients)."""
    kl_gradient: KlGradient = "straight_through"
    """In the loss: the true gradient of KL(policy || reference), also off policy, or that of the estimator itself."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> Self:
        if (self.aggregation == "fixed_denominator") != (self.fixed_tokens is not None):
            raise ValueError(
                f'fixed_tokens = {self.fixed_tokens} with aggregation = "{self.aggregation}": '
                'set fixed_tokens together with "fixed_denominator", and only then'
            )
        if self.dual_clip is not None and self.surrogate != "clipped":
            raise ValueError(
                f'dual_clip = {self.dual_clip} with surrogate = "{self.surrogate}", which is bounded already: remove it'
            )
        if self.baseline in ("none", "critic", "greedy") and self.std != "none":
            raise ValueError(
                f'std = "{self.std}" with baseline = "{self.baseline}": a group\'s spread says nothing about a reward that '
                'is not centred in its group; set std = "none"'
            )
        if self.kl_coef and (self.kl_in, self.kl_estimator, self.kl_gradient) == ("loss", "k1", "estimator"):
            raise ValueError(
                'kl_estimator = "k1" with kl_gradient = "estimator" in the loss: its expected gradient is 0, so it is only '
                'noise; set kl_gradient = "straight_through"'
            )
        return self
