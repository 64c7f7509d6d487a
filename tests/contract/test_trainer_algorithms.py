"""Every algorithm, KL term and correction through the real step: the update of a plain float64 loop, whatever the split."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.plugins import resolve, validate_options
from laminar.telemetry.registry import check_declared
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer import checkpoint
from trainer.algorithms import ALGORITHM_OPTIONS
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.session import build_algorithm
from trainer.step import train_step

pytestmark = pytest.mark.heavy

TEMPERATURE, LEARNING_RATE, MAX_NORM = 0.8, 0.5, 0.7


def make_groups(num_groups=2):
    """Groups of 3 with answers of unlike lengths, a tool's answer in the middle of some; trajectory 1-2 has two chains."""
    random = np.random.default_rng(5)
    groups = []
    for group in range(num_groups):
        prompt, members = given(random.integers(1, 40, 3 + group)), []
        for member in range(3):
            chains = []
            for _ in range(2 if (group, member) == (1, 2) else 1):
                segments = [prompt]
                for length in [2, 3] if member == 1 else [1 + int(random.integers(0, 6))]:
                    logprobs = random.normal(-3.7, 0.25, length)
                    segments.append(sampled(random.integers(1, 40, length), logprobs, WeightVersion(0, 0)))
                    segments.append(given(random.integers(1, 40, 2)))
                chains.append(Chain(tuple(segments)))
            sampling, reward = SamplingParameters(TEMPERATURE, 8, 0), [0.0, 1.0, 3.0][(group + member) % 3]
            name = f"{group}-{member}"
            members.append(
                Trajectory(
                    name, str(group), "p", member, 1, Purpose.TRAIN, sampling, tuple(chains), FinishReason.STOP, reward
                )
            )
        groups.append(tuple(members))
    return groups


def save_model(path, seed, vocab_size=41):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(**config, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy, and another model as reference."""
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in (0, 1)]


CASES = {
    "dr_grpo": ("dr_grpo", {}, {}),
    "dapo, overlong": ("dapo", {"overlong_buffer_tokens": 6}, {}),
    "rloo, dual clip": ("rloo", {"dual_clip": 1.2}, {}),
    "gspo": ("gspo", {"clip_low": 0.02, "clip_high": 0.03}, {}),
    "cispo, fixed denominator": ("cispo", {"aggregation": "fixed_denominator", "fixed_tokens": 7}, {}),
    "aipo, sequence mean": ("aipo", {"aggregation": "sequence_mean", "clip_high": 0.1}, {}),
    "kl in loss and entropy": ("grpo", {"kl_coef": 0.3, "entropy_coef": 0.2}, {}),
    "k3 as it is": ("grpo", {"kl_coef": 0.3, "kl_gradient": "estimator"}, {}),
    "reinforce++, kl in reward": ("reinforce_plus_plus", {"kl_coef": 0.2}, {}),
    "reinforce++ baseline, k2": ("reinforce_plus_plus_baseline", {"kl_coef": 0.2, "kl_gradient": "estimator"}, {}),
    "ppo": ("ppo", {"kl_coef": 0.2, "gamma": 0.9, "gae_lambda": 0.8, "value_clip": 0.05}, {}),
    "decoupled, token tis": ("decoupled_ppo", {}, {"weight": "token_tis", "weight_max": 1.1}),
    "decoupled, sequence mis": ("decoupled_ppo", {}, {"weight": "sequence_mis", "weight_max": 1.5}),
    "decoupled, icepop": ("decoupled_ppo", {}, {"weight": "icepop", "weight_min": 0.8, "weight_max": 1.2}),
    "geometric mask": ("grpo", {"aggregation": "sequence_mean"}, {"geometric_max": 1.1, "geometric_min": 0.9}),
    "k3 mask": ("dr_grpo", {}, {"max_k3": 0.03}),
}
UPDATES = {"once": {}, "mini-batches and epochs": {"mini_batches": 2, "epochs": 2}}


def make_config(models, case, **trainer):
    kind, options, correction = CASES[case]
    settings = {
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": 1.0,
        "max_grad_norm": MAX_NORM,
        "critic_learning_rate": 2 * LEARNING_RATE,
        "algorithm": {"kind": kind, "options": options},
        "correction": correction,
    }
    return LaminarConfig.model_validate(
        {"model": {"path": models[0], "reference": models[1]}, "data": {"path": "-"}, "trainer": settings | trainer}
    )


# ---- the oracle: one row at a time, float64, nothing of ours


class Oracle:
    def __init__(self, models, case, updates):
        from transformers import AutoModelForCausalLM

        kind, options, correction = CASES[case]
        self.options = validate_options(resolve(kind, ALGORITHM_OPTIONS), options)
        self.correction = {"weight": "none", "weight_max": 2.0, "weight_min": 0.5} | correction
        self.mini_batches, self.epochs = updates.get("mini_batches", 1), updates.get("epochs", 1)
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(m).double() for m in models)
        self.critic = AutoModelForCausalLM.from_pretrained(models[0]).double().model if kind == "ppo" else None
        self.head = torch.nn.Linear(16, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def train(self):
        rows = [self.row(t, chain) for group in make_groups() for t in group for chain in t.chains]
        with torch.no_grad():
            for row in rows:
                row["proximal"], _ = self.score(self.policy, row)
                row["ref"], _ = self.score(self.reference, row)
                row["values"] = self.values(row) if self.critic else None
        self.drop_and_weigh(rows)
        self.give_advantages(rows)
        adam = self.adam(self.policy.parameters(), LEARNING_RATE)
        if self.critic:
            critic_adam = self.adam([*self.critic.parameters(), *self.head.parameters()], 2 * LEARNING_RATE)
        per_mini_batch = 2 // self.mini_batches
        numerators, denominators = [], []
        for update in range(self.mini_batches * self.epochs):
            first = update % self.mini_batches * per_mini_batch
            part = [r for r in rows if first <= int(r["group"]) < first + per_mini_batch and r["kept"]]
            numerator, denominator = self.loss(part)
            adam.zero_grad()
            (numerator / denominator).backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_NORM)
            adam.step()
            if self.critic:
                critic_adam.zero_grad()
                (sum(self.value_loss(row) for row in part) / sum(len(row["places"]) for row in part)).backward()
                torch.nn.utils.clip_grad_norm_([*self.critic.parameters(), *self.head.parameters()], MAX_NORM)
                critic_adam.step()
            numerators.append(numerator.item())
            denominators.append(denominator)
        named = dict(self.policy.named_parameters())
        if self.critic:
            named |= {f"critic.trunk_model.{name}": p for name, p in self.critic.named_parameters()}
            named |= {f"critic.head.{name}": p for name, p in self.head.named_parameters()}
        return named, sum(numerators) / sum(denominators)

    def adam(self, parameters, rate):
        return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), eps=1.0, weight_decay=0.0)

    def values(self, row):
        return self.head(self.critic(input_ids=row["ids"][None]).last_hidden_state[0, row["places"] - 1])[:, 0]

    def value_loss(self, row):
        values, start, clip = self.values(row), row["values"], self.options.value_clip
        held = start + (values - start).clamp(-clip, clip)
        return torch.maximum((values - row["returns"]) ** 2, (held - row["returns"]) ** 2).sum() / 2

    def row(self, trajectory, chain):
        o, length = self.options, trajectory.num_sampled_tokens
        over = (length - (8 - o.overlong_buffer_tokens)) / o.overlong_buffer_tokens if o.overlong_buffer_tokens else 0
        return {
            "name": trajectory.trajectory_id,
            "group": trajectory.group_id,
            "ids": torch.tensor(chain.token_ids(), dtype=torch.int64),
            "places": torch.tensor(np.flatnonzero(chain.mask())),
            "rollout": torch.tensor(chain.rollout_logprobs()[chain.mask()], dtype=torch.float64),
            "reward": trajectory.reward - min(1, max(0, over)),
        }

    def score(self, model, row):
        table = (model(input_ids=row["ids"][None]).logits[0] / TEMPERATURE).log_softmax(-1)[row["places"] - 1]
        return table.gather(1, row["ids"][row["places"]][:, None])[:, 0], -(table.exp() * table).sum(-1)

    def drop_and_weigh(self, rows):
        c = self.correction
        for row in rows:
            d = torch.cat([r["proximal"] - r["rollout"] for r in rows if r["name"] == row["name"]])
            geometric, k3 = d.mean().exp(), (d.exp() - 1 - d).mean()
            row["kept"] = bool(
                c.get("geometric_min", 0) <= geometric <= c.get("geometric_max", math.inf)
                and k3 <= c.get("max_k3", math.inf)
            )
            row["length"] = len(d)
            w = (row["proximal"] - row["rollout"]).exp()
            if c["weight"].startswith("sequence"):
                w = d.sum().exp().expand_as(w)
            if c["weight"].endswith("tis"):
                w = w.clamp(max=c["weight_max"])
            elif c["weight"] != "none":
                w = w * (w <= c["weight_max"])
                w = w * (w >= c["weight_min"]) if c["weight"] == "icepop" else w
            row["weight"] = torch.ones_like(w) if c["weight"] == "none" else w

    def give_advantages(self, rows):
        o = self.options
        for row in rows:
            group = {r["name"]: r["reward"] for r in rows if r["group"] == row["group"]}
            values = np.array(list(group.values()))
            others = [value for name, value in group.items() if name != row["name"]]
            baseline = {"group_mean": values.mean(), "leave_one_out": np.mean(others)}.get(o.baseline, 0.0)
            divisor = {"sample": values.std(ddof=1) + 1e-6, "population": values.std() + 1e-6, "none": 1.0}[o.std]
            row["advantage"] = torch.full_like(row["rollout"], (row["reward"] - baseline) / divisor)
            if self.critic:
                self.estimate(row)
            elif o.kl_in == "reward":
                k1 = row["proximal"] - row["ref"]
                row["advantage"] -= o.kl_coef * k1.flip(0).cumsum(0).flip(0)
        if o.whiten:
            everything = torch.cat([row["advantage"] for row in rows])
            for row in rows:
                row["advantage"] = (row["advantage"] - everything.mean()) / (everything.std(correction=0) + 1e-8)

    def estimate(self, row):
        """GAE by its definition: a discounted sum of temporal differences for each token."""
        o, v = self.options, torch.cat([row["values"], torch.zeros(1)])
        rewards = -o.kl_coef * (row["proximal"] - row["ref"])
        rewards[-1] += row["reward"]
        differences, n = rewards + o.gamma * v[1:] - v[:-1], len(rewards)
        decay = o.gamma * o.gae_lambda
        row["advantage"] = torch.stack([sum(decay**k * differences[t + k] for k in range(n - t)) for t in range(n)])
        row["returns"] = row["advantage"] + row["values"]

    def loss(self, rows):
        o, numerator = self.options, 0.0
        for row in rows:
            logprobs, entropy = self.score(self.policy, row)
            d = logprobs - (row["proximal"] if o.ratio_to == "proximal" else row["rollout"])
            ratio, a = (d.mean().expand_as(d) if o.ratio_level == "sequence" else d).exp(), row["advantage"]
            bounded = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
            if o.surrogate == "clipped":
                objective = torch.minimum(ratio * a, bounded * a)
                if o.dual_clip:
                    objective = torch.where(a < 0, torch.maximum(objective, o.dual_clip * a), objective)
            else:
                objective = bounded.detach() * a * logprobs
            tokens = -row["weight"] * objective - o.entropy_coef * entropy
            if o.kl_coef and o.kl_in == "loss":
                tokens = tokens + o.kl_coef * self.kl(logprobs, row)
            numerator = numerator + tokens.sum() / (row["length"] if o.aggregation == "sequence_mean" else 1)
        sequences = len({row["name"] for row in rows})
        return numerator, {
            "token_mean": sum(len(row["places"]) for row in rows),
            "fixed_denominator": sequences * (o.fixed_tokens or 0),
        }.get(o.aggregation, sequences)

    def kl(self, logprobs, row):
        d, o = logprobs - row["ref"], self.options
        value = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[o.kl_estimator]
        if o.kl_gradient == "estimator":
            return value
        passed = ((logprobs - row["rollout"]).exp() * d).detach() * logprobs
        return value.detach() + passed - passed.detach()


@pytest.fixture(scope="module")
def oracle(models):
    known = {}

    def train(case, updates):
        if (case, updates) not in known:
            known[case, updates] = Oracle(models, case, UPDATES[updates]).train()
        return known[case, updates]

    return train


def run_step(config, ranks):
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    return engine, train_step(engine, algorithm, make_groups(), 1)


SPLITS = {
    "small": {"max_tokens_per_micro_batch": 24},
    "whole": {},
    "unshared": {"max_tokens_per_micro_batch": 20, "share_prompts": False},
    "zero2": {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 2}},
}


def weights(engine):
    critic = {} if engine.critic is None else engine.critic.state_tensors()
    return dict(engine.state_tensors()) | {f"critic.{name}": tensor for name, tensor in critic.items()}


def assert_same_update(case, updates, split, models, ranks, oracle):
    expected, loss = oracle(case, updates)
    engine, report = run_step(make_config(models, case, **UPDATES[updates], **SPLITS[split]), ranks)
    assert report.skipped_reason is None
    assert report.metrics["train/loss"] == pytest.approx(loss, abs=2e-6)
    assert weights(engine).keys() == expected.keys()
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor.double(), expected[name].detach(), rtol=1e-4, atol=2e-6, msg=name)
    check_declared(report.metrics)


FAST = ("ppo", "gspo", "kl in loss and entropy", "reinforce++, kl in reward", "decoupled, sequence mis", "geometric mask")
"""Between them they walk every path of the step; the others differ in pure functions, which have tests of their own."""


@pytest.mark.parametrize("case", FAST)
def test_the_updates_of_a_step_are_those_of_a_plain_loop(case, models, ranks, oracle):
    assert_same_update(case, "mini-batches and epochs", "small", models, ranks, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("case", CASES)
def test_no_split_of_the_work_changes_them(case, updates, split, models, ranks, oracle):
    assert_same_update(case, updates, split, models, ranks, oracle)


def test_a_reference_kept_on_the_cpu_gives_the_same_update(models, ranks, oracle):
    expected, _ = oracle("kl in loss and entropy", "mini-batches and epochs")
    config = make_config(models, "kl in loss and entropy", keep_reference_on="cpu", **UPDATES["mini-batches and epochs"])
    engine, report = run_step(config, ranks)
    assert report.metrics["train/kl"] > 0
    for name, tensor in engine.state_tensors():
        torch.testing.assert_close(tensor.double(), expected[name].detach(), rtol=1e-4, atol=2e-6, msg=name)


def test_several_epochs_train_each_token_once_more_but_count_it_once(models, ranks):
    _, report = run_step(make_config(models, "dr_grpo", mini_batches=2, epochs=3), ranks)
    assert (
        report.trained_tokens
        == report.metrics["train/tokens"]
        == sum(int(chain.mask().sum()) for group in make_groups() for t in group for chain in t.chains)
    )


def test_a_step_whose_trajectories_are_all_dropped_is_skipped_with_the_reason(models, ranks):
    config = make_config(models, "k3 mask", correction={"max_k3": 1e-9})
    engine, report = run_step(config, ranks)
    assert report.skipped_reason == "trainer.correction dropped every trajectory"
    assert report.trained_tokens == 0
    assert report.metrics["mismatch/masked_ratio"] == 1
    initial = TrainerEngine(config, ranks)
    assert all(torch.equal(tensor, dict(initial.state_tensors())[name]) for name, tensor in engine.state_tensors())


def test_a_broken_reference_skips_the_step_and_names_a_trajectory(models, ranks):
    config = make_config(models, "kl in loss and entropy")
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    next(iter(engine.reference.parameters())).data.fill_(torch.nan)
    before = {name: tensor.clone() for name, tensor in engine.state_tensors()}
    report = train_step(engine, algorithm, make_groups(), 1)
    assert "trajectory 0-0 got ref_logprobs that are not finite" in report.skipped_reason
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_tensors())


class Spoilt(PolicyGradient):
    """Gives undefined losses, or undefined advantages."""

    def __init__(self, options, what):
        super().__init__(options)
        self.what = what

    def token_advantages(self, advantage, scores):
        values = super().token_advantages(advantage, scores)
        return values * math.nan if self.what == "advantages" and advantage > 0 else values

    def policy_loss(self, batch):
        loss = super().policy_loss(batch)
        return loss if self.what != "loss" else replace(loss, losses=loss.losses + torch.where(batch.mask, torch.inf, 0.0))


@pytest.mark.parametrize("what", ["advantages", "loss"])
def test_an_undefined_number_of_the_algorithm_skips_the_step_and_names_a_trajectory(what, models, ranks):
    engine = TrainerEngine(make_config(models, "dr_grpo"), ranks)
    before = {name: tensor.clone() for name, tensor in engine.state_tensors()}
    report = train_step(engine, Spoilt(GrpoOptions(), what), make_groups(), 1)
    assert re.search(rf"trajectory \d-\d got (a )?{what} that (is|are) not finite", report.skipped_reason)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_tensors())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_resumed_critic_goes_on_as_if_it_had_never_stopped(stage, models, ranks, tmp_path):
    config = make_config(models, "ppo", deepspeed={"zero_stage": stage})
    algorithm = build_algorithm(config)
    engine, _ = run_step(config, ranks)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    resumed = TrainerEngine(config, ranks, algorithm.needs)
    checkpoint.load(folder, resumed)
    metrics = [train_step(e, algorithm, make_groups(), 2).metrics for e in (engine, resumed)]
    assert metrics[0]["train/value_loss"] == metrics[1]["train/value_loss"] > 0
    assert all(torch.equal(tensor, weights(engine)[name]) for name, tensor in weights(resumed).items())
    assert any(float(tensor.detach().abs().sum()) for name, tensor in weights(resumed).items() if "critic.head" in name)


def test_a_checkpoint_without_a_critic_is_refused_by_an_algorithm_that_has_one(models, ranks, tmp_path):
    engine, _ = run_step(make_config(models, "dr_grpo"), ranks)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    with pytest.raises(ConfigError, match="is of a run without a critic"):
        checkpoint.load(folder, TrainerEngine(make_config(models, "ppo"), ranks, frozenset({"values"})))


def test_a_reference_of_another_vocabulary_is_refused(models, ranks, tmp_path):
    other = save_model(tmp_path / "other", 0, vocab_size=43)
    with pytest.raises(ConfigError, match=r"model.reference .* has 43 token ids, the policy 41"):
        TrainerEngine(make_config([models[0], other], "kl in loss and entropy"), ranks, frozenset({"ref_logprobs"}))
