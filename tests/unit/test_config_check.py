"""Rules between settings (case D27, sizes): refused or warned of before any process starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.cli.check import check
from laminar.config.check import check_config
from laminar.config.check_sources import is_hub_name
from laminar.config.load import load_config
from laminar.config.sizes import bytes_per_group
from laminar.errors import ConfigError
from laminar.plugins import load_attribute

RECIPES = sorted((Path(__file__).parents[2] / "deploy" / "recipes").glob("*_*gpu*.toml"))
REWARD = '[[rewards]]\nkind = "exact_match"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model and data, as far as `check` looks."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}))
    return tmp_path


def write(folder: Path, text: str, reward: str = REWARD) -> Path:
    file = folder / "run.toml"
    file.write_text('model.path = "policy"\ndata.path = "rows.jsonl"\n' + text + "\n" + reward)
    return file


def warnings(folder: Path, text: str, reward: str = REWARD, num_cores: int = 64) -> list[str]:
    return check_config(load_config(write(folder, text, reward)), num_cores)


def refusal(folder: Path, text: str, reward: str = REWARD) -> str:
    config = load_config(write(folder, text, reward))
    with pytest.raises(ConfigError) as caught:
        check_config(config, 64)
    return str(caught.value)


def test_the_defaults_are_right_without_a_word(folder):
    assert warnings(folder, "") == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rollout.group_size = 1", "`rollout.group_size` is 1: grpo compares a group's members"),
        ("environment.max_trajectory_tokens = 1024", "is 1024, not above `data.max_prompt_tokens` = 1024"),
        (
            "environment.max_trajectory_tokens = 70000",
            "the longest trajectory has 70000 tokens (`environment.max_trajectory_tokens`) and must fit",
        ),
        (
            "rollout.group_size = 2\nrollout.min_group_size = 3",
            "`rollout.min_group_size` is 3, above `rollout.group_size` = 2",
        ),
        (
            "rollout.over_provision = 1.5\nstaleness.max_staleness = 0",
            "`rollout.over_provision` is 1.5 with `staleness.max_staleness` = 0",
        ),
        (
            "trainer.mini_batches = 7\ntrainer.prompts_per_step = 6",
            "`trainer.mini_batches` is 7, above `trainer.prompts_per_step` = 6",
        ),
        (
            "trainer.max_tokens_per_micro_batch = 1535",
            "`trainer.max_tokens_per_micro_batch` is 1535: the longest trajectory has 1536",
        ),
        (
            "rollout.engine.max_cached_tokens = 1535",
            "`rollout.engine.max_cached_tokens` is 1535: the longest trajectory has 1536",
        ),
        (
            'trainer.correction.weight = "token_tis"',
            '`trainer.correction.weight` is "token_tis", but the loss takes its ratio to the rollout log-probs, which is',
        ),
        (
            'trainer.algorithm.kind = "decoupled_ppo"',
            '`trainer.correction.weight` is "none", but the loss takes its ratio to the proximal log-probs',
        ),
        (
            'trainer.algorithm.kind = "decoupled_ppo"\n'
            'trainer.correction = {weight = "icepop", weight_min = 1.5, weight_max = 0.5}',
            "2 settings cannot work:",
        ),
        (
            'trainer.algorithm.options = {kl_coef = 0.1, kl_estimator = "k1", kl_gradient = "estimator"}',
            "its expected gradient is 0, so it is only noise",
        ),
        ('model.reference = "policy"', "`trainer.algorithm.options.kl_coef` is 0: nothing asks for it"),
        (
            'model.reference = "absent_folder/"\ntrainer.algorithm.options.kl_coef = 0.1',
            '`model.reference` is "absent_folder/": nothing of that name',
        ),
        ('model.critic = "policy"', "but grpo has no critic: remove it"),
        ('trainer.algorithm.kind = "rloo"\nrollout.group_size = 1', "rloo compares a group's members"),
        (
            'trainer.algorithm = {kind = "gspo", options = {dual_clip = 3.0, surrogate = "weighted_logprob"}}',
            "dual_clip = 3.0",
        ),
        (
            'trainer.algorithm = {kind = "reinforce_plus_plus", options = {std = "sample"}}',
            'std = "sample" with baseline = "none"',
        ),
        ("rollout.sampling.top_p = 0.9", "`rollout.sampling.top_p` is 0.9: grpo needs the exact log-probs"),
        ("rollout.sampling.top_k = 50", "`rollout.sampling.top_k` is 50: grpo needs the exact log-probs"),
        ("rollout.engine.tensor_parallel_size = 2", "the torch engine does not split a model"),
        (
            "trainer.num_ranks = 3\ntrainer.sequence_parallel_size = 2",
            "`trainer.sequence_parallel_size` is 2, which does not divide `trainer.num_ranks` = 3",
        ),
        ("trainer.deepspeed.offload_optimizer = true", "set the stage to 1, 2 or 3, or the former to false"),
        ('rollout.engine.kind = "sglan"', "`rollout.engine.kind` is 'sglan': did you mean sglang?"),
        ('rollout.engine.kind = "my:Engine"', "`rollout.engine.kind` is 'my:Engine': there is no module my"),
        ('rollout.engine.kind = "math:floor"', "'math:floor': that is no EngineKind"),
        ('experience.sampler = "lifo"', "`experience.sampler` is 'lifo': did you mean fifo?"),
        (
            'experience.redis_url = "localhost:6379"',
            '`experience.redis_url` is "localhost:6379": write a URL that starts with redis://',
        ),
        ('environment.kind = "single_tern"', "`environment.kind` is 'single_tern': did you mean single_turn?"),
        ('trainer.algorithm.kind = "gpro"', "`trainer.algorithm.kind` is 'gpro': did you mean gspo or grpo?"),
        (
            "trainer.algorithm.options.clip_lo = 0.1",
            "unknown key `trainer.algorithm.options.clip_lo`: did you mean clip_low",
        ),
        ('trainer.algorithm.options.clip_low = "0.1"', "`trainer.algorithm.options.clip_low` is '0.1'"),
        ("environment.options.turns = 3", "`environment.options` has turns, but this kind takes no options"),
        (
            'eval.path = "held_out.jsonl"',
            '`eval.path` is "held_out.jsonl": nothing of that name lies beside the config file',
        ),
    ],
)
def test_what_cannot_work_is_refused_with_value_and_remedy(folder, text, sentence):
    assert sentence in refusal(folder, text)


@pytest.mark.parametrize(
    "text",
    [
        'trainer.algorithm.kind = "decoupled_ppo"\ntrainer.correction.weight = "token_tis"',
        "trainer.correction.geometric_max = 1.01",
        'trainer.algorithm.kind = "reinforce_plus_plus"\nrollout = {group_size = 1, min_group_size = 1}',
        'trainer.algorithm.options.kl_coef = 0.01\nmodel.reference = "policy"',
        "trainer.epochs = 2",
        'trainer.algorithm.kind = "ppo"\nmodel.critic = "policy"\nrollout = {group_size = 1, min_group_size = 1}',
        'trainer.algorithm = {kind = "safe_rlhf", options = {cost = "harm"}}\n'
        '[[rewards]]\nkind = "exact_match"\nname = "harm"\nweight = 0.0',
        *(
            f'trainer.algorithm.kind = "{kind}"'
            for kind in load_attribute("trainer.algorithms:ALGORITHMS")
            if kind not in ("decoupled_ppo", "safe_rlhf")
        ),
    ],
)
def test_unbiased_combinations_pass_without_a_word(folder, text):
    assert warnings(folder, text) == []


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("", "`rewards` is empty"),
        ('[[rewards]]\nkind = "exact"', "`rewards[0].kind` is 'exact': did you mean exact_match?"),
        ('[[rewards]]\nkind = "regex"', "`rewards[0].options.pattern` is missing: "),
        ('environment.kind = "tools"', "`environment.options.tools` is missing: What may be called: `calculate`"),
        (
            '[[rewards]]\nkind = "regex"\noptions = {patern = "a"}',
            "unknown key `rewards[0].options.patern`: did you mean pattern",
        ),
        (REWARD + REWARD, '`rewards` has 2 terms called "exact_match"'),
        ('[[rewards]]\nkind = "absent_module:Attr"', "there is no module absent_module"),
        ('[[rewards]]\nkind = "relative_length"\n[eval]\npath = "data.jsonl"', "every reward compares siblings"),
        (
            REWARD + '[[rewards]]\nkind = "relative_length"\n[trainer.algorithm]\nkind = "remax"',
            "greedy answer, whose reward must not hang on the others (biased)",
        ),
    ],
)
def test_wrong_rewards_are_refused(folder, reward, sentence):
    assert sentence in refusal(folder, "", reward)


def test_bytes_reserved_by_a_group_are_those_of_its_longest_answers(folder):
    config = load_config(write(folder, "rollout.group_size = 4\nrollout.max_new_tokens = 100\ndata.max_prompt_tokens = 28"))
    assert bytes_per_group(config) == 4 * (28 + 100) * 8 + 4 * 2048 == 12_288


def test_a_buffer_below_one_step_of_groups_is_refused_naming_what_is_needed(folder):
    sizes = (
        "rollout.group_size = 4\nrollout.max_new_tokens = 100\ndata.max_prompt_tokens = 28\ntrainer.prompts_per_step = 6\n"
    )
    assert "it must be at least 73728" in refusal(folder, sizes + "experience.max_bytes = 73727")
    assert warnings(folder, sizes + "experience.max_bytes = 73728\nstaleness.max_staleness = 0") == []


@pytest.mark.parametrize("num_ranks", [1, 4, 5])
def test_twenty_four_trajectories_are_accepted_on_any_number_of_ranks(folder, num_ranks):
    assert warnings(folder, f"trainer.prompts_per_step = 6\nrollout.group_size = 4\ntrainer.num_ranks = {num_ranks}") == []


def test_staleness_zero_is_accepted(folder):
    assert warnings(folder, "staleness.max_staleness = 0") == []


def test_a_row_longer_than_a_rank_holds_is_accepted_if_ranks_share_it(folder):
    text = (
        "trainer.max_tokens_per_micro_batch = 1000\nrollout.max_new_tokens = 500\nrollout.engine.max_cached_tokens = 4000\n"
    )
    assert "`trainer.max_tokens_per_micro_batch` is 1000" in refusal(folder, text)
    assert warnings(folder, text + "trainer.num_ranks = 2\ntrainer.sequence_parallel_size = 2") == []


@pytest.mark.parametrize(
    ("text", "reward", "sentence"),
    [
        ('experience.sampler = "os:sep"', REWARD, "`experience.sampler` is 'os:sep': that is '/', not a class or function"),
        ('environment.kind = "os:sep"', REWARD, "`environment.kind` is 'os:sep': that is '/'"),
        ('environment.kind = "collections:OrderedDict"', REWARD, "a class without `reset`"),
        ('trainer.algorithm.kind = "os:sep"', REWARD, "`trainer.algorithm.kind` is 'os:sep': that is '/'"),
        (
            'trainer.algorithm.kind = "collections:OrderedDict"',
            REWARD,
            "a class without `advantages`; see trainer/README.md",
        ),
        ("", '[[rewards]]\nkind = "os:sep"', "`rewards[0].kind` is 'os:sep': that is '/'"),
        ("", '[[rewards]]\nkind = "laminar.types:Prompt"', "a class without `score` or `score_batch` or `score_group`"),
        ('relay.transport = "nope.nope:X"', REWARD, "`relay.transport` is 'nope.nope:X': there is no module nope"),
        ('relay.transport = "os:sep"', REWARD, "`relay.transport` is 'os:sep': that is '/'"),
    ],
)
def test_an_implementation_of_the_wrong_shape_is_refused(folder, text, reward, sentence):
    assert sentence in refusal(folder, text, reward)


def test_environments_that_are_not_stepped_are_no_fault(folder):
    text = 'environment = {kind = "agent", options = {command = ["true"]}}'
    assert warnings(folder, text) == []


def test_terms_of_two_modules_with_one_name_are_refused_as_the_run_would_call_them(folder):
    (folder / "one_term.py").write_text("def score(prompt, completion):\n    return 0.0\n")
    (folder / "another_term.py").write_text("def score(prompt, completion):\n    return 0.0\n")
    rewards = '[[rewards]]\nkind = "one_term:score"\n[[rewards]]\nkind = "another_term:score"\n'
    assert '`rewards` has 2 terms called "score"' in refusal(folder, "", rewards)
    assert warnings(folder, "", rewards + 'name = "another"') == []


def test_lengths_and_splits_are_held_against_the_models_own_config(folder):
    (folder / "policy" / "config.json").write_text('{"max_position_embeddings": 128, "num_attention_heads": 4}')
    held_out = 'rollout.max_new_tokens = 8\neval.path = "rows.jsonl"\neval.max_new_tokens = 128'
    assert "`rollout.max_new_tokens` is 512, but the model has 128 positions" in refusal(folder, "")
    assert "`eval.max_new_tokens` is 128, but the model has 128 positions" in refusal(folder, held_out)
    split = "rollout.max_new_tokens = 127\ntrainer.num_ranks = 3\ntrainer.sequence_parallel_size = 3"
    assert "does not divide the model's 4 attention heads" in refusal(folder, split)
    assert warnings(folder, "rollout.max_new_tokens = 127") == []
    assert warnings(folder, 'rollout.engine.kind = "sglang"') == []


@pytest.mark.parametrize("setting", ["trainer.num_gpus_per_rank", "rollout.engine.num_gpus"])
def test_more_than_one_gpu_comes_whole(folder, setting):
    assert f"`{setting}` is 1.5: above 1 only whole GPUs can be set aside; use 1 or 2" in refusal(folder, f"{setting} = 1.5")
    assert warnings(folder, f"{setting} = 2.0") == warnings(folder, f"{setting} = 0.5") == []


def test_a_window_of_spikes_in_which_nothing_would_be_judged_is_refused(folder):
    text = 'trainer.spikes = {action = "stop", window_updates = 8}'
    assert "below `trainer.spikes.min_updates` = 16: nothing would ever be judged" in refusal(folder, text)
    assert warnings(folder, "trainer.spikes.window_updates = 8") == []


def test_an_evaluation_that_is_off_demands_nothing(folder):
    assert warnings(folder, "eval.samples_per_prompt = 4") == []
    assert "`eval.samples_per_prompt` is 4" in refusal(folder, 'eval = {path = "rows.jsonl", samples_per_prompt = 4}')


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("torch", "max_prefill_tokens = 512", "did you mean max-prefill-tokens?"),
        ("torch", "max-running = 3", "unknown key `rollout.engine.options.max-running`"),
        ("torch", "max_running = 3", "it belongs at `rollout.engine.max_running`"),
        ("torch", "port = 3", "`rollout.engine.options.port`: the options are max-prefill-tokens, batch-invariant"),
        ("emulated", "lifeline = false", "unknown key `rollout.engine.options.lifeline`"),
        ("emulated", "time-factor = 0", "`rollout.engine.options.time-factor` is 0"),
        ("emulated", 'latency = "33B_TP4"', "latency is '33B_TP4', which is not known; choose one of"),
        ("emulated", 'lengths = "33B_math"', "lengths is '33B_math', which is not known; choose one of"),
    ],
)
def test_our_engines_refuse_flags_that_they_do_not_take(folder, kind, options, sentence):
    assert sentence in refusal(folder, f'rollout.engine = {{kind = "{kind}", options = {{{options}}}}}')


def test_lora_without_its_package_is_refused(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "`trainer.lora.rank` is 8, but peft is not installed" in refusal(folder, "trainer.lora.rank = 8")


@pytest.mark.parametrize(
    ("text", "reward", "sentence"),
    [
        (
            "",
            '[[rewards]]\nkind = "code_tests"\noptions = {limits = {cpu_second = 3}}',
            "`rewards[0].options.limits.cpu_second`: did you mean cpu_seconds or wall_seconds?",
        ),
        (
            'environment = {kind = "tools", options = {tools = ["calculate", {kind = "python", optoins = {}}]}}',
            REWARD,
            "unknown key `environment.options.tools[1].optoins`: did you mean options? the options are kind, options",
        ),
        (
            'environment.kind = "tools"\n'
            'environment.options.tools = [{kind = "python", options = {limits = {wall_secnds = 3}}}]',
            REWARD,
            "unknown key `environment.options.tools[0].options.limits.wall_secnds`: did you mean wall_seconds",
        ),
        ("trainer.algorithm.options.learning_rate = 1e-5", REWARD, "it belongs at `trainer.learning_rate`"),
    ],
)
def test_a_misspelt_key_is_hinted_at_however_deep_it_lies(folder, text, reward, sentence):
    told = refusal(folder, text, reward)
    assert sentence in told
    assert "valid string" not in told


def test_ranks_that_share_rows_are_not_idle(folder):
    text = "rollout.group_size = 2\ntrainer.prompts_per_step = 1\ntrainer.num_ranks = 4\n"
    assert "leaves 2 of them idle" in str(warnings(folder, text))
    assert "idle" not in str(warnings(folder, text + "trainer.sequence_parallel_size = 2"))
    assert "leaves 4 of them idle" in str(warnings(folder, text.replace("4", "12") + "trainer.sequence_parallel_size = 4"))


def test_secrets_are_starred_in_what_is_said_of_them(folder):
    assert "secret" not in refusal(folder, 'experience.redis_url = "http://u:secret@h"')
    assert '`experience.redis_url` is "***"' in refusal(folder, 'experience.redis_url = "http://u:secret@[x"')
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, 'alerts.webhook = "hooks.slack.com/services/secret"'))
    assert '`alerts.webhook` is "***"' in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h:notaport", "a port is a number from 1 to 65535"),
        ("redis://h:65536", "a port is a number from 1 to 65535"),
        ("redis://h:0", "nobody answers at port 0"),
        ("redis://a host", "a blank"),
        ("redis://h?nonsense=1", "nonsense"),
        ("redis://h?socket_timeout=soon", "socket_timeout"),
        ("rediss://h?ssl_cert_reqs=maybe", "maybe"),
        ("unix://", "starts with redis://, rediss:// or unix://"),
        ("tcp://h", "starts with redis://, rediss:// or unix://"),
        ("embeded", "starts with redis://, rediss:// or unix://"),
    ],
)
def test_an_address_of_the_data_module_that_cannot_be_used_is_refused(folder, url, words):
    sentence = refusal(folder, f'experience.redis_url = "{url}"')
    assert f'`experience.redis_url` is "{url}": ' in sentence
    assert words in sentence


@pytest.mark.parametrize("url", ["embedded", "redis://h", "redis://u:p@h:6380/2", "rediss://[::1]:1", "unix:///tmp/s?db=1"])
def test_an_address_of_the_data_module_that_can_be_used_passes(folder, url):
    assert warnings(folder, f'experience.redis_url = "{url}"') == []


@pytest.mark.parametrize("address", ["", "nowhere", "h:99999", "h:port", "ray://h", "ray://h:0", "a b:1"])
def test_an_address_that_is_no_ray_cluster_is_refused(folder, address):
    assert f'`cluster.ray_address` is "{address}": write' in refusal(folder, f'cluster.ray_address = "{address}"')


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "ray://head:10001"])
def test_an_address_of_a_ray_cluster_passes(folder, address):
    assert warnings(folder, f'cluster.ray_address = "{address}"') == []


def test_a_webhook_that_nobody_answers_at_is_refused_without_being_shown(folder):
    sentence = refusal(folder, 'alerts.webhook = "https://hooks.example:port/secret"')
    assert "`alerts.webhook`: its host and port cannot be read" in sentence
    assert "secret" not in sentence


@pytest.mark.parametrize("setting", ["run.directory", "relay.root"])
def test_a_file_where_a_folder_belongs_is_refused(folder, setting):
    file = folder / "rows.jsonl"
    assert f'`{setting}` is "{file}": that is a file; give a folder' in refusal(folder, f'{setting} = "{file}"')


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ('"calculate", "search2:calculate"', "tools 0 and 1 are both called 'calculate'"),
        ('"calculate", "calculate"', "tools 0 and 1 are both called 'calculate'"),
        ('"python", "calculate", { kind = "python" }', "tools 0 and 2 are both called 'python'"),
        ('{ kind = "search", options = { path = "none.jsonl" } }', "there is no file of that name"),
        ('{ kind = "search", options = { path = "/" } }', "there is no file of that name"),
        ('{ kind = "mcp", options = { url = "http://h:port" } }', "a port is a number from 1 to 65535"),
    ],
)
def test_tools_that_no_episode_could_open_are_refused(folder, tools, words):
    (folder / "search2.py").write_text('def calculate(x: int) -> int:\n    """Twice."""\n    return 2 * x\n')
    text = refusal(folder, f'environment = {{ kind = "tools", options = {{ tools = [{tools}] }} }}')
    assert words in text


def test_a_game_that_its_package_does_not_know_is_refused(folder):
    options = '{ id = "FrozenLake-v99", actions = ["left", "down", "right", "up"] }'
    text = refusal(folder, f'environment = {{ kind = "gymnasium", options = {options} }}', "")
    assert "`environment.options.id` is 'FrozenLake-v99'" in text


@pytest.mark.parametrize("name", ["FrozenLake-v1", "FrozenLake", "my_games:Anything-v0"])
def test_a_game_that_its_package_would_make_is_right(folder, name):
    """A name without a version is its newest; what a module of the user's registers is known to nobody yet."""
    options = f'{{ id = "{name}", actions = ["left", "down", "right", "up"] }}'
    assert warnings(folder, f'environment = {{ kind = "gymnasium", options = {options} }}', "") == []


def test_two_servers_of_tools_are_no_fault_before_they_are_asked(folder):
    tools = '{ kind = "mcp", options = { url = "http://a" } }, { kind = "mcp", options = { url = "http://b" } }'
    assert warnings(folder, f'environment = {{ kind = "tools", options = {{ tools = [{tools}] }} }}') == []


@pytest.mark.parametrize("url", ["judge:8000/v1", "ftp://judge", "http://", "http://judge:eight"])
def test_a_judge_at_an_address_of_no_web_service_is_refused(folder, url):
    reward = f'[[rewards]]\nkind = "judge"\noptions = {{ url = "{url}", model = "m" }}'
    assert f"`rewards[0].options.url` is '{url}'" in refusal(folder, "", reward)


def test_a_term_that_siblings_are_compared_by_must_be_a_reward(folder):
    reward = REWARD + '[[rewards]]\nkind = "relative_length"\noptions.right_term = "solved"'
    assert (
        '`rewards[1].options.right_term` is "solved", but the terms are exact_match, relative_length: name one'
        in refusal(folder, "", reward)
    )


def test_variables_and_programs_that_are_not_here_are_noted(folder, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = '[[rewards]]\nkind = "judge"\noptions = { url = "http://j", model = "m", api_key_variable = "JUDGE_KEY" }'
    agent = 'environment = { kind = "agent", options = { command = ["no-such-agent", "-x"] } }'
    notes = warnings(folder, agent, judge)
    assert any("`rewards[0].options.api_key_variable` is 'JUDGE_KEY', not set here" in note for note in notes)
    assert any("`environment.options.command` begins with 'no-such-agent', not here" in note for note in notes)
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert not any("JUDGE_KEY" in note for note in warnings(folder, agent, judge))


@pytest.mark.parametrize(
    ("correction", "is_refused"), [('weight = "token_tis"', True), ("max_k3 = 0.1", True), ('weight = "none"', False)]
)
def test_a_filter_is_refused_to_ones_own_algorithm_where_a_correction_needs_exact_logprobs(folder, correction, is_refused):
    (folder / "my_check_algorithm.py").write_text(
        "class Plain:\n"
        "    needs = frozenset({'proximal_logprobs'})\n"
        "    def __init__(self, options): pass\n"
        "    def advantages(self, groups): return {}\n"
        "    def policy_loss(self, batch): raise NotImplementedError\n"
    )
    text = 'trainer.algorithm.kind = "my_check_algorithm:Plain"\nrollout.sampling = {top_p = 0.9, top_k = 5}\n'
    file = write(folder, f"{text}trainer.correction = {{{correction}}}")
    try:
        check_config(load_config(file), 64)
        faults = ""
    except ConfigError as error:
        faults = str(error)
    for fault in ("`rollout.sampling.top_p` is 0.9", "`rollout.sampling.top_k` is 5"):
        assert (f"{fault}: `trainer.correction` needs the exact log-probs" in faults) is is_refused


def test_all_faults_are_told_at_once(folder):
    text = refusal(folder, "rollout.group_size = 1\nrollout.sampling.top_p = 0.5\nrollout.sampling.top_k = 3")
    assert text.startswith("3 settings cannot work:")
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer.num_threads = 40\nrollout.engine.num_threads = 30", "are 70 busy threads on 64 cores"),
        (
            "rollout.max_in_flight_groups = 15",
            "1 workers play 15 groups at once, fewer than the 16 that the staleness bound",
        ),
        (
            "experience.max_bytes = 1000000",
            "`experience.max_bytes` holds 8 groups of the 16 that the staleness bound admits",
        ),
        ('staleness = {max_staleness = "unbounded", policy = "drop"}', "no group is ever due"),
        ('staleness = {max_staleness = "unbounded", policy = "mask"}', "no token over age"),
        ("run.no_progress_seconds = 600", "the run may stop while the trainer still waits"),
        ("trainer.num_ranks = 9\nrollout.group_size = 2\ntrainer.prompts_per_step = 4", "leaves 1 of them idle"),
        ("environment.wall_seconds = 10", "`rewards[0].timeout_seconds` is 30: the episode ends after"),
        (
            'environment.wall_seconds = 35\nrewards = [{kind = "code_tests"}]',
            "`rewards[0].options.limits.wall_seconds` is 10: one program and `timeout_seconds` = 30 are longer than",
        ),
        (
            'rewards = [{kind = "math_verify", timeout_seconds = 5}]',
            "`rewards[0].options.max_seconds` is 5, not below `rewards[0].timeout_seconds` = 5",
        ),
    ],
)
def test_what_may_surprise_is_warned_of(folder, text, sentence):
    if "prompts_per_step" not in text:
        text += "\ntrainer.prompts_per_step = 8"
    reward = "" if "rewards = " in text else REWARD
    assert any(sentence in warning for warning in warnings(folder, text, reward))


def test_a_users_own_reward_beside_the_config_is_found_and_its_options_checked(folder):
    (folder / "my_check_rewards.py").write_text(
        "from laminar.config.section import Section\n\n\nclass Short:\n    class Options(Section):\n        limit: int\n"
        "\n    def score(self, context):\n        return 0.0\n"
    )
    reward = '[[rewards]]\nkind = "my_check_rewards:Short"\noptions = {limit = %s}'
    assert warnings(folder, "", reward % 3) == []
    assert "`rewards[0].options.limit`" in refusal(folder, "", reward % '"3"')


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("openai/gsm8k", True),
        ("openai/gsm8k:main", True),
        ("models/demo", False),
        ("./somewhere/demo", False),
        ("/somewhere/demo", False),
        ("a/b/c", False),
        ("org/rows.jsonl", False),
        ("gpt2", False),
        ("../x", False),
    ],
)
def test_only_owner_slash_name_counts_as_a_name_on_the_hub(name, expected):
    assert is_hub_name(name) is expected


def test_hub_names_are_accepted_with_a_note_and_missing_folders_are_not(folder):
    hub = load_config(write(folder, ""), ["model.path=Qwen/Qwen2.5-0.5B"])
    assert "taken for a name on the Hugging Face hub" in check_config(hub, 64)[0]
    missing = load_config(write(folder, ""), ["model.path=models/absent"])
    with pytest.raises(ConfigError, match=r'`model.path` is "models/absent": nothing of that name'):
        check_config(missing, 64)


@pytest.mark.parametrize("setting", ["model.path", "data.path", "eval.path", "model.tokenizer"])
@pytest.mark.parametrize("text", ["a" * 300, "~nosuchuser/x"])
def test_a_path_that_no_system_takes_is_refused_like_an_absent_one(folder, setting, text):
    with pytest.raises(ConfigError, match=f'`{setting}` is "{text}": nothing of that name'):
        check_config(load_config(write(folder, ""), [f"{setting}={text}"]), 64)


def test_the_engines_interpreter_is_looked_for_on_the_path(folder):
    absent = "`rollout.engine.python` is"
    python = Path(sys.executable)
    assert warnings(folder, f'rollout.engine.python = "{python}"') == []
    assert warnings(folder, 'rollout.engine.python = "sh"') == []
    assert absent in warnings(folder, 'rollout.engine.python = "no-such-python"')[0]
    assert absent in warnings(folder, f'rollout.engine.python = "{folder}"')[0]


def test_a_folder_without_config_json_is_no_model(folder):
    (folder / "policy" / "config.json").unlink()
    assert "the folder holds no config.json" in refusal(folder, "")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_for_gpus_pass_on_a_machine_without_any(recipe, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    notes = check_config(load_config(recipe), 4096)
    # The simulator's recipes give a replica its even share of the batches, on purpose.
    assert all("not here" in note or "`rollout.max_in_flight_groups` lets" in note for note in notes)


def test_checking_and_explaining_need_no_heavy_library(folder):
    file = write(folder, "")
    code = (
        "import sys; from pathlib import Path; from laminar.cli.check import check; import laminar.config.explain;"
        "check(Path(sys.argv[1]), []);"
        "assert not {'torch', 'transformers', 'deepspeed', 'ray', 'datasets'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_says_what_is_right(folder, capsys):
    check(write(folder, ""), ["model.path=Qwen/Qwen2.5-0.5B"])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{folder / 'run.toml'}: right, with ")


def test_a_target_of_adapters_that_the_model_has_not_is_told_with_what_it_has(folder):
    """Names as a model's file has them; a target is a name or the end of one, at a dot."""
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"]
    header = json.dumps({n: {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]} for n in names}).encode()
    (folder / "policy" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    lora = '[trainer.lora]\nrank = 2\ntargets = ["q_proj", "self_attn.q_proj", "n_proj", "up_proj"]'
    told = [warning for warning in warnings(folder, lora) if "trainer.lora.targets" in warning]
    assert [text.partition(",")[0] for text in told] == [f'`trainer.lora.targets` has "{n}"' for n in ("n_proj", "up_proj")]
    assert told[0].endswith("they end in down_proj, lm_head, q_proj")
