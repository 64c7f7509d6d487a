"""`laminar check --dry-run`: who goes where and how many bytes that takes, by hand calculation."""

import json

import pytest
from typer.testing import CliRunner

from laminar.cli.main import app
from laminar.cluster.roles import RoleSpec
from laminar.config.root import LaminarConfig
from laminar.config.sizes import ModelSize, slot_bytes
from laminar.dry_run.architecture import Architecture, read_architecture
from laminar.dry_run.machines import Machine, described_machine
from laminar.dry_run.memory import activation_bytes, cache_capacity_tokens, logits_bytes, trained_bytes
from laminar.dry_run.parts import Model, most_tokens_in_a_pass
from laminar.dry_run.placement import place
from laminar.dry_run.plan import Place, describe, make_plan
from laminar.errors import ConfigError, EnvironmentSetupError

GB = 10**9
TINY = Architecture(2, 64, 4, 2, 16, 128, 24, is_tied=True)
QWEN_7B = Architecture(28, 3584, 28, 4, 128, 18944, 152064, is_tied=False)
CPU_BOX = Machine(num_cores=4, host_bytes=32 * GB, shared_bytes=16 * GB)


def gpu_box(count, gb=80):
    return Machine(64, 1000 * GB, 500 * GB, count, gb * GB)


def config(**sections):
    return LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def test_parameters_are_counted_as_published():
    # embedding 24 x 64; a layer: 64 x 16 x 2 x (4 + 2) + 3 x 64 x 128 + 2 x 64; and the last norm
    assert TINY.num_parameters == 1536 + 2 * (12288 + 24576 + 128) + 64
    # Qwen2.5-7B has 7,615,616,512, of which 28 x (3584 + 512 + 512) are biases, which are not counted
    assert QWEN_7B.num_parameters == 7_615_616_512 - 129_024


@pytest.mark.parametrize(
    ("number_bytes", "stage", "weights", "gradients", "optimizer"),
    [
        (4, 0, 4000, 4000, 8000),  # two moments; weights are updated in place
        (4, 1, 4000, 4000, 3000),  # a quarter of 1000 x (4 + 4 + 4)
        (4, 2, 4000, 1000, 3000),
        (2, 0, 2000, 4000 + 2000, 3000),  # bfloat16 takes stage 1
        (2, 2, 2000, 1000 + 2000, 3000),  # one bucket of gradients in bfloat16 is larger than all of them here
        (2, 3, 500, 1000 + 2000, 3000),
    ],
)
def test_weights_gradients_and_optimizer_are_split_by_stage(number_bytes, stage, weights, gradients, optimizer):
    trained = trained_bytes(1000, number_bytes, stage, 4)
    assert (trained.weights, trained.gradients, trained.optimizer) == (weights, gradients, optimizer)


def test_the_optimizer_of_the_zero_papers_example():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 devices, K = 12: 90 GB, split 1.4 GB
    assert trained_bytes(7_500_000_000, 2, 1, 64).optimizer == pytest.approx(90e9 / 64)


def test_activations_are_those_of_all_layers_or_of_one_and_all_inputs():
    # a token and layer, float32: 4 x (4 x 64 + (8 + 4) x 16 + 4 x 128) + 8 x 64 = 4352
    assert activation_bytes(TINY, 10, 4, checkpointing=False) == 2 * 10 * 4352
    assert activation_bytes(TINY, 10, 4, checkpointing=True) == 2 * 10 * 64 * 4 + 10 * 4352


def test_logits_are_bounded_by_their_chunk():
    assert logits_bytes(24, 10) == 3 * 24 * 10 * 4
    assert logits_bytes(150_000, 16_384) == 3 * 256 * 1024**2


def test_the_cache_holds_two_vectors_a_head_and_layer():
    assert QWEN_7B.cache_bytes_per_token(2) == 57_344  # 2 x 28 x 4 x 128 x 2
    assert QWEN_7B.cache_bytes_per_token(2, num_parts=2) == 28_672
    assert QWEN_7B.cache_bytes_per_token(2, num_parts=8) == 14_336  # a head is not split
    assert cache_capacity_tokens(80e9, 15 * GB, 57_344) == 1_133_510  # 65e9 / 57344 = 1133510.04
    assert cache_capacity_tokens(10e9, 15 * GB, 57_344) == 0


def spec(name, cpus=1.0, gpus=0.0):
    return RoleSpec(name, "m:C", num_cpus=cpus, num_gpus=gpus)


def test_roles_fill_one_machine_before_the_next_and_shares_of_a_gpu_one_device():
    roles = [spec("a", gpus=0.6), spec("b", gpus=0.4), spec("c", gpus=0.5), spec("d", gpus=1), spec("e", gpus=2)]
    placed = place(roles, [gpu_box(2), gpu_box(3)], is_local=False)
    assert [(role.machine, role.devices) for role in placed] == [(0, (0,)), (0, (0,)), (0, (1,)), (1, (0,)), (1, (1, 2))]


def test_cores_limit_on_a_cluster_and_are_numbers_on_one_machine():
    roles = [spec("a", cpus=3), spec("b", cpus=3)]
    assert [role.machine for role in place(roles, [CPU_BOX, CPU_BOX], is_local=False)] == [0, 1]
    assert [role.machine for role in place(roles, [CPU_BOX], is_local=True)] == [0, 0]
    with pytest.raises(EnvironmentSetupError, match=r"b needs 3 CPUs and 0 GPUs.*have 1 CPUs and 0 GPUs left; lower"):
        place(roles, [CPU_BOX], is_local=False)


def model(architecture, number_bytes):
    parameters = architecture.num_parameters
    return Model(ModelSize(parameters, parameters * number_bytes), architecture, number_bytes)


def on_gpus(**trainer):
    return config(
        model={"path": "m", "dtype": "bfloat16"},
        rollout={
            "num_workers": 2, "group_size": 16, "max_new_tokens": 1024,
            "engine": {"kind": "sglang", "num_gpus": 1, "max_cached_tokens": 655_360},
        },
        trainer={
            "num_ranks": 2, "num_gpus_per_rank": 1, "prompts_per_step": 64, "max_tokens_per_micro_batch": 16_384,
            "gradient_checkpointing": True, **trainer,
        },
        data={"path": "d", "max_prompt_tokens": 256},
    )  # fmt: skip


def test_a_run_on_gpus_is_added_up_by_device_host_and_shared_memory():
    settings = on_gpus(deepspeed={"zero_stage": 2})
    plan = make_plan(settings, [gpu_box(4, gb=100)], model(QWEN_7B, 2))
    P = QWEN_7B.num_parameters
    rank = {part.what: part.num_bytes for part in plan.parts[Place(0, "device", 0)]}
    assert rank == {
        "weights": 2 * P,
        "gradients": 4 * P // 2 + 2 * 500_000_000,
        "optimizer": 12 * P // 2,
        # 28 inputs of 3584 numbers a token, and one whole layer: 2 (4 x 3584 + 64 x 128 + 4 x 18944) + 8 x 3584 bytes
        "activations": 16_384 * (28 * 3584 * 2 + 225_280),
        "logits": 3 * 256 * 1024**2,
        "driver context": 600_000_000,
    }
    engine = {part.what: part.num_bytes for part in plan.parts[Place(0, "device", 2)]}
    assert engine == {"weights": 2 * P, "key-value cache": 655_360 * 57_344, "driver context": 600_000_000}
    assert plan.needed(Place(0, "shared")) == 2 * slot_bytes(2 * P)  # one kept version, one being written
    assert plan.cache_tokens == (655_360, (95 * GB - 2 * P - 600_000_000) // 57_344)
    assert plan.faults() == []
    assert "512 trajectories of the longest kind (1280 tokens)" in describe(plan, settings)


def test_what_does_not_fit_is_refused_with_the_value_and_the_remedy():
    (first, second) = make_plan(on_gpus(deepspeed={"zero_stage": 1}), [gpu_box(4, gb=80)], model(QWEN_7B, 2)).faults()
    # 14 P = 106.62 GB, activations 6.98, logits 0.81, context 0.6
    assert first.startswith("GPU 0 of machine 0 can hold 76.0 GB, and 115.0 GB are needed")
    assert "trainer-0, " in first
    assert "raise trainer.deepspeed.zero_stage or trainer.num_ranks" in first
    assert second.startswith("GPU 1")
    small = Machine(64, 1000 * GB, 20 * GB, 4, 140 * GB)
    (fault,) = make_plan(on_gpus(), [small], model(QWEN_7B, 2)).faults()
    assert fault == (
        "shared memory of machine 0 can hold 20.0 GB, and 30.5 GB are needed: the most by relay-0, 2 slots for weights, "
        "30.5 GB; lower relay.keep_versions, or give it more memory"
    )


def test_a_run_on_a_cpu_takes_everything_from_the_host_and_maps_weights_once():
    settings = config(rollout={"group_size": 2, "max_new_tokens": 6}, trainer={"prompts_per_step": 2})
    plan = make_plan(settings, [CPU_BOX], model(TINY, 4))
    assert {where.kind for where in plan.parts} == {"host", "shared"}
    mine = {(part.owner, part.what): part.num_bytes for part in plan.parts[Place(0, "host")]}
    P = TINY.num_parameters
    assert mine["trainer-0", "optimizer"] == 8 * P
    assert mine["trainer-0", "activations"] == 2 * 4 * 1030 * 4352  # 4 rows of 1024 + 6 tokens are less than a micro-batch
    assert ("rollout-0", "weights") not in mine
    assert mine["rollout-0", "key-value cache"] == 65_536 * 2 * 2 * 2 * 16 * 4
    assert mine["relay-0", "3 slots for weights"] == 3 * slot_bytes(4 * P)  # one is mapped by the engine


def test_a_critic_and_a_reference_are_counted_where_they_stay():
    algorithm = {"kind": "ppo", "options": {"kl_coef": 0.1}}
    plan = make_plan(on_gpus(algorithm=algorithm, keep_reference_on="cpu"), [gpu_box(4)], model(QWEN_7B, 2))
    device = [part.what for part in plan.parts[Place(0, "device", 0)]]
    assert "critic's optimizer" in device
    assert "reference" not in device
    assert sum(part.what == "reference" for part in plan.parts[Place(0, "host")]) == 2


@pytest.fixture
def files(tmp_path):
    """A config beside a model of which only the config is there, and one row of data."""
    (tmp_path / "m").mkdir()
    sizes = {
        "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "m" / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "d.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[rewards]]\nkind = "exact_match"\n'
    (tmp_path / "c.toml").write_text(text + "[trainer]\nnum_gpus_per_rank = 1\n")
    return tmp_path


def test_the_command_prints_the_plan_and_ends_with_3_where_it_does_not_fit(files):
    assert read_architecture(files / "m") == QWEN_7B
    command = ["check", "--dry-run", str(files / "c.toml"), "--gpus", "1", "--memory-gb", "900"]
    good = CliRunner().invoke(app, [*command, "--gpu-gb", "300", "rollout.max_in_flight_groups=8"])
    assert "trainer-0 on GPU 0" in good.stdout, good.exception
    assert "shared memory of machine 0: " in good.stdout
    bad = CliRunner().invoke(app, [*command, "--gpu-gb", "80"]).exception
    assert isinstance(bad, EnvironmentSetupError)
    assert bad.exit_code == 3
    assert "the run does not fit: GPU 0 of machine 0 can hold 76.0 GB" in str(bad)


@pytest.mark.parametrize("option", ["--memory-gb", "--shared-gb", "--gpu-gb"])
def test_a_size_without_end_is_refused(files, option):
    error = CliRunner().invoke(app, ["check", "--dry-run", str(files / "c.toml"), option, "inf"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"{option} inf: give a number of gigabytes, such as 80"


def test_ranks_that_share_rows_hold_a_stretch_of_each():
    tokens = {"data": {"path": "d", "max_prompt_tokens": 1000}, "rollout": {"max_new_tokens": 24, "group_size": 4}}
    split = {"prompts_per_step": 1, "num_ranks": 4, "sequence_parallel_size": 4, "max_tokens_per_micro_batch": 2000}
    assert most_tokens_in_a_pass(config(trainer=split, **tokens)) == 1024  # 4 rows of 1024 tokens over 4 ranks
    pairs = {**split, "sequence_parallel_size": 2, "max_tokens_per_micro_batch": 800}
    assert most_tokens_in_a_pass(config(trainer=pairs, **tokens)) == 800  # of 2 rows, 1024 tokens a rank


def test_the_note_about_busy_threads_counts_the_cores_that_were_described(files):
    command = ["check", "--dry-run", str(files / "c.toml"), "--gpus", "1", "--memory-gb", "900", "--gpu-gb", "300"]
    many = "rollout.num_workers=7"  # and one trainer rank: 8 threads
    assert "8 busy threads on 6 cores" in CliRunner().invoke(app, [*command, "--cores", "6", many]).stdout
    assert "busy threads" not in CliRunner().invoke(app, [*command, "--cores", "8", many]).stdout


def test_a_model_without_files_leaves_the_placement():
    settings = config()
    assert "cannot be estimated" in describe(make_plan(settings, [CPU_BOX], None), settings)


def test_what_is_not_said_of_a_machine_is_as_here():
    assert described_machine(CPU_BOX) == CPU_BOX
    assert described_machine(CPU_BOX, memory_gb=64, gpus=2, gpu_gb=24) == Machine(4, 64 * GB, 32 * GB, 2, 24 * GB)
