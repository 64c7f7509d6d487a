"""What other systems call our settings: the last part of their names, or the last parts where one alone says too little.

Only data: used for hints, never accepted as input. A name that means different things in different systems is a note that
tells them apart.
"""

from collections.abc import Mapping

PEER_NAMES: Mapping[str, str] = {
    # staleness bound, and what happens at it
    "max_off_policy_steps": "staleness.max_staleness",
    "max_head_offpolicyness": "staleness.max_staleness",
    "max_off_policy_threshold": "staleness.max_staleness",
    "max_staleness_steps": "staleness.max_staleness",
    "max_staleness_versions": "staleness.max_staleness",
    "max_trajectory_age_steps": "staleness.max_staleness",
    "max_off_policy_strategy": "staleness.policy",
    # the batch, counted in prompts
    "train_dataset.batch_size": "trainer.prompts_per_step",
    "data.train_batch_size": "trainer.prompts_per_step",
    "trainer.train_batch_size": "trainer.prompts_per_step",
    "consumer_batch_size": "trainer.prompts_per_step",
    "num_prompts_per_step": "trainer.prompts_per_step",
    "rollout_batch_size": "trainer.prompts_per_step",
    "token_budget": "trainer.max_tokens_per_micro_batch",
    # optimizer updates in one step, passes over its batch, passes over the data
    "ppo_n_minibatches": "trainer.mini_batches",
    "num_steps_per_rollout": "trainer.mini_batches",
    "num_iterations": "trainer.epochs",
    "ppo_epochs": "trainer.epochs",
    "update_epochs_per_batch": "trainer.epochs",
    "total_epochs": "data.max_epochs",
    "num_train_epochs": "data.max_epochs",
    "num_episodes": "data.max_epochs",
    # siblings of one prompt
    "n": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_generations_per_prompt": "rollout.group_size",
    "num_return_sequences_in_group": "rollout.group_size",
    "attempts": "rollout.group_size",
    # lengths, optimizer, data
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_response_len": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_assistant_turns": "environment.max_turns",
    "max_user_turns": "environment.max_turns",
    "max_env_steps": "environment.max_turns",
    "max_model_len": "environment.max_trajectory_tokens",
    "max_seq_len": "environment.max_trajectory_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_prompt_len": "data.max_prompt_tokens",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "train_files": "data.path",
    "prompt_data": "data.path",
    "val_files": "eval.path",
    "prompt_key": "data.prompt_column",
    "input_key": "data.prompt_column",
    "lr": "trainer.learning_rate",
    "clip_grad": "trainer.max_grad_norm",
    "max_norm": "trainer.max_grad_norm",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "test_freq": "eval.every_steps",
    "eval_steps": "eval.every_steps",
    "eval_interval": "eval.every_steps",
    "val_before_train": "eval.at_start",
    "n_samples_per_eval_prompt": "eval.samples_per_prompt",
    "val_kwargs.n": "eval.samples_per_prompt",
    "eval_temperature": "eval.temperature",
    "total_training_steps": "run.max_steps",
    "num_rollout": "run.max_steps",
    # the algorithm's own settings
    "eps_clip_low": "trainer.algorithm.options.clip_low",
    "eps_clip_high": "trainer.algorithm.options.clip_high",
    "eps_clip_higher": "trainer.algorithm.options.clip_high",
    "clip_ratio_low": "trainer.algorithm.options.clip_low",
    "clip_ratio_high": "trainer.algorithm.options.clip_high",
    "ratio_clip_min": "trainer.algorithm.options.clip_low",
    "ratio_clip_max": "trainer.algorithm.options.clip_high",
    "epsilon_low": "trainer.algorithm.options.clip_low",
    "epsilon_high": "trainer.algorithm.options.clip_high",
    "pg_clip_low": "trainer.algorithm.options.clip_low",
    "pg_clip_high": "trainer.algorithm.options.clip_high",
    "c_clip": "trainer.algorithm.options.dual_clip",
    "eps_clip_c": "trainer.algorithm.options.dual_clip",
    "clip_ratio_c": "trainer.algorithm.options.dual_clip",
    "ratio_clip_c": "trainer.algorithm.options.dual_clip",
    "reward_norm": "trainer.algorithm.options.std",
    "adv_estimator": "trainer.algorithm.kind",
    "advantage_estimator": "trainer.algorithm.kind",
    "loss_agg_mode": "trainer.algorithm.options.aggregation",
    "loss_type": "trainer.algorithm.options.aggregation",
    "filter_zero_advantages": "trainer.algorithm.options.filter_zero_variance",
    "filter_zero_advantage_groups": "trainer.algorithm.options.filter_zero_variance",
    "zero_variance_filter": "trainer.algorithm.options.filter_zero_variance",
    "filter_groups": "trainer.algorithm.options.filter_zero_variance",
    "dynamic_sampling.type": "trainer.algorithm.options.filter_zero_variance",
    "use_dynamic_sampling": "trainer.algorithm.options.filter_zero_variance",
    "dynamic_filtering": "trainer.algorithm.options.filter_zero_variance",
    "max_num_gen_batches": "trainer.max_filter_rounds",
    "importance_sampling_level": "trainer.algorithm.options.ratio_level",
    "overlong_tokens": "trainer.algorithm.options.overlong_buffer_tokens",
    "overlong_penalty_factor": "trainer.algorithm.options.overlong_penalty",
    "mask_truncated_completions": "trainer.algorithm.options.mask_truncated",
    "overlong_filter": "trainer.algorithm.options.mask_truncated",
    "entropy_coeff": "trainer.algorithm.options.entropy_coef",
    # distance from a reference, and from the engine
    "beta": "trainer.algorithm.options.kl_coef",
    "kl_loss_coef": "trainer.algorithm.options.kl_coef",
    "reference_policy_kl_penalty": "trainer.algorithm.options.kl_coef",
    "kl_estimator_type": "trainer.algorithm.options.kl_estimator",
    "reference_policy_kl_type": "trainer.algorithm.options.kl_estimator",
    "kl.estimator": "trainer.algorithm.options.kl_estimator",
    "estimator": "trainer.algorithm.options.kl_estimator",
    "ref_load": "model.reference",
    "train_infer_is_weight": "trainer.correction.weight",
    "tis_clip": "trainer.correction.weight_max",
    "rollout_is_threshold": "trainer.correction.weight_max",
    "token_tis_ratio_clip_high": "trainer.correction.weight_max",
    "sequence_tis_ratio_clip_high": "trainer.correction.weight_max",
    "truncated_importance_sampling_ratio": "trainer.correction.weight_max",
    "vllm_importance_sampling_cap": "trainer.correction.weight_max",
    "vllm_importance_sampling_clip_max": "trainer.correction.weight_max",
    # adapters, and how a model is split over ranks
    "lora_rank": "trainer.lora.rank",
    "lora_r": "trainer.lora.rank",
    "lora_alpha": "trainer.lora.alpha",
    "lora_target_modules": "trainer.lora.targets",
    "target_modules": "trainer.lora.targets",
    "cpu_offload": "trainer.deepspeed.offload_optimizer",
    "offload_optimizer_device": "trainer.deepspeed.offload_optimizer",
    "optimizer_offload": "trainer.deepspeed.offload_optimizer",
    "context_parallel_size": "trainer.sequence_parallel_size",
    "ulysses_sequence_parallel_size": "trainer.sequence_parallel_size",
    "ulysses_degree": "trainer.sequence_parallel_size",
    "ring_attn_size": "trainer.sequence_parallel_size",
}
"""Their name -> the full path of ours, which means the same."""

_PUBLISH = (
    "every step publishes exactly once: for more updates between, raise `trainer.mini_batches`; `rollout.weight_update` "
    "says when replicas take the new weights"
)
_IN_FLIGHT = "here it is `rollout.max_in_flight_groups`, which counts groups of one worker, not "
_MINI_BATCHES = "here it is `trainer.mini_batches`, a count, not a size: `trainer.prompts_per_step` / that size in prompts"
_MICRO_BATCHES = (
    "they follow from `trainer.max_tokens_per_micro_batch`; updates in a step are counted by `trainer.mini_batches`"
)
_BOTH_BOUNDS = "here it is two bounds, `trainer.algorithm.options.clip_low` and `trainer.algorithm.options.clip_high`"
_BY_PROBABILITY = (
    "it masks by the difference of two probabilities, which nothing here does; nearest is the bound of their ratio, "
)
_STD = 'here it is `trainer.algorithm.options.std`: true is "sample", false is "none"'
_IN_FLIGHT_SWAP = 'here it is `rollout.weight_update`: true is "in_flight", false is "trajectory"'
_KL_IN_LOSS = 'here it is `trainer.algorithm.options.kl_coef` above 0, with `trainer.algorithm.options.kl_in` = "loss"'
_KL_IN_REWARD = 'here it is `trainer.algorithm.options.kl_coef` above 0, with `trainer.algorithm.options.kl_in` = "reward"'
_KL_TYPES = 'here it is `trainer.algorithm.options.kl_estimator`: "k1" (kl), "k2" (mse) or "k3" (low_var_kl)'
_NO_FUNCTION = (
    "no function of yours decides this; groups of equal rewards are left out by "
    "`trainer.algorithm.options.filter_zero_variance`"
)
_TIS = 'here it is `trainer.correction.weight`: token is "token_tis", sequence is "sequence_tis"'
_TIS_TYPES = 'here it is `trainer.correction.weight`: tis is "token_tis", icepop "icepop", seq-mask-tis "sequence_mis"'
_UPPER = (
    "here it is `trainer.correction.weight_max` for a ratio, `trainer.correction.geometric_max` for a sequence's geometric "
    "mean, and `trainer.correction.max_k3` for a KL"
)

PEER_NOTES: Mapping[str, str] = {
    "staleness_threshold": (
        "it is a share of stale samples; here `staleness.max_staleness` is a whole number of weight versions: 0 for 0, and "
        "1 for a share of at most 1"
    ),
    "async_queue_size": (
        "it bounds a queue; here `staleness.max_staleness` bounds the age in weight versions, in flight and in queue "
        "together: a queue of n batches is about n + 1"
    ),
    "async_generation_ratio": "here it is `staleness.max_staleness`, a whole number of weight versions: round it up",
    "max_lag": (
        "here it is `staleness.max_staleness`, in weight versions, one a step: a lag in samples is divided by "
        "`trainer.prompts_per_step` x `rollout.group_size`"
    ),
    "sampler.name": "what happens at the bound is `staleness.policy`; the order within it is `experience.sampler`",
    "parameter_sync_step": _PUBLISH,
    "trigger_parameter_sync_step": _PUBLISH,
    "update_weights_interval": _PUBLISH,
    "weight_sync_steps": _PUBLISH,
    "weight_update_interval": _PUBLISH,
    "partial_rollout": _IN_FLIGHT_SWAP,
    "partial_rollout_enable": _IN_FLIGHT_SWAP,
    "in_flight_weight_updates": _IN_FLIGHT_SWAP,
    "initial_inflight": "`rollout.adapt_in_flight` finds the number by itself, from `rollout.max_in_flight_groups` down",
    "min_inflight": "`rollout.adapt_in_flight` finds the number by itself, from `rollout.max_in_flight_groups` down",
    "max_inflight": _IN_FLIGHT + "all rollouts",
    "max_concurrent_rollouts": _IN_FLIGHT + "of all",
    "num_parallel_generation_workers": _IN_FLIGHT + "of all",
    "max_inflight_prompts": _IN_FLIGHT + "of all",
    "max_inflight_tasks": _IN_FLIGHT + "all answers",
    "llm_max_rollouts": _IN_FLIGHT + "its rollouts: divide by `rollout.group_size`",
    "over_sampling_batch_size": "here it is `rollout.over_provision`, a factor: this size / `trainer.prompts_per_step`",
    "over_sample_rate": "here it is `rollout.over_provision`, a factor: 1 + this rate",
    "batch_size": (
        "here it is `trainer.prompts_per_step`, in prompts: a size in rollouts is divided by `rollout.group_size`"
    ),
    "token_batch_size": "a step is not counted in tokens here, but in prompts, `trainer.prompts_per_step`",
    "train_batch_size": (
        "in prompts it is `trainer.prompts_per_step`; the size of an update is set by `trainer.mini_batches`, a count, that "
        "of a forward pass by `trainer.max_tokens_per_micro_batch`, in tokens"
    ),
    "global_batch_size": _MINI_BATCHES + ", of samples x `rollout.group_size`",
    "train_global_batch_size": _MINI_BATCHES + ", of samples x `rollout.group_size`",
    "ppo_mini_batch_size": _MINI_BATCHES,
    "policy_mini_batch_size": _MINI_BATCHES,
    "per_device_train_batch_size": (
        "here it is `trainer.max_tokens_per_micro_batch`, in tokens instead of samples; the step's size is "
        "`trainer.prompts_per_step`"
    ),
    "gradient_accumulation_steps": _MICRO_BATCHES,
    "gradient_accumulation_passes": _MICRO_BATCHES,
    "max_epochs": "passes over a step's batch are `trainer.epochs`, passes over the data `data.max_epochs`",
    "eps_clip": _BOTH_BOUNDS,
    "eps_clip_low_high": _BOTH_BOUNDS,
    "clip_ratio": _BOTH_BOUNDS,
    "epsilon": _BOTH_BOUNDS,
    "pg_clip": _BOTH_BOUNDS,
    "dppo_mask_low": _BY_PROBABILITY + "`trainer.algorithm.options.clip_low`",
    "dppo_mask_high": _BY_PROBABILITY + "`trainer.algorithm.options.clip_high`",
    "adv_tau": "advantages have weight 1 here; the weight of the KL term is `trainer.algorithm.options.kl_coef`",
    "kl_tau": (
        "it pulls towards the policy that sampled, which nothing here does; `trainer.algorithm.options.kl_coef` pulls "
        "towards a frozen reference, `trainer.correction.max_k3` leaves out what is too far from the sampling policy"
    ),
    "kl_ctl": _KL_IN_REWARD,
    "use_kl_in_reward": _KL_IN_REWARD,
    "use_kl_loss": _KL_IN_LOSS,
    "use_loss": _KL_IN_LOSS,
    "kl_loss_type": _KL_TYPES,
    "final_kl_coef": "`trainer.algorithm.options.kl_coef` stays as it is throughout a run",
    "use_decoupled_loss": (
        'here it is `trainer.algorithm.options.ratio_to`: true is "proximal", as kind "decoupled_ppo" has it, with a '
        '`trainer.correction.weight`; false is "rollout"'
    ),
    "bypass_mode": (
        'here it is `trainer.algorithm.options.ratio_to`: true is "rollout", false is "proximal" with a '
        "`trainer.correction.weight`"
    ),
    "rollout_is": _TIS,
    "tis_ratio_type": _TIS,
    "rollout_rs": (
        'here it is `trainer.correction.weight`: token is "token_mis", sequence is "sequence_mis"; by the geometric mean it '
        "is `trainer.correction.geometric_min` and `trainer.correction.geometric_max`"
    ),
    "rollout_rs_threshold": _UPPER,
    "rejection_sampling.level": (
        'here it is in `trainer.correction.weight`: token is "token_mis" or "token_tis", sequence "sequence_mis" or '
        '"sequence_tis"'
    ),
    "rejection_sampling.action": (
        'here it is in `trainer.correction.weight`: mask is "token_mis" or "sequence_mis", clamp "token_tis" or '
        '"sequence_tis"'
    ),
    "rejection_sampling.metric": (
        "a ratio is bounded by `trainer.correction.weight`, a sequence's geometric mean by "
        "`trainer.correction.geometric_max`, a KL by `trainer.correction.max_k3`"
    ),
    "rejection_sampling.upper": _UPPER,
    "rejection_sampling.lower": (
        'here it is `trainer.correction.weight_min` for a ratio (with weight "icepop"), and '
        "`trainer.correction.geometric_min` for a sequence's geometric mean"
    ),
    "sequence_mask_metric": (
        'here a product is `trainer.correction.weight` = "sequence_mis", a geometric mean '
        "`trainer.correction.geometric_min` and `trainer.correction.geometric_max`"
    ),
    "truncated_importance_sampling_type": _TIS_TYPES,
    "is_correction_type": _TIS_TYPES,
    "is_correction_enable": 'here it is `trainer.correction.weight`: false is "none", true one of its other values',
    "is_correction_threshold": (
        "here it is `trainer.correction.weight_max`; the lower one of a pair is `trainer.correction.weight_min`"
    ),
    "use_tis": 'here it is `trainer.correction.weight`: true is "token_tis", false is "none"',
    "tis_clip_low": 'here it is `trainer.correction.weight_min`, which counts with `trainer.correction.weight` = "icepop"',
    "vllm_importance_sampling_mode": (
        'here it is `trainer.correction.weight`: truncate is "token_tis" or "sequence_tis", mask "token_mis" or '
        '"sequence_mis"'
    ),
    "adv_norm": ("over the batch it is `trainer.algorithm.options.whiten`, within groups `trainer.algorithm.options.std`"),
    "norm_adv_by_std_in_grpo": _STD,
    "grpo_norm_by_std": _STD,
    "normalize_rewards": _STD,
    "divide_advantage_by_std": _STD,
    "disable_grpo_std_normalization": 'here it is `trainer.algorithm.options.std`: true is "none", false is "sample"',
    "scale_rewards": (
        'here it is `trainer.algorithm.options.std`: true or group is "sample", false or none is "none"; over the batch it '
        "is `trainer.algorithm.options.whiten`"
    ),
    "dr_grpo": 'here it is `trainer.algorithm.kind` = "dr_grpo"',
    "should_accept_fn": _NO_FUNCTION,
    "dynamic_sampling_filter_path": _NO_FUNCTION,
    "reward_model.enable": (
        'here every reward is a table in `rewards`: a model behind a URL is one of kind "judge"; remove this'
    ),
}
"""Their name -> which of ours it is and how that differs, or why there is none."""
