"""What works, but may surprise. Pure, but for the options of rewards, whose modules are imported."""

from collections.abc import Iterator

from laminar.config.check_plugins import reward_options
from laminar.config.root import LaminarConfig
from laminar.config.sizes import groups_within_bytes, groups_within_staleness, num_row_shares, shares


def pace_warnings(config: LaminarConfig) -> Iterator[str]:
    """Limits that hold back generation or training more than the staleness bound does."""
    rollout, staleness = config.rollout, config.staleness
    allowed = groups_within_staleness(config)
    fitting = groups_within_bytes(config)
    if allowed is not None and fitting < allowed:
        yield (
            f"`experience.max_bytes` holds {fitting} groups of the {allowed} that the staleness bound admits: "
            "generation will wait for memory before it reaches the bound"
        )
    playing = rollout.num_workers * rollout.max_in_flight_groups
    if allowed is not None and playing < allowed:
        yield (
            f"`rollout.max_in_flight_groups` lets {rollout.num_workers} workers play {playing} groups at once, "
            f"fewer than the {allowed} that the staleness bound admits"
        )
    if staleness.bound is None and staleness.policy != "wait":
        yield (
            f'`staleness.policy` is "{staleness.policy}", but with `staleness.max_staleness` = "unbounded" no group is ever '
            "due and no token over age"
        )
    if config.run.no_progress_seconds <= staleness.max_wait_seconds:
        yield (
            f"`run.no_progress_seconds` is {config.run.no_progress_seconds:g}: the run may stop while the trainer still "
            f"waits for due groups (`staleness.max_wait_seconds` {staleness.max_wait_seconds:g})"
        )
    if staleness.bound is not None and staleness.max_wait_seconds < config.environment.wall_seconds:
        yield (
            f"`staleness.max_wait_seconds` is {staleness.max_wait_seconds:g}, less than an episode may take "
            f"(`environment.wall_seconds` {config.environment.wall_seconds:g}): slow groups are evicted before they end"
        )


def episode_warnings(config: LaminarConfig) -> Iterator[str]:
    """Settings that make episodes, groups or ranks useless."""
    if config.rewards and all(reward.weight == 0 for reward in config.rewards):
        yield "every `rewards[].weight` is 0: every reward will be 0"
    for index, reward in enumerate(config.rewards):
        options, wall = reward_options(reward), config.environment.wall_seconds
        one_program = getattr(getattr(options, "limits", None), "wall_seconds", 0.0)
        if reward.timeout_seconds > wall:
            yield (
                f"`rewards[{index}].timeout_seconds` is {reward.timeout_seconds:g}: the episode ends after "
                f"`environment.wall_seconds` = {wall:g}"
            )
        elif reward.timeout_seconds + one_program > wall:
            yield (
                f"`rewards[{index}].options.limits.wall_seconds` is {one_program:g}: one program and `timeout_seconds` = "
                f"{reward.timeout_seconds:g} are longer than the episode, `environment.wall_seconds` = {wall:g}"
            )
        longest = getattr(options, "max_seconds", 0.0)
        if isinstance(longest, int | float) and longest >= reward.timeout_seconds:
            yield (
                f"`rewards[{index}].options.max_seconds` is {longest:g}, not below `rewards[{index}].timeout_seconds` = "
                f"{reward.timeout_seconds:g}: a check that is given up would keep its process busy; lower it, or raise the "
                "latter"
            )
    trainer = config.trainer
    smallest = min(shares(trainer.prompts_per_step, trainer.mini_batches)) * config.rollout.group_size
    if (num_shares := num_row_shares(config)) > smallest:
        yield (
            f"`trainer.num_ranks` is {trainer.num_ranks}: a mini-batch of {smallest} trajectories leaves "
            f"{(num_shares - smallest) * trainer.sequence_parallel_size} of them idle"
        )
    if trainer.lr_schedule != "constant" and trainer.warmup_steps >= config.run.max_steps:
        yield f"`trainer.warmup_steps` is {trainer.warmup_steps}: the learning rate is still rising at `run.max_steps`"


def machine_warnings(config: LaminarConfig, num_cores: int) -> Iterator[str]:
    """More busy threads than cores, on a run that stays on this machine."""
    trainer, rollout = config.trainer, config.rollout
    threads = trainer.num_ranks * trainer.num_threads + rollout.num_workers * rollout.engine.num_threads
    if config.cluster.ray_address == "local" and threads > num_cores:
        yield (
            f"{trainer.num_ranks} trainer ranks x {trainer.num_threads} threads and {rollout.num_workers} engines x "
            f"{rollout.engine.num_threads} threads are {threads} busy threads on {num_cores} cores: they will be slow"
        )
