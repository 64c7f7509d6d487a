"""Settings of everything around rollout and training: run, model, data, buffer, staleness, relay, checkpoints, eval."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Plugin, Section


class RunConfig(Section):
    """`[run]`: name, place, length."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """Prefix of the run folder's name."""
    directory: str = "runs"
    """Folder that holds run folders."""
    seed: int = Field(0, ge=0)
    """Seed of sampling noise and of the trainer."""
    max_steps: int = Field(100, ge=1)
    """Steps to train."""
    max_trained_tokens: int | None = Field(None, ge=1)
    """The run ends after the step that reaches so many trained tokens, all lives together; unset: no limit."""
    max_train_seconds: float | None = Field(None, gt=0)
    """The run ends after the step that reaches so many seconds from the first group on, all lives together."""
    stop_at_reward: float | None = None
    """The run ends once the mean reward of the last `stop_at_reward_steps` steps, filtered groups included, is this high."""
    stop_at_reward_steps: int = Field(10, ge=1)
    """Steps over which `stop_at_reward` looks."""
    max_skipped_steps: int = Field(20, ge=1)
    """So many steps skipped for safety one after the other end the run with the reason."""
    max_restarts: int = Field(10, ge=0)
    """Restarts of any one role before the run gives up."""
    no_progress_seconds: float = Field(1800, gt=0)
    """The run stops with a diagnosis when no step ends for so long."""
    config_directory: str = ""
    """Folder of the config file, where relative paths start and own modules are found; filled in when the file is read."""


class ModelConfig(Section):
    """`[model]`: the policy."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face causal model; a relative path counts from the config file, then from the working folder."""
    tokenizer: str = ""
    """Folder of the tokenizer; empty: the model's."""
    reference: str = ""
    """Folder of the frozen reference of a KL term, which has the policy's tokenizer; empty: `path`, where training
    begins."""
    critic: str = ""
    """Folder of the model that a critic begins as, which has the policy's tokenizer; empty: `path`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of training; `auto` is the checkpoint's."""


class DataConfig(Section):
    """`[data]`: the prompts."""

    path: str = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, or a Hugging Face dataset: a folder, `owner/name` or `owner/name:configuration`."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_column: str = "prompt"
    """Column that holds raw text, or a list of chat messages."""
    seed: int = Field(0, ge=0)
    """Seed of the prompt order, apart from the sampling seed."""
    shuffle: bool = True
    """Shuffle each epoch."""
    max_epochs: int | None = Field(None, ge=1)
    """Passes over the data before the run ends; unset: until `run.max_steps`."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is refused at start."""


class EnvironmentConfig(Plugin):
    """`[environment]`: what an episode plays against."""

    kind: str = "single_turn"
    """`single_turn`, `tools`, `agent`, `gymnasium`, `textarena`, `verifiers`, `remote`, or `"package.module:Attr"`."""
    wall_seconds: float = Field(600, gt=0)
    """Budget of one episode, environment and reward included."""
    max_turns: int | None = Field(None, ge=1)
    """Most answers in one episode; unset: as many as the environment wants."""
    max_trajectory_tokens: int | None = Field(None, ge=2)
    """Longest trajectory in tokens: prompt, answers and observations in all its chains. Unset: `data.max_prompt_tokens` +
    `rollout.max_new_tokens`, which leaves little for observations."""
    strict_template: bool = False
    """A chat template that does not write a turn as it was sampled is a failure; else such turns are counted."""


class RewardConfig(Plugin):
    """`[[rewards]]`: one named term of the reward."""

    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str = ""
    """Name in metrics; empty: the kind, of `"package.module:Attr"` the `Attr`."""
    timeout_seconds: float = Field(30, gt=0)
    """A reward that takes longer is a verifier failure, not a zero."""

    @property
    def term(self) -> str:
        """What it is called in metrics: `name`, or the kind, of a user's own the attribute alone."""
        return self.name or self.kind.rpartition(":")[2]


class ExperienceConfig(Section):
    """`[experience]`: the buffer."""

    redis_url: str = "embedded"
    """`embedded` starts the bundled server with its data in the run folder;
    else any `redis://`, `rediss://` or `unix://` URL."""
    sampler: str = "fifo"
    """Order within the freedom the staleness rule leaves: `fifo`, `oldest_first`, `freshest_first`,
    or `"package.module:function"`."""
    max_bytes: int = Field(4 * 1024**3, ge=1)
    """Payload bytes that admitted groups may hold, reserved at claim."""
    partial_tokens: int = Field(64, ge=0)
    """Running trajectories put what they have sampled into the buffer every so many tokens, so that at most these are
    sampled again when an engine or a worker dies; 0 switches it off."""


class StalenessConfig(Section):
    """`[staleness]`: how old a trajectory may be when it is trained."""

    max_staleness: Annotated[int, Field(ge=0)] | Literal["unbounded"] = 1
    """Inclusive bound in weight versions; 0 is on-policy; `unbounded` leaves only the buffer's capacity."""
    policy: Literal["wait", "drop", "mask"] = "wait"
    """What happens to groups in flight that the bound calls due: the trainer waits for them; or they are dropped and their
    prompts issued again; or nobody is ever due, and tokens above the bound leave the loss (`mask`)."""
    max_wait_seconds: float = Field(600, gt=0)
    """Longest wait for due groups before the fewest, oldest ones are evicted."""

    @property
    def bound(self) -> int | None:
        """`max_staleness` as a number; None if unbounded."""
        return None if self.max_staleness == "unbounded" else self.max_staleness


class RelayConfig(Section):
    """`[relay]`: how weights travel."""

    transport: str = "auto"
    """How versions reach other machines: `zmq` (TCP), `mooncake` (RDMA where there are devices, else TCP), `collective`
    (torch.distributed: gloo, with `num_gpus` NCCL), or `"package.module:Attr"`; `auto` is `zmq`, but relays of one host
    share their memory."""
    num_gpus: float = Field(0, ge=0, le=1)
    """GPUs that Ray sets aside for each relay, for NCCL with transport `collective`; 0: gloo."""
    shares_gpu_by_mps: bool = False
    """Relays and engines or trainers of one GPU run under NVIDIA's MPS; without it NCCL beside them is refused."""
    keep_versions: int = Field(1, ge=1)
    """Complete versions kept on each machine besides the one being written."""
    root: str = "/dev/shm"
    """Folder for the weight slots; it must be memory-backed to be fast."""


class CheckpointConfig(Section):
    """`[checkpoint]`: what is saved, and when."""

    every_steps: int = Field(50, ge=1)
    """Steps between checkpoints; one is also saved at the end and at Ctrl-C."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints kept."""


class EvalConfig(Section):
    """`[eval]`: rewards on held-out prompts, of one version at a time, by the same engines."""

    path: str = ""
    """Held-out prompts, in the form of `data.path`; empty: no evaluation."""
    split: str = "test"
    """Split of a Hugging Face dataset; the prompt column is that of `[data]`."""
    num_prompts: int = Field(100, ge=1)
    """Prompts used, from the first."""
    at_start: bool = True
    """Evaluate version 0, before step 1."""
    every_steps: int | None = Field(None, ge=1)
    """Then evaluate every so many versions while training goes on: the first version from there on that the evaluating
    worker holds; its next swap waits until the items end. Unset: only at start and end."""
    at_end: bool = True
    """Evaluate the last version."""
    samples_per_prompt: int = Field(1, ge=1)
    """Answers to each prompt: for mean@n and pass@k; above 1 the temperature must be, too."""
    pass_reward: float = 1.0
    """An answer passes, as pass@k counts it, from this reward on."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of evaluation; 0 is greedy."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest answer in tokens; unset: that of training. Environment `agent` keeps training's budget of a trajectory."""
    timeout_seconds: float = Field(600, gt=0)
    """Deadline of one evaluation."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """What an evaluation that fails or takes too long does to the run: a notice, or the end."""


class MetricsConfig(Section):
    """`[metrics]`: what is shown."""

    panel: Literal["auto", "on", "off"] = "auto"
    """Live panel in the terminal; `auto` shows it when the output is a terminal."""
    trajectory_rate: float = Field(0.1, ge=0, le=1)
    """Share of groups whose trajectories are kept in the run folder, to be read by people."""
    max_trajectory_bytes: int = Field(1024**3, ge=1)
    """Size of these records on disk; the oldest are deleted."""
    trace: bool = True
    """Write `trace.json`, the pipeline as Perfetto and Chrome draw it; of episodes, those of `trajectory_rate`."""
    max_trace_bytes: int = Field(64 * 1024**2, ge=4096)
    """Size of the trace on disk, in bytes; the oldest half is deleted."""
    tensorboard: bool = False
    """Write event files into `tensorboard/`; needs the package `tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `offline` writes into the run folder, `online` needs an account; needs the package `wandb`."""
    wandb_project: str = Field("laminar", min_length=1)
    """Its project."""


class AlertsConfig(Section):
    """`[alerts]`: who is told when something is wrong; the rules are those of the dashboard, which need not run."""

    webhook: str = Field("", pattern=r"^(https?://\S+)?$")
    """Address that gets a JSON object by POST, with a `text` as chat services take it; empty: none. Shown nowhere."""
    command: str = ""
    """Program with arguments that gets the same object on its standard input; no shell; empty: none."""
    level: Literal["warning", "critical"] = "warning"
    """Least level that is told."""
    timeout_seconds: float = Field(10, gt=0)
    """Deadline of one attempt."""
    max_retries: int = Field(3, ge=0, le=20)
    """Further attempts, after pauses of 1, 2, 4 ... seconds; then it is given up, with a warning in the observer's log."""
    repeat_seconds: float = Field(3600, gt=0)
    """An alert that lasts is told again after so long."""


class DashboardConfig(Section):
    """`[dashboard]`: the page on the run, served while it lives; `laminar dashboard RUN` serves it at any time."""

    enabled: bool = False
    """Serve it."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address to bind. Anything but loopback lets whoever reaches it read the run; control needs the token in any case."""
    port: int = Field(7860, ge=0, le=65535)
    """Port; 0: any free one, which is printed."""


class ClusterConfig(Section):
    """`[cluster]`: where processes run."""

    ray_address: str = "local"
    """`local` starts Ray on this machine; else the address of a running Ray cluster."""
    placement_seconds: float = Field(120, gt=0)
    """Deadline for Ray to place a process."""
