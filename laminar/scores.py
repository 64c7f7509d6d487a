"""What an evaluation's rewards amount to: mean@n, pass@k, and how sure one can be of either. Pure.

Every figure is a mean over *prompts*, and its 95 % interval comes from the spread between prompts: samples of one prompt are
not independent, so they never count as so many more observations (Miller, "Adding error bars to evals", arXiv 2411.00640,
section 2.2). Failed samples are no zeros: they are left out, and counted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Z = 1.959963984540054
"""Two-sided 95 % of a normal distribution."""

Rewards = Mapping[str, Sequence[float]]
"""Prompt id → rewards of its answered samples."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        value: the mean.
        low: lower end of its 95 % interval; None if one prompt is all there is.
        high: upper end.
        num_prompts: how many it is the mean of.
    """

    value: float
    low: float | None
    high: float | None
    num_prompts: int


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """What an evaluation of one version found.

    Attributes:
        version_number: the one version that answered.
        samples_per_prompt: asked for.
        num_prompts: with at least one answered sample.
        num_samples: answered.
        num_failed: samples whose episode failed; in no figure.
        mean: mean reward, mean@n with n = `samples_per_prompt`.
        pass_at: k → pass@k, over the prompts with at least k answered samples.
    """

    version_number: int
    samples_per_prompt: int
    num_prompts: int
    num_samples: int
    num_failed: int
    mean: Estimate
    pass_at: dict[int, Estimate]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The report as declared metrics."""
        bounds = {"eval/accuracy_low": self.mean.low, "eval/accuracy_high": self.mean.high}
        return {
            "eval/accuracy": self.mean.value,
            **{name: bound for name, bound in bounds.items() if bound is not None},
            **{f"eval/pass_at_{k}": estimate.value for k, estimate in self.pass_at.items()},
            "eval/num_prompts": self.num_prompts,
            "eval/num_samples": self.num_samples,
            "eval/failed": self.num_failed,
            "eval/version_number": self.version_number,
        }


def report_rewards(
    rewards: Rewards, *, version_number: int, samples_per_prompt: int, num_failed: int, pass_reward: float
) -> EvaluationReport:
    """Sum up an evaluation.

    Args:
        rewards: of all answered samples.
        version_number: that answered.
        samples_per_prompt: asked for.
        num_failed: samples without a reward.
        pass_reward: a sample passes from this reward on.

    Raises:
        ValueError: no sample was answered.
    """
    answered = {prompt: values for prompt, values in rewards.items() if values}
    passed = {prompt: sum(value >= pass_reward for value in values) for prompt, values in answered.items()}
    pass_at: dict[int, Estimate] = {}
    for k in powers_of_two(samples_per_prompt):
        enough = [pass_at_k(len(values), passed[prompt], k) for prompt, values in answered.items() if len(values) >= k]
        if enough:
            pass_at[k] = _as_share(estimate(enough))
    return EvaluationReport(
        version_number=version_number,
        samples_per_prompt=samples_per_prompt,
        num_prompts=len(answered),
        num_samples=sum(map(len, answered.values())),
        num_failed=num_failed,
        mean=estimate([sum(values) / len(values) for values in answered.values()]),
        pass_at=pass_at,
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes (Codex, arXiv 2107.03374, equation 1).

    1 - C(n - c, k) / C(n, k) for n samples of which c passed; 1 - (1 - c/n)^k would be too low.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(f"pass@{k} of {num_passed} among {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of one number a prompt.

    Mean ± 1.96 standard errors (standard deviation with n - 1, over the root of n). Where every number is 0 or 1 that
    would claim certainty for 20 of 20, so there it is Wilson's score interval (J. Am. Stat. Assoc. 22, 1927).

    Raises:
        ValueError: there are no values, so there is no mean.
    """
    count = len(values)
    if count == 0:
        raise ValueError("a mean over no prompts is not defined")
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, None, 1)
    if all(value in (0.0, 1.0) for value in values):
        low, high = _wilson(mean, count)
    else:
        error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
        low, high = mean - Z * error, mean + Z * error
    return Estimate(mean, low, high, count)


def powers_of_two(limit: int) -> Iterable[int]:
    """1, 2, 4, ... up to the limit, and the limit."""
    return sorted({2**power for power in range(limit.bit_length())} | {limit})


def _as_share(found: Estimate) -> Estimate:
    """A share's interval ends at 0 and 1."""
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(0.0, found.low), high=min(1.0, found.high))


def _wilson(mean: float, count: int) -> tuple[float, float]:
    spread = Z * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    middle, scale = mean + Z**2 / (2 * count), 1 + Z**2 / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
