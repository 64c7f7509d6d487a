"""Judge the algorithm together with `[trainer.correction]`: what would be biased is refused, with the reason.

A user's own algorithm is judged by the same option names, as far as its options have them.
"""

from collections.abc import Iterator
from typing import Any

from laminar.config.check_plugins import algorithm_options, comparing_rewards
from laminar.config.root import LaminarConfig
from laminar.config.sizes import plays_greedy
from laminar.config.trainer import CorrectionConfig


def algorithm_faults(config: LaminarConfig) -> Iterator[str]:
    """One sentence for every combination that is biased, or does nothing."""
    options = algorithm_options(config)
    yield from _ratio_faults(config, getattr(options, "ratio_to", None))
    yield from _bound_faults(config.trainer.correction)
    yield from _cost_faults(config, getattr(options, "cost", None))
    comparing = comparing_rewards(config) if plays_greedy(config) else []
    if comparing:
        yield (
            f'`rewards` has "{comparing[0]}", which judges siblings by each other, but {config.trainer.algorithm.kind} '
            "compares with a greedy answer, whose reward must not hang on the others (biased): remove it, or use kind "
            '"rloo" or "grpo"'
        )
    if getattr(options, "kl_coef", None) == 0 and config.model.reference:
        yield (
            f'`model.reference` is "{config.model.reference}", but `trainer.algorithm.options.kl_coef` is 0: nothing '
            "asks for it; set the one or remove the other"
        )
    if getattr(options, "baseline", "critic") != "critic" and config.model.critic:
        yield (
            f'`model.critic` is "{config.model.critic}", but {config.trainer.algorithm.kind} has no critic: remove it, or '
            'set `trainer.algorithm.kind` to "ppo"'
        )


def _ratio_faults(config: LaminarConfig, ratio_to: Any) -> Iterator[str]:
    weight = config.trainer.correction.weight
    if ratio_to == "rollout" and weight != "none":
        yield (
            f'`trainer.correction.weight` is "{weight}", but the loss takes its ratio to the rollout log-probs, which is '
            'that weight already: it would count twice; set `trainer.algorithm.options.ratio_to` to "proximal", as kind '
            '"decoupled_ppo" does, or the weight to "none"'
        )
    if ratio_to == "proximal" and weight == "none":
        yield (
            '`trainer.correction.weight` is "none", but the loss takes its ratio to the proximal log-probs: what lies '
            "between them and the engine's, which sampled the tokens, would stay uncorrected (biased); set it to "
            '"token_tis", or `trainer.algorithm.options.ratio_to` to "rollout"'
        )


def _cost_faults(config: LaminarConfig, cost: str | None) -> Iterator[str]:
    """The cost is a reward term that is not in the reward as well."""
    if cost is None:
        return
    weights = {reward.term: reward.weight for reward in config.rewards}
    if weights.get(cost, 0) != 0:
        yield (
            f'`rewards` gives the term "{cost}" the weight {weights[cost]:g}, but {config.trainer.algorithm.kind} subtracts '
            "it by a weight of its own: set its `weight` to 0"
        )
    elif cost not in weights:
        yield (
            f'`trainer.algorithm.options.cost` is "{cost}", but `rewards` has only {", ".join(weights) or "nothing"}: add a '
            f'[[rewards]] table with name = "{cost}" and weight = 0, or name another term'
        )


def _bound_faults(correction: CorrectionConfig) -> Iterator[str]:
    if correction.weight != "none" and correction.weight_max < 1:
        yield (
            f"`trainer.correction.weight_max` is {correction.weight_max:g}: a token of the very weights that are trained "
            "has weight 1 and would be cut; use 1 or more"
        )
    if correction.weight == "icepop" and correction.weight_min > 1:
        yield (
            f"`trainer.correction.weight_min` is {correction.weight_min:g}: a token of the very weights that are trained "
            "has weight 1 and would be dropped; use 1 or less"
        )
