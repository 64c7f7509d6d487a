"""Every known name of a peer's leads to the setting of the same meaning, or its hint says how that differs."""

import re

import pytest

from laminar.config.hints import unknown_keys
from laminar.config.peers import PEER_NAMES, PEER_NOTES
from laminar.config.schema import all_paths, format_path
from laminar.plugins import load_attribute

OPTIONS = "trainer.algorithm.options."
STALENESS, POLICY = "staleness.max_staleness", "staleness.policy"
IN_FLIGHT = "rollout.max_in_flight_groups"
GROUP, BATCH, MINI = "rollout.group_size", "trainer.prompts_per_step", "trainer.mini_batches"
EPOCHS, PASSES = "trainer.epochs", "data.max_epochs"
WEIGHT, WEIGHT_MAX, WEIGHT_MIN = (f"trainer.correction.{name}" for name in ("weight", "weight_max", "weight_min"))
LOW, HIGH, DUAL = OPTIONS + "clip_low", OPTIONS + "clip_high", OPTIONS + "dual_clip"
KL, KL_IN, KL_ESTIMATOR = OPTIONS + "kl_coef", OPTIONS + "kl_in", OPTIONS + "kl_estimator"
STD, WHITEN, FILTER = OPTIONS + "std", OPTIONS + "whiten", OPTIONS + "filter_zero_variance"

NAMES = {
    # staleness bound; a share, a queue and a number of samples are no numbers of versions
    "orchestrator.max_off_policy_steps": (STALENESS, ""),
    "rollout.max_head_offpolicyness": (STALENESS, ""),
    "trainer.v1.sampler.max_off_policy_threshold": (STALENESS, ""),
    "async_training.staleness_threshold": (STALENESS, "share"),
    "trainer.fully_async.max_staleness_steps": (STALENESS, ""),
    "grpo.async_grpo.max_trajectory_age_steps": (STALENESS, ""),
    "async_rl.sampler.max_staleness_versions": (STALENESS, ""),
    "max_staleness": (STALENESS, ""),
    "finetune.max_lag": (STALENESS, "samples"),
    "train.async_queue_size": (STALENESS, "queue"),
    "async_generation_ratio": (STALENESS, "whole"),
    # at the bound
    "trainer.v1.sampler.max_off_policy_strategy": (POLICY, ""),
    "async_rl.sampler.name": (POLICY, "order"),
    # weight publish interval: none
    "parameter_sync_step": (MINI, "every step publishes"),
    "async_training.trigger_parameter_sync_step": (MINI, "every step publishes"),
    "--update-weights-interval": (MINI, "every step publishes"),
    "weight_sync_steps": (MINI, "every step publishes"),
    "weight_update_interval": (MINI, "every step publishes"),
    # in-flight limit: ours counts groups of one worker
    "concurrency.initial_inflight": ("rollout.adapt_in_flight", "by itself"),
    "concurrency.min_inflight": ("rollout.adapt_in_flight", "by itself"),
    "concurrency.max_inflight": (IN_FLIGHT, "groups of one worker"),
    "rollout.max_concurrent_rollouts": (IN_FLIGHT, "groups of one worker"),
    "num_parallel_generation_workers": (IN_FLIGHT, "groups of one worker"),
    "max_inflight_prompts": (IN_FLIGHT, "groups of one worker"),
    "--over-sampling-batch-size": ("rollout.over_provision", "factor"),
    "max_inflight_tasks": (IN_FLIGHT, "groups of one worker"),
    "actor.llm_max_rollouts": (IN_FLIGHT, "groups of one worker"),
    # partial rollout
    "partial_rollout": ("rollout.weight_update", '"in_flight"'),
    "async_grpo.in_flight_weight_updates": ("rollout.weight_update", '"in_flight"'),
    "--partial-rollout": ("rollout.weight_update", '"in_flight"'),
    "partial_rollout_enable": ("rollout.weight_update", '"in_flight"'),
    # the batch, here in prompts
    "batch_size": (BATCH, "rollouts"),
    "token_batch_size": (BATCH, "tokens"),
    "train_dataset.batch_size": (BATCH, ""),
    "rollout.consumer_batch_size": (BATCH, ""),
    "data.train_batch_size": (BATCH, ""),
    "trainer.train_batch_size": (BATCH, ""),
    "grpo.num_prompts_per_step": (BATCH, ""),
    "--rollout-batch-size": (BATCH, ""),
    "--global-batch-size": (MINI, "count"),
    "per_device_train_batch_size": ("trainer.max_tokens_per_micro_batch", "tokens"),
    "token_budget": ("trainer.max_tokens_per_micro_batch", ""),
    "finetune.train_batch_size": (MINI, "count"),
    "train_batch_size": (MINI, "count"),
    "finetune.gradient_accumulation_passes": ("trainer.max_tokens_per_micro_batch", "follow"),
    "rollout_batch_size": (BATCH, ""),
    # mini-batches, here a count; epochs over a batch and over the data
    "actor.ppo_n_minibatches": (MINI, ""),
    "actor.ppo_mini_batch_size": (MINI, "count"),
    "trainer.policy_mini_batch_size": (MINI, "count"),
    "policy.train_global_batch_size": (MINI, "count"),
    "--num-steps-per-rollout": (MINI, ""),
    "gradient_accumulation_steps": ("trainer.max_tokens_per_micro_batch", "follow"),
    "num_iterations": (EPOCHS, ""),
    "actor.ppo_epochs": (EPOCHS, ""),
    "trainer.update_epochs_per_batch": (EPOCHS, ""),
    "train.max_epochs": (EPOCHS, "passes over a step's batch"),
    "trainer.total_epochs": (PASSES, ""),
    "num_train_epochs": (PASSES, ""),
    "num_episodes": (PASSES, ""),
    # group size
    "orchestrator.group_size": (GROUP, ""),
    "gconfig.n_samples": (GROUP, ""),
    "rollout.n": (GROUP, ""),
    "generator.n_samples_per_prompt": (GROUP, ""),
    "grpo.num_generations_per_prompt": (GROUP, ""),
    "--n-samples-per-prompt": (GROUP, ""),
    "num_generations": (GROUP, ""),
    "attempts": (GROUP, ""),
    "num_return_sequences_in_group": (GROUP, ""),
    # clip; a single bound there is both bounds here
    "loss.dppo_mask_low": (LOW, "difference"),
    "loss.dppo_mask_high": (HIGH, "difference"),
    "actor.eps_clip": (LOW, HIGH),
    "actor.eps_clip_higher": (HIGH, ""),
    "actor.c_clip": (DUAL, ""),
    "actor.clip_ratio": (LOW, HIGH),
    "actor.clip_ratio_low": (LOW, ""),
    "actor.clip_ratio_high": (HIGH, ""),
    "actor.clip_ratio_c": (DUAL, ""),
    "algorithm.eps_clip_low": (LOW, ""),
    "algorithm.eps_clip_high": (HIGH, ""),
    "loss_fn.ratio_clip_min": (LOW, ""),
    "loss_fn.ratio_clip_max": (HIGH, ""),
    "loss_fn.ratio_clip_c": (DUAL, ""),
    "--eps-clip": (LOW, HIGH),
    "--eps-clip-high": (HIGH, ""),
    "--eps-clip-c": (DUAL, ""),
    "epsilon": (LOW, HIGH),
    "epsilon_low": (LOW, ""),
    "epsilon_high": (HIGH, ""),
    "eps_clip_low_high": (LOW, HIGH),
    "dual_clip": (DUAL, ""),
    "pg_clip": (LOW, HIGH),
    "pg_clip_low": (LOW, ""),
    "pg_clip_high": (HIGH, ""),
    # KL
    "loss.kl_tau": (KL, "sampled"),
    "actor.kl_ctl": (KL, '"reward"'),
    "actor.kl_estimator": (KL_ESTIMATOR, ""),
    "actor.use_kl_loss": (KL, "above 0"),
    "actor.kl_loss_coef": (KL, ""),
    "actor.kl_loss_type": (KL_ESTIMATOR, "low_var_kl"),
    "trainer.kl_estimator_type": (KL_ESTIMATOR, ""),
    "loss_fn.reference_policy_kl_penalty": (KL, ""),
    "loss_fn.reference_policy_kl_type": (KL_ESTIMATOR, ""),
    "--kl-loss-coef": (KL, ""),
    "--kl-loss-type": (KL_ESTIMATOR, "low_var_kl"),
    "beta": (KL, ""),
    "rl.kl_coef": (KL, ""),
    "rl.final_kl_coef": (KL, "stays"),
    "kl.estimator": (KL_ESTIMATOR, ""),
    "kl.use_loss": (KL, "above 0"),
    "algorithm.use_kl_in_reward": (KL_IN, '"reward"'),
    # correction
    "loss.adv_tau": (KL, "weight 1"),
    "actor.use_decoupled_loss": (OPTIONS + "ratio_to", '"proximal"'),
    "rejection_sampling.level": (WEIGHT, '"sequence_mis"'),
    "rejection_sampling.action": (WEIGHT, '"token_mis"'),
    "rejection_sampling.metric": (WEIGHT, "trainer.correction.max_k3"),
    "rejection_sampling.upper": (WEIGHT_MAX, "trainer.correction.geometric_max"),
    "rejection_sampling.lower": (WEIGHT_MIN, "trainer.correction.geometric_min"),
    "rollout_correction.rollout_is": (WEIGHT, '"token_tis"'),
    "rollout_correction.rollout_is_threshold": (WEIGHT_MAX, ""),
    "rollout_correction.rollout_rs": (WEIGHT, '"token_mis"'),
    "rollout_correction.rollout_rs_threshold": (WEIGHT_MAX, "trainer.correction.geometric_max"),
    "rollout_correction.bypass_mode": (OPTIONS + "ratio_to", '"rollout"'),
    "off_policy_correction.tis_ratio_type": (WEIGHT, '"token_tis"'),
    "off_policy_correction.token_tis_ratio_clip_high": (WEIGHT_MAX, ""),
    "off_policy_correction.sequence_mask_metric": (WEIGHT, "trainer.correction.geometric_min"),
    "loss_fn.truncated_importance_sampling_type": (WEIGHT, '"token_tis"'),
    "loss_fn.truncated_importance_sampling_ratio": (WEIGHT_MAX, ""),
    "--use-tis": (WEIGHT, '"token_tis"'),
    "--tis-clip": (WEIGHT_MAX, ""),
    "--tis-clip-low": (WEIGHT_MIN, '"icepop"'),
    "vllm_importance_sampling_mode": (WEIGHT, '"token_tis"'),
    "vllm_importance_sampling_clip_max": (WEIGHT_MAX, ""),
    "is_correction_enable": (WEIGHT, '"none"'),
    "is_correction_type": (WEIGHT, '"token_tis"'),
    "is_correction_threshold": (WEIGHT_MAX, ""),
    "train_infer_is_weight": (WEIGHT, ""),
    # std normalisation: true and false there, a kind of deviation here
    "actor.adv_norm": (WHITEN, STD),
    "actor.reward_norm": (STD, ""),
    "algorithm.norm_adv_by_std_in_grpo": (STD, 'true is "sample"'),
    "algorithm.grpo_norm_by_std": (STD, 'true is "sample"'),
    "grpo.normalize_rewards": (STD, 'true is "sample"'),
    "--disable-grpo-std-normalization": (STD, 'true is "none"'),
    "scale_rewards": (STD, WHITEN),
    "divide_advantage_by_std": (STD, 'true is "sample"'),
    "dr_grpo": ("trainer.algorithm.kind", '"dr_grpo"'),
    # zero-variance filter
    "filter_zero_advantages": (FILTER, ""),
    "should_accept_fn": (FILTER, "no function"),
    "algorithm.filter_groups": (FILTER, ""),
    "zero_variance_filter": (FILTER, ""),
    "dynamic_sampling.type": (FILTER, ""),
    "grpo.use_dynamic_sampling": (FILTER, ""),
    "--dynamic-sampling-filter-path": (FILTER, "no function"),
    "filter_zero_advantage_groups": (FILTER, ""),
    "dynamic_filtering": (FILTER, ""),
    # data and rewards
    "data.train_files": ("data.path", ""),
    "data.val_files": ("eval.path", ""),
    "reward_model.enable": ("rewards", "judge"),
}
"""A peer's name as its users write it -> the setting of the same meaning, and what the hint must say besides."""


def keys_of(name: str) -> list[str]:
    return name.split(".")


def hints_for(keys: list[str], value: object) -> str:
    for key in reversed(keys):
        value = {key: value}
    return " | ".join(sentence for _, sentence in unknown_keys(value))


def known_settings() -> set[str]:
    options = ("trainer.algorithms.options:PolicyGradientOptions", "trainer.algorithms.presets:SafeRlhfOptions")
    names = {OPTIONS + name for path in options for name in load_attribute(path).model_fields}
    return names | {format_path(path) for path, _ in all_paths()}


@pytest.mark.parametrize("name", NAMES)
def test_a_peers_name_leads_to_the_setting_of_the_same_meaning(name):
    setting, words = NAMES[name]
    hint = hints_for(keys_of(name), 1)
    assert f"`{setting}`" in hint
    assert words in hint


@pytest.mark.parametrize("name", NAMES)
def test_a_peers_name_is_known_without_its_sections_unless_these_tell_it_from_ours(name):
    last = keys_of(name)[-1]
    if last in ("level", "action", "name", "type", "metric", "upper", "lower", "enable", "batch_size", "train_batch_size"):
        return
    assert f"`{NAMES[name][0]}`" in hints_for([last], 1)


def test_every_setting_that_a_hint_names_exists():
    known = known_settings()
    assert set(PEER_NAMES.values()) <= known
    named = {name for note in PEER_NOTES.values() for name in re.findall(r"`([^`]+)`", note)}
    assert named <= known


def test_no_peers_name_is_a_name_of_ours():
    ours = {name.rpartition(".")[2] for name in known_settings()}
    assert not ours & PEER_NAMES.keys()
    assert ours & PEER_NOTES.keys() == {"max_epochs"}, "a note of a name that is also ours says which is which"
    assert not PEER_NAMES.keys() & PEER_NOTES.keys()


def test_a_table_of_a_peers_is_named_with_what_lies_in_it():
    hint = hints_for(["algorithm", "filter_groups"], {"enable": True, "max_num_gen_batches": 10})
    assert "unknown section `algorithm`: it belongs at `trainer.algorithm`" in hint
    assert f"unknown section `algorithm.filter_groups`: here it is `{FILTER}`" in hint
    assert "unknown key `algorithm.filter_groups.max_num_gen_batches`: here it is `trainer.max_filter_rounds`" in hint
