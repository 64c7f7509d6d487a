"""KL(policy || reference) of tokens that were sampled: estimators, and the gradients they give in a loss.

With d = log p - log q at a sampled token (p policy, q reference, b what the token was sampled from; Schulman,
"Approximating KL divergence", 2020). Sampled from p, all three measure KL(p || q): k1 = d and k3 = exp(-d) - 1 + d
without bias, k2 = d^2 / 2 nearly. In a loss only the gradient counts, and theirs are not alike:

| `kl_gradient` | estimator | expected gradient on policy (b = p) | off policy |
|---|---|---|---|
| `straight_through` | any | that of KL(policy, reference) | the same: weighted by p/b |
| `estimator` | k1 | 0: refused | |
| `estimator` | k2 | that of KL(policy, reference) | biased: no weight p/b |
| `estimator` | k3 | that of KL(reference, policy), the other direction | biased likewise |

`straight_through` shows the estimator's value and passes back (p/b) d grad log p, whose mean over b is grad KL(p || q).
Shapes: B rows, T tokens.
"""

from torch import Tensor

from trainer.algorithms.loss import MAX_LOG_RATIO, log_ratio, select
from trainer.algorithms.options import KlEstimator, KlGradient


def kl_tokens(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator's value at each trained token, (B, T), with its own gradient; 0 at masked places.

    Args:
        logprobs_BT: current log-probs.
        ref_logprobs_BT: the reference's.
        mask_BT: bool, true where a token is trained.
        estimator: see `PolicyGradientOptions.kl_estimator`.
    """
    difference_BT = log_ratio(logprobs_BT, ref_logprobs_BT, mask_BT)
    if estimator == "k1":
        return difference_BT
    if estimator == "k2":
        return difference_BT.square() / 2
    return (-difference_BT).clamp(max=MAX_LOG_RATIO).expm1() + difference_BT


def kl_loss_tokens(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    estimator: KlEstimator,
    gradient: KlGradient,
) -> Tensor:
    """The KL term of each trained token, (B, T): the estimator's value, with the gradient asked for (see the table above).

    Args:
        logprobs_BT: current log-probs; they carry the gradient.
        ref_logprobs_BT: the reference's.
        behaviour_logprobs_BT: log-probs of the distribution that the tokens came from.
        mask_BT: bool, true where a token is trained.
        estimator: see `PolicyGradientOptions.kl_estimator`.
        gradient: see `PolicyGradientOptions.kl_gradient`.
    """
    value_BT = kl_tokens(logprobs_BT, ref_logprobs_BT, mask_BT, estimator)
    if gradient == "estimator":
        return value_BT
    logprobs_BT = select(logprobs_BT, mask_BT)
    weight_BT = log_ratio(logprobs_BT, behaviour_logprobs_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    passed_BT = (weight_BT * log_ratio(logprobs_BT, ref_logprobs_BT, mask_BT)).detach() * logprobs_BT
    return value_BT.detach() + passed_BT - passed_BT.detach()
