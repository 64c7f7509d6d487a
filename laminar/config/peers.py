"""What other systems call our settings, by the last part of their names. Only data: used for hints, never accepted as input.

A name that means different things in different systems points at the most common one.
"""

from collections.abc import Mapping

PEER_NAMES: Mapping[str, str] = {
    # staleness bound, and what happens at it
    "max_off_policy_steps": "staleness.max_staleness",
    "max_head_offpolicyness": "staleness.max_staleness",
    "max_off_policy_threshold": "staleness.max_staleness",
    "staleness_threshold": "staleness.max_staleness",
    "max_staleness_steps": "staleness.max_staleness",
    "max_staleness_versions": "staleness.max_staleness",
    "max_trajectory_age_steps": "staleness.max_staleness",
    "max_lag": "staleness.max_staleness",
    "async_queue_size": "staleness.max_staleness",
    "async_generation_ratio": "staleness.max_staleness",
    "max_off_policy_strategy": "staleness.policy",
    # when replicas take new weights
    "partial_rollout": "rollout.weight_update",
    "partial_rollout_enable": "rollout.weight_update",
    "in_flight_weight_updates": "rollout.weight_update",
    # groups in flight
    "initial_inflight": "rollout.max_in_flight_groups",
    "max_inflight": "rollout.max_in_flight_groups",
    "max_concurrent_rollouts": "rollout.max_in_flight_groups",
    "num_parallel_generation_workers": "rollout.max_in_flight_groups",
    "max_inflight_prompts": "rollout.max_in_flight_groups",
    "over_sampling_batch_size": "rollout.max_in_flight_groups",
    "max_inflight_tasks": "rollout.max_in_flight_groups",
    "llm_max_rollouts": "rollout.max_in_flight_groups",
    # the batch, counted in prompts
    "batch_size": "trainer.prompts_per_step",
    "consumer_batch_size": "trainer.prompts_per_step",
    "train_batch_size": "trainer.prompts_per_step",
    "num_prompts_per_step": "trainer.prompts_per_step",
    "rollout_batch_size": "trainer.prompts_per_step",
    "global_batch_size": "trainer.prompts_per_step",
    "per_device_train_batch_size": "trainer.max_tokens_per_micro_batch",
    "token_batch_size": "trainer.max_tokens_per_micro_batch",
    "token_budget": "trainer.max_tokens_per_micro_batch",
    # optimizer updates in one step
    "ppo_n_minibatches": "trainer.mini_batches",
    "ppo_mini_batch_size": "trainer.mini_batches",
    "policy_mini_batch_size": "trainer.mini_batches",
    "train_global_batch_size": "trainer.mini_batches",
    "num_steps_per_rollout": "trainer.mini_batches",
    "gradient_accumulation_steps": "trainer.max_tokens_per_micro_batch",
    "gradient_accumulation_passes": "trainer.max_tokens_per_micro_batch",
    # siblings of one prompt
    "n": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_generations_per_prompt": "rollout.group_size",
    "num_return_sequences_in_group": "rollout.group_size",
    "attempts": "rollout.group_size",
    # lengths and optimizer
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_response_len": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_prompt_len": "data.max_prompt_tokens",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "lr": "trainer.learning_rate",
    "clip_grad": "trainer.max_grad_norm",
    "max_norm": "trainer.max_grad_norm",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "total_training_steps": "run.max_steps",
    "num_rollout": "run.max_steps",
    # the algorithm's own settings
    "eps_clip": "trainer.algorithm.options.clip_low",
    "eps_clip_low": "trainer.algorithm.options.clip_low",
    "eps_clip_high": "trainer.algorithm.options.clip_high",
    "eps_clip_higher": "trainer.algorithm.options.clip_high",
    "clip_ratio": "trainer.algorithm.options.clip_low",
    "clip_ratio_low": "trainer.algorithm.options.clip_low",
    "clip_ratio_high": "trainer.algorithm.options.clip_high",
    "ratio_clip_min": "trainer.algorithm.options.clip_low",
    "ratio_clip_max": "trainer.algorithm.options.clip_high",
    "epsilon": "trainer.algorithm.options.clip_low",
    "epsilon_low": "trainer.algorithm.options.clip_low",
    "epsilon_high": "trainer.algorithm.options.clip_high",
    "pg_clip": "trainer.algorithm.options.clip_low",
    "pg_clip_low": "trainer.algorithm.options.clip_low",
    "pg_clip_high": "trainer.algorithm.options.clip_high",
    "norm_adv_by_std_in_grpo": "trainer.algorithm.options.std",
    "grpo_norm_by_std": "trainer.algorithm.options.std",
    "adv_norm": "trainer.algorithm.options.std",
    "normalize_rewards": "trainer.algorithm.options.std",
    "disable_grpo_std_normalization": "trainer.algorithm.options.std",
    "scale_rewards": "trainer.algorithm.options.std",
    "divide_advantage_by_std": "trainer.algorithm.options.std",
    "loss_agg_mode": "trainer.algorithm.options.aggregation",
    "loss_type": "trainer.algorithm.options.aggregation",
    "filter_zero_advantages": "trainer.algorithm.options.filter_zero_variance",
    "filter_zero_advantage_groups": "trainer.algorithm.options.filter_zero_variance",
    "zero_variance_filter": "trainer.algorithm.options.filter_zero_variance",
    "filter_groups": "trainer.algorithm.options.filter_zero_variance",
    "max_num_gen_batches": "trainer.max_filter_rounds",
    "use_dynamic_sampling": "trainer.algorithm.options.filter_zero_variance",
    "dynamic_filtering": "trainer.algorithm.options.filter_zero_variance",
}
"""Their name -> the full path of ours."""

_REUSE = "each group is trained once; `trainer.mini_batches` splits a step into several updates"
_NO_KL = "grpo here has no KL term; remove it"
_PUBLISH = "every step publishes exactly once; `rollout.weight_update` says when replicas take it"

PEER_NOTES: Mapping[str, str] = {
    "parameter_sync_step": _PUBLISH,
    "trigger_parameter_sync_step": _PUBLISH,
    "update_weights_interval": _PUBLISH,
    "weight_sync_steps": _PUBLISH,
    "weight_update_interval": _PUBLISH,
    "num_iterations": _REUSE,
    "ppo_epochs": _REUSE,
    "update_epochs_per_batch": _REUSE,
    "beta": _NO_KL,
    "kl_coef": _NO_KL,
    "kl_ctl": _NO_KL,
    "kl_tau": _NO_KL,
    "kl_loss_coef": _NO_KL,
    "use_kl_loss": _NO_KL,
    "reference_policy_kl_penalty": _NO_KL,
}
"""Their name -> why no setting of ours matches it."""
