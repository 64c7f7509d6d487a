"""ReMax: advantages against the greedy answer, which is played and never trained."""

from dataclasses import replace

import numpy as np
import pytest

from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.config.root import LaminarConfig
from laminar.config.sizes import bytes_per_group, members_per_group
from laminar.errors import ConfigError
from laminar.types import Purpose
from trainer.algorithms.advantages import greedy_advantages
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import RemaxOptions
from trainer.batch_metrics import batch_metrics
from trainer.batches import Layout
from trainer.plan import plan_step


@pytest.fixture
def make_group(trajectory_maker):
    """A group of members with these rewards and a greedy answer with that one; None: failed."""

    def make(rewards, greedy, group_id="g"):
        purposes = [Purpose.TRAIN] * len(rewards) + [Purpose.GREEDY_BASELINE]
        return tuple(
            trajectory_maker.break_down(group_id, member)
            if reward is None
            else replace(trajectory_maker.play(group_id, member, "0.0", reward=reward), purpose=purpose)
            for member, (reward, purpose) in enumerate(zip([*rewards, greedy], purposes, strict=True))
        )

    return make


def test_rewards_are_compared_with_the_greedy_answer_of_their_own_group_in_input_order():
    rewards = [1.0, 5.0, 3.0, None, 2.0, 4.0]
    values, good = greedy_advantages(rewards, list("ABABAB"), [False, False, True, False, False, True])
    assert values.tolist() == [-2.0, 1.0, 0.0, 0.0, -1.0, 0.0]
    assert good.tolist() == [True, True, False, False, True, False]


def test_advantages_are_those_of_a_plain_loop_in_float64():
    random = np.random.default_rng(0)
    groups = [f"g{number}" for number in random.integers(0, 7, 60)]
    rewards = random.normal(1e6, 1.0, 60).tolist()
    first = {group: groups.index(group) for group in groups}
    greedy = [first[group] == place for place, group in enumerate(groups)]
    values, good = greedy_advantages(rewards, groups, greedy)
    for place, group in enumerate(groups):
        expected = 0.0 if greedy[place] else rewards[place] - rewards[first[group]]
        assert values[place] == expected
        assert good[place] == (not greedy[place])


def test_a_group_whose_greedy_answer_failed_teaches_nothing_and_is_not_kept(make_group):
    algorithm = PolicyGradient(RemaxOptions())
    group = make_group([1.0, 0.0], None)
    assert algorithm.advantages([group]) == {"g-000": 0.0, "g-001": 0.0}
    assert not algorithm.keeps(group)
    assert not PolicyGradient(RemaxOptions(filter_zero_variance=False)).keeps(group)


def test_a_group_is_kept_if_any_answer_differs_from_the_greedy_one(make_group):
    algorithm = PolicyGradient(RemaxOptions())
    assert algorithm.keeps(make_group([1.0, 1.0], 0.0))
    assert algorithm.keeps(make_group([0.0, 1.0], 0.0))
    assert not algorithm.keeps(make_group([1.0, 1.0], 1.0))


def test_the_greedy_answer_gets_no_row_and_is_in_no_mean(make_group):
    group = make_group([1.0, 0.0], 0.25)
    plan = plan_step(
        [group], PolicyGradient(RemaxOptions()), mini_batches=1, max_tokens=100, num_ranks=1, layout=Layout.SHARED
    )
    assert [(row.trajectory_id, row.advantage) for row in plan.rows] == [("g-000", 0.75), ("g-001", -0.25)]
    assert plan.mini_batches[0].denominator == 2
    metrics = batch_metrics([group], trained_on=0)
    assert (metrics["reward/mean"], metrics["reward/greedy_mean"]) == (0.5, 0.25)
    assert metrics["rollout/response_tokens_sum"] == 6


def test_one_attempt_a_prompt_is_enough(make_group):
    assert PolicyGradient(RemaxOptions()).advantages([make_group([0.0], 1.0)]) == {"g-000": -1.0}


def test_a_group_has_one_member_more_in_the_data_module():
    def sizes(kind):
        config = LaminarConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "rollout": {"group_size": 4},
                "trainer": {"algorithm": {"kind": kind}},
            }
        )
        return members_per_group(config), bytes_per_group(config)

    (members, num_bytes), (plain_members, plain_bytes) = sizes("remax"), sizes("grpo")
    assert (members, plain_members) == (5, 4)
    assert num_bytes * 4 == plain_bytes * 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('trainer.algorithm.kind = "safe_rlhf"', 'add a [[rewards]] table with name = "cost" and weight = 0'),
        (
            'trainer.algorithm = {kind = "safe_rlhf", options = {cost = "exact_match"}}',
            "subtracts it by a weight of its own: set its `weight` to 0",
        ),
        ('trainer.algorithm = {kind = "remax", options = {std = "sample"}}', 'set std = "none"'),
        ('trainer.algorithm.kind = "remax"\nrollout = {group_size = 1, min_group_size = 1}', None),
        ('trainer.algorithm.kind = "remax"\nrollout.group_size = 1', None),
    ],
)
def test_check_judges_baseline_and_cost(tmp_path, text, words):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    head = 'model.path = "policy"\nstaleness.max_staleness = "unbounded"\ndata.path = "rows.jsonl"\n'
    (tmp_path / "run.toml").write_text(head + 'rewards = [{kind = "exact_match"}]\n' + text)
    config = load_config(tmp_path / "run.toml")
    if words is None:
        check_config(config, num_cores=64)
        return
    with pytest.raises(ConfigError) as caught:
        check_config(config, num_cores=64)
    assert words in str(caught.value)
