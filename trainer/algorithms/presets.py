"""Known algorithms as values of `PolicyGradientOptions`. Every other option can be set beside them. No torch here.

Notation: r_t = p(y_t) / b(y_t) is a token's probability ratio, b by default the engine's (`ratio_to = "rollout"`), R_i
the reward of member i of a group of G, A_i its advantage, e = `clip_low`, E = `clip_high`, sums over t run over trained
tokens. Each objective below is maximised; the loss is its negative.
"""

from pydantic import Field

from trainer.algorithms.options import (
    Aggregation,
    Baseline,
    ClipLow,
    KlEstimator,
    KlPlace,
    Level,
    NonNegative,
    PolicyGradientOptions,
    RatioTo,
    Standardization,
    Surrogate,
)


class GrpoOptions(PolicyGradientOptions):
    """GRPO (arXiv 2402.03300, equations 3 and 4), with DAPO's clip-higher and token mean, and no KL unless asked for.

    A_i = (R_i - mean R) / std R;  J = 1/sum|y_i| sum_i sum_t min(r_t A_i, clip(r_t, 1 - e, 1 + E) A_i) - kl_coef KL(p ||
    ref). The paper's own means: `aggregation = "sequence_mean"`, `clip_high = 0.2`, `kl_coef = 0.04`, `kl_gradient =
    "estimator"`.
    """


class DrGrpoOptions(PolicyGradientOptions):
    """Dr. GRPO (arXiv 2503.20783, section 3.2): GRPO without its two biases, the division by length and by std.

    A_i = R_i - mean R;  J = 1/G sum_i sum_t min(r_t A_i, clip(r_t) A_i): a mean over sequences of token *sums*.
    `aggregation = "fixed_denominator"` with `fixed_tokens` divides by a constant as well, as its authors' code does.
    """

    std: Standardization = "none"
    aggregation: Aggregation = "sequence_sum"
    clip_high: NonNegative = 0.2


class DapoOptions(PolicyGradientOptions):
    """DAPO (arXiv 2503.14476, equations 8 to 13): clip-higher, dynamic sampling, token mean, overlong shaping.

    J = 1/sum|y_i| sum_i sum_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.28) A_i), groups with equal rewards left out
    (equation 11). The soft penalty of equation 13 is `overlong_buffer_tokens` (the paper: 4096 of 20480); its hard form
    is `mask_truncated`.
    """

    std: Standardization = "population"


class RlooOptions(PolicyGradientOptions):
    """RLOO (arXiv 2402.14740, section 2.3): each member's baseline is the mean of the others.

    A_i = R_i - 1/(G-1) sum_{j != i} R_j = G/(G-1) (R_i - mean R);  J = 1/G sum_i A_i sum_t r_t, clipped. At r = 1 the
    gradient is REINFORCE's, A_i grad log p(y_i).
    """

    baseline: Baseline = "leave_one_out"
    std: Standardization = "none"
    aggregation: Aggregation = "sequence_sum"
    clip_high: NonNegative = 0.2


class RemaxOptions(PolicyGradientOptions):
    """ReMax (arXiv 2310.10505, algorithm 1): the baseline is the reward of the policy's own greedy answer.

    A_i = R_i - R(greedy);  J = 1/G sum_i A_i sum_t r_t, clipped. At r = 1 the gradient is REINFORCE's. Each group plays one
    greedy answer besides its `group_size` attempts, by the same weights; it is not trained. Works with `group_size = 1`.
    """

    baseline: Baseline = "greedy"
    std: Standardization = "none"
    aggregation: Aggregation = "sequence_sum"
    clip_high: NonNegative = 0.2


class SafeRlhfOptions(PolicyGradientOptions):
    """Safe RLHF (arXiv 2310.12773, equations 9, 30 and 31): as much reward as a bound on the mean cost allows.

    max_p min_{l >= 0} E[R] - l (E[C] - d): an answer counts as (R - l C) / (1 + l), and before each batch is trained
    ln l <- ln l + rate l (mean C - d). The cost C is one of the run's own reward terms, of weight 0, such as a cost model
    behind a judge. Members are compared with their group's mean instead of the paper's two critics; as that is linear, the
    advantage is (A_R - l A_C) / (1 + l) as in the paper. `baseline = "critic"` has one critic, of the mixture.
    """

    std: Standardization = "none"
    whiten: bool = True
    clip_high: NonNegative = 0.2
    cost: str = Field("cost", min_length=1)
    """Name of the reward term that is the cost; its `weight` in `[[rewards]]` is 0."""
    cost_limit: float = 0.0
    """Mean cost that is allowed, d."""
    multiplier: float = Field(1.0, gt=0)
    """What the Lagrange multiplier l begins as."""
    multiplier_learning_rate: NonNegative = 0.1
    """Rate of its updates; 0 keeps it."""
    max_multiplier: float = Field(100.0, gt=0)
    """It grows no further."""


class ReinforcePlusPlusOptions(PolicyGradientOptions):
    """REINFORCE++ (arXiv 2501.03262): no group baseline; advantages are normalised over the whole batch.

    A_t = R - kl_coef sum_{s >= t} k1_s, then (A_t - mean) / std over all trained tokens of the batch; PPO's clipped
    objective. Works with `group_size = 1`. Groups of equal rewards teach here too, so they are kept.
    """

    baseline: Baseline = "none"
    std: Standardization = "none"
    whiten: bool = True
    filter_zero_variance: bool = False
    clip_high: NonNegative = 0.2
    kl_in: KlPlace = "reward"
    kl_estimator: KlEstimator = "k1"


class ReinforcePlusPlusBaselineOptions(PolicyGradientOptions):
    """REINFORCE++ with baseline (arXiv 2501.03262): the group's mean shapes the reward, the batch normalises it.

    A_i = R_i - mean of its group, then (A - mean) / std over all trained tokens of the batch; KL, if any, in the loss (k2).
    """

    std: Standardization = "none"
    whiten: bool = True
    clip_high: NonNegative = 0.2
    kl_estimator: KlEstimator = "k2"


class PpoOptions(PolicyGradientOptions):
    """PPO with critic (arXiv 1707.06347, equation 7; advantages: arXiv 1506.02438, equation 16), as RLHF uses it.

    The reward comes at the last token, less k1 at each token if `kl_coef` is set. d_t = reward_t + gamma V_{t+1} - V_t,
    A_t = sum_l (gamma lambda)^l d_{t+l}, whitened over the batch; the critic learns A_t + V_t. Works with `group_size = 1`.
    """

    baseline: Baseline = "critic"
    std: Standardization = "none"
    whiten: bool = True
    filter_zero_variance: bool = False
    clip_high: NonNegative = 0.2
    kl_in: KlPlace = "reward"
    kl_estimator: KlEstimator = "k1"


class GspoOptions(PolicyGradientOptions):
    """GSPO (arXiv 2507.18071, equations 5 to 7): ratio and clip of the whole answer.

    s_i = exp(1/|y_i| sum_t log r_t);  J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i). An answer is a row
    (a chain).
    """

    ratio_level: Level = "sequence"
    aggregation: Aggregation = "sequence_mean"
    clip_low: ClipLow = 3e-4
    clip_high: NonNegative = 4e-4


class CispoOptions(PolicyGradientOptions):
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): clips the weight, so that no token loses its gradient.

    J = 1/sum|y_i| sum_i sum_t sg(clip(r_t, 1 - e, 1 + E)) A_i log p(y_t); without a lower bound, as in the paper's runs.
    """

    surrogate: Surrogate = "weighted_logprob"
    clip_low: ClipLow = 1.0
    clip_high: NonNegative = 4.0


class DecoupledPpoOptions(PolicyGradientOptions):
    """Decoupled PPO (arXiv 2110.00641, equation 4; for language models AReaL, arXiv 2505.24298, equation 5).

    J = E[q/b min(p/q A, clip(p/q) A)]: p current, q proximal (the weights at batch start), b behaviour (the engine's).
    The clip keeps p near q however old the data; q/b corrects for b, by `trainer.correction.weight`, which must therefore
    be set.
    """

    ratio_to: RatioTo = "proximal"
    clip_high: NonNegative = 0.2


class AipoOptions(PolicyGradientOptions):
    """AIPO (LlamaRL, arXiv 2505.24034): importance weights towards the engine, clipped on one side.

    J = 1/sum|y_i| sum_i sum_t sg(min(r_t, 1 + E)) A_i log p(y_t); the paper finds 1 + E from 2 to 10 to work.
    """

    surrogate: Surrogate = "weighted_logprob"
    clip_low: ClipLow = 1.0
    clip_high: NonNegative = 3.0
