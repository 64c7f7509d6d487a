"""Every metric, declared once: name, unit, meaning, type.

Names have the form `area/what_unit`. A name that ends in `*` stands for a family (`reward/term_*`). What is not declared
here cannot be emitted. This module knows nothing of where metrics go.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from laminar.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric.

    Attributes:
        name: `area/what_unit`.
        unit: empty for a plain number.
        meaning: in a phrase.
        type: a `counter` is what has come together since some start, and only rises until it begins again; a `gauge` is
            the value of a moment or a step.
    """

    name: str
    unit: str
    meaning: str
    type: Literal["gauge", "counter"] = "gauge"


METRICS: tuple[Metric, ...] = (
    Metric("train/step", "steps", "the step these values belong to"),
    Metric("train/loss", "", "loss of the step, one mean over all its mini-batches' trained tokens"),
    Metric("train/policy_loss", "", "its policy-gradient part: without KL term and entropy bonus"),
    Metric("train/kl", "nats", "mean estimate of the KL divergence from the frozen reference, a token; 0 without one"),
    Metric("train/entropy", "nats", "mean entropy of the tempered distribution at trained tokens"),
    Metric("train/ratio_mean", "", "mean probability ratio of the loss: trained over rollout, or over proximal"),
    Metric("train/clip_low_ratio", "share", "trained tokens where the ratio's lower bound acts"),
    Metric("train/clip_high_ratio", "share", "trained tokens where the ratio's upper bound acts"),
    Metric("train/rollout_kl", "nats", "KL(rollout || policy) a token (k3), mean over the step's updates"),
    Metric("train/value_loss", "", "half the squared error of the critic, a token, clipped as set; only with a critic"),
    Metric("train/critic_grad_norm", "", "the critic's gradient norm before clipping; only with a critic"),
    Metric("train/grad_norm", "", "gradient norm before clipping"),
    Metric("train/learning_rate", "", "learning rate of the step"),
    Metric("train/tokens", "tokens", "sampled tokens trained in the step; padding and prompts do not count"),
    Metric(
        "train/skipped_steps",
        "steps",
        "steps skipped for safety so far; their number is published, weights unchanged",
        "counter",
    ),
    Metric("train/micro_batches", "", "micro-batches of the step on each rank"),
    Metric("reward/mean", "", "mean reward of the trained trajectories"),
    Metric("reward/std", "", "population standard deviation of the same"),
    Metric("reward/min", "", "smallest reward in the step"),
    Metric("reward/max", "", "largest reward in the step"),
    Metric(
        "reward/pass_at_k",
        "share",
        "of all groups that were ready since the last step, those with an answer that passes (`eval.pass_reward`)",
    ),
    Metric("reward/zero_std_ratio", "share", "groups of the step whose rewards are all equal"),
    Metric(
        "reward/finished_mean",
        "",
        "mean reward of all groups that were ready since the last step, filtered ones included",
    ),
    Metric(
        "reward/greedy_mean", "", "mean reward of the greedy answers that the others are compared with; only with `greedy`"
    ),
    Metric("reward/cost_mean", "", "mean cost of the batch, which `safe_rlhf` keeps at its limit"),
    Metric("train/lagrange_multiplier", "", "weight of the cost beside the reward in `safe_rlhf`"),
    Metric("reward/term_*", "", "mean of one named reward term"),
    Metric("rollout/response_tokens_*", "tokens", "sampled tokens per trained trajectory"),
    Metric("rollout/truncated_ratio", "share", "trained trajectories ended by a length limit"),
    Metric("rollout/mixed_version_ratio", "share", "trained trajectories sampled by more than one version"),
    Metric("rollout/turns_mean", "turns", "sampled turns per trained trajectory"),
    Metric("rollout/chains_mean", "chains", "chains per trained trajectory; more than one if a context was rewritten"),
    Metric("rollout/count_*", "", "how often something was counted, per trained trajectory (`rollout/README.md`)"),
    Metric("rollout/failures_*", "trajectories", "failed trajectories so far, by kind", "counter"),
    Metric("staleness/versions_*", "versions", "staleness of the trained trajectories"),
    Metric("staleness/in_flight_versions_*", "versions", "the part of it gained while being sampled"),
    Metric("staleness/in_queue_versions_*", "versions", "the part of it gained while waiting in the buffer"),
    Metric("staleness/histogram_*", "trajectories", "trained trajectories of the step with this staleness"),
    Metric("staleness/masked_tokens", "tokens", "sampled tokens of the step that only their age kept out of the loss"),
    Metric("staleness/dropped_groups", "groups", "groups that the trainer evicted for their age so far", "counter"),
    Metric(
        "staleness/trained_length_*",
        "trajectories",
        "trained trajectories of the step by sampled tokens: at most this power of two, more than the one below",
    ),
    Metric(
        "staleness/dropped_length_*",
        "trajectories",
        "the same for those evicted because of their age since the last step; `unfinished` ones had put nothing by",
    ),
    Metric("mismatch/kl", "nats", "KL(rollout || trainer at batch start) a token (k3), of the tokens that were compared"),
    Metric("mismatch/kl_staleness_*", "nats", "the same of tokens of this staleness"),
    Metric("mismatch/logprob_abs_diff_mean", "nats", "mean absolute difference between the two log-probs"),
    Metric("mismatch/ratio_*", "", "quantile of the probability at batch start over the rollout's"),
    Metric("mismatch/weight_mean", "", "mean of the same ratio; 1 in expectation"),
    Metric("mismatch/weight_max", "", "largest ratio"),
    Metric(
        "mismatch/effective_sample_size_ratio",
        "share",
        "(sum w)^2 / (n sum w^2) of the tokens' weights: those of `trainer.correction`, or without one the ratios",
    ),
    Metric("mismatch/masked_ratio", "share", "tokens to which `trainer.correction` gave no weight"),
    Metric("mismatch/masked_staleness_*", "share", "the same of tokens of this staleness"),
    Metric("throughput/trained_tokens_per_second", "tokens/s", "sampled tokens trained, over the step's whole span"),
    Metric("throughput/generated_tokens_per_second", "tokens/s", "tokens sampled by all engines, over the same span"),
    Metric(
        "throughput/tokens_per_second_per_device",
        "tokens/s",
        "trained tokens over all devices, the trainer's and the engines', by the same span",
    ),
    Metric(
        "throughput/model_flops_utilisation",
        "share",
        "arithmetic that the trained rows need, over what the ranks could do in the passes' and updates' time",
    ),
    Metric(
        "throughput/trajectories_per_second",
        "1/s",
        "trajectories trained, greedy answers left out, over the step's whole span",
    ),
    Metric(
        "time/step_seconds",
        "s",
        "from the end of the last step (at first: from the first group in flight) to the end of this one",
    ),
    Metric(
        "time/left_seconds", "s", "until the first of the run's limits, but a reward's, at the pace of the last 20 steps"
    ),
    Metric("time/sample_wait_seconds", "s", "the trainer's wait for a legal batch"),
    Metric("time/scoring_seconds", "s", "proximal and reference passes at batch start, and what follows from them"),
    Metric("time/forward_backward_seconds", "s", "forward and backward passes"),
    Metric("time/optimizer_seconds", "s", "optimizer updates"),
    Metric(
        "time/publish_stall_seconds",
        "s",
        "training stood still for weights that were being copied: the beginning of this version, the end of the one before",
    ),
    Metric("time/spool_seconds", "s", "writing the step into the replay spool"),
    Metric("time/checkpoint_seconds", "s", "saving the last checkpoint; 0 before the first"),
    Metric("time/evaluation_seconds", "s", "answering the held-out prompts, beside training"),
    Metric(
        "time/state_*",
        "s",
        "seconds a role has spent in one state since its start; its states sum to its wall time",
        "counter",
    ),
    Metric("experience/ready_groups", "groups", "complete groups that wait"),
    Metric("experience/open_groups", "groups", "groups being played"),
    Metric(
        "experience/oldest_age_seconds",
        "s",
        "since the trainer first saw the group that has waited longest, of those ready when the batch was drawn",
    ),
    Metric("experience/bytes", "bytes", "payload bytes held or reserved"),
    Metric(
        "experience/producer_wait_seconds", "s", "no claim was granted, because `max_bytes` was reserved, so far", "counter"
    ),
    Metric("experience/admitted", "trajectories", "admitted so far", "counter"),
    Metric(
        "experience/trained",
        "trajectories",
        "in published steps so far; greedy answers, which are only compared with, count too",
        "counter",
    ),
    Metric("experience/evicted", "trajectories", "evicted so far", "counter"),
    Metric("experience/evictions_*", "trajectories", "evicted so far, by reason", "counter"),
    Metric("experience/filtered", "trajectories", "filtered so far", "counter"),
    Metric("experience/failed", "trajectories", "failed so far", "counter"),
    Metric("experience/refilled", "trajectories", "failures so far after which the member was played again", "counter"),
    Metric("experience/abandoned", "trajectories", "evicted so far whose prompt had been issued again too often", "counter"),
    Metric("experience/judged_groups", "groups", "complete groups judged by the filter since the last step"),
    Metric("experience/kept_ratio", "share", "of these, those kept as informative"),
    Metric("weights/trainer_version", "", "number of the newest published version"),
    Metric("weights/min_replica_version", "", "number of the oldest version that a replica holds"),
    Metric("weights/publish_bytes", "bytes", "bytes of one version"),
    Metric(
        "weights/publish_bytes_per_second",
        "bytes/s",
        "these bytes over the seconds of the newest finished copy, beside training or not",
    ),
    Metric("weights/skipped_publishes", "", "versions not offered so far because every slot was leased", "counter"),
    Metric(
        "weights/broadcast_seconds",
        "s",
        "from a machine's first request for a piece of the last version to its appearance there; the slowest machine",
    ),
    Metric("weights/broadcast_bytes", "bytes", "what a machine received of it, broken pieces included; the most"),
    Metric("weights/broadcast_bytes_per_second", "bytes/s", "the one over the other; the slowest machine"),
    Metric("weights/broken_pieces", "", "pieces of it that came broken and were asked for again; the most of any machine"),
    Metric("weights/pull_seconds", "s", "an engine's update from its machine's shared memory, a part of the swap"),
    Metric("weights/pull_bytes_per_second", "bytes/s", "bytes of that version over these seconds"),
    Metric("weights/swap_seconds", "s", "one swap in an engine, pause to continue"),
    Metric(
        "weights/probe_difference_nats",
        "nats",
        "mean absolute difference of engine and trainer on the last swap's probe, a token; above the tolerance: a restart",
    ),
    Metric("engine/running", "requests", "requests being decoded"),
    Metric("engine/waiting", "requests", "requests in the engine's queue"),
    Metric("engine/kv_use_ratio", "share", "key-value cache in use"),
    Metric(
        "engine/prefix_hit_ratio",
        "share",
        "of all context tokens that its engines were asked to continue, those they had in their cache",
    ),
    Metric("engine/generated_tokens", "tokens", "tokens sampled so far by this worker's engines", "counter"),
    Metric("worker/open_trajectories", "trajectories", "episodes this worker plays now"),
    Metric("worker/finished_trajectories", "trajectories", "episodes this worker ended so far", "counter"),
    Metric(
        "worker/aborted_trajectories",
        "trajectories",
        "episodes aborted so far because their group was lost or let go",
        "counter",
    ),
    Metric("worker/version_number", "", "number of the version this worker's engine holds; -1: unknown"),
    Metric(
        "worker/resumed_tokens",
        "tokens",
        "tokens of dead workers that this one did not have to sample again, so far",
        "counter",
    ),
    Metric(
        "worker/records_left_out",
        "trajectories",
        "trajectory records so far that came too fast, or could not be written",
        "counter",
    ),
    Metric("worker/guest_trajectories", "trajectories", "episodes of other workers that this engine plays"),
    Metric("worker/away_groups", "groups", "groups of this worker that are generated by other engines"),
    Metric("worker/in_flight_limit", "groups", "groups that this worker plays at once at most, by its engine's pressure"),
    Metric(
        "worker/moved_trajectories",
        "trajectories",
        "trajectories of this worker that were moved elsewhere so far",
        "counter",
    ),
    Metric("engine/preempted_requests", "requests", "sent back to the queue because the cache was full, so far", "counter"),
    Metric("repack/plans", "", "plans so far that moved something", "counter"),
    Metric("repack/released_replicas", "replicas", "emptied by moves so far", "counter"),
    Metric("repack/moved_trajectories", "trajectories", "moved by plans so far", "counter"),
    Metric(
        "repack/moved_tokens",
        "tokens",
        "context that they took along so far, of replicas as the directory last knew them",
        "counter",
    ),
    Metric(
        "repack/failed_moves",
        "trajectories",
        "moves of plans that came to nothing so far; they stayed where they were",
        "counter",
    ),
    Metric("repack/plan_seconds", "s", "CPU time spent making plans so far", "counter"),
    Metric("repack/replicas", "replicas", "replicas in the directory"),
    Metric("repack/kv_use_ratio", "share", "context of open trajectories over capacity, mean over replicas"),
    Metric("worker/engine_restarts", "", "engines this worker restarted so far", "counter"),
    Metric(
        "worker/rejected_weights", "", "times so far that this worker's engine did not hold the weights it should", "counter"
    ),
    Metric("eval/accuracy", "", "mean evaluation reward on held-out prompts (mean@n, if each is answered n times)"),
    Metric("eval/accuracy_low", "", "lower end of its 95 % interval, by the spread between prompts"),
    Metric("eval/accuracy_high", "", "upper end of the same"),
    Metric("eval/pass_at_*", "share", "chance that one of so many answers passes (`eval.pass_reward`), unbiased"),
    Metric("eval/num_prompts", "prompts", "held-out prompts that were answered"),
    Metric("eval/num_samples", "", "answers to them"),
    Metric("eval/failed", "", "answers whose episode failed; they are in no figure"),
    Metric("eval/version_number", "", "the one version that was evaluated"),
    Metric("resume/replayed_steps", "steps", "trained again from the spool when the lineage was opened"),
    Metric("resume/kept_groups", "groups", "complete groups kept when the lineage was opened"),
    Metric("resume/regenerated_prompts", "prompts", "to be generated again when the lineage was opened"),
    Metric("resume/lost_prompts", "prompts", "untrained, and neither kept nor to be generated again; must be 0"),
    Metric("faults/heartbeat_age_seconds", "s", "since the role was heard that is silent for longest"),
    Metric("faults/restarts_*", "", "restarts of a role so far", "counter"),
    Metric(
        "system/host_memory_bytes",
        "bytes",
        "resident memory of all processes of the run on the driver's machine, without mapped files and shared memory",
    ),
    Metric("system/memory_bytes_*", "bytes", "the same by kind of role, with the processes it started; `other`: Ray, Redis"),
    Metric("system/device_memory_bytes", "bytes", "most that the first trainer rank's tensors took on its GPU in the step"),
    Metric("system/shared_memory_bytes", "bytes", "weight versions in the shared memory of the driver's machine"),
    Metric("system/cpu_ratio", "share", "of the driver's cores, what the run's processes used in the last two seconds"),
)

_EXACT = {metric.name for metric in METRICS if "*" not in metric.name}
_FAMILIES = tuple(metric.name for metric in METRICS if "*" in metric.name)


def check_declared(names: Iterable[str]) -> None:
    """Refuse names that are not declared.

    Raises:
        InvariantError: naming the first one.
    """
    for name in names:
        if name not in _EXACT and not any(fnmatchcase(name, family) for family in _FAMILIES):
            raise InvariantError(f"metric {name!r} is not declared in laminar/telemetry/registry.py")
