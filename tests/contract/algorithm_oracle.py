"""An oracle of the training step for `test_trainer_algorithms.py`: one row at a time, float64, no code of the trainer."""

import math

import numpy as np
import torch

from laminar.plugins import resolve, validate_options
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer.algorithms import ALGORITHM_OPTIONS

TEMPERATURE, LEARNING_RATE, MAX_NORM = 0.8, 0.5, 0.7


def make_groups(num_groups=2, *, greedy=False):
    """Groups of 3 with answers of unlike lengths, a tool's answer in the middle of some; trajectory 1-2 has two chains.

    Args:
        num_groups: how many.
        greedy: whether each has a greedy answer besides, of reward 0.5 and 1.5.
    """
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
                    name, str(group), "p", member, 1, Purpose.TRAIN, sampling, tuple(chains), FinishReason.STOP, reward,
                    {"cost": 0.25 * group + 0.5 * (member == 1)},
                )
            )  # fmt: skip
        if greedy:
            best = Chain((prompt, sampled([5, 6], [-0.1, -0.2], WeightVersion(0, 0))))
            members.append(
                Trajectory(
                    f"{group}-3", str(group), "p", 3, 1, Purpose.GREEDY_BASELINE, SamplingParameters(0.0, 8, 0), (best,),
                    FinishReason.STOP, 0.5 + group,
                )
            )  # fmt: skip
        groups.append(tuple(members))
    return groups


CASES = {
    "dr_grpo": ("dr_grpo", {}, {}),
    "dapo, overlong": ("dapo", {"overlong_buffer_tokens": 6}, {}),
    "rloo, dual clip": ("rloo", {"dual_clip": 1.2}, {}),
    "remax": ("remax", {}, {}),
    "safe_rlhf": ("safe_rlhf", {"cost_limit": 0.1, "multiplier": 2.0}, {}),
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


class Oracle:
    def __init__(self, models, case, updates):
        from transformers import AutoModelForCausalLM

        kind, options, correction = CASES[case]
        self.options = validate_options(resolve(kind, ALGORITHM_OPTIONS), options)
        self.groups = make_groups(greedy=kind == "remax")
        self.greedy = {t.group_id: t.reward for g in self.groups for t in g if t.purpose is Purpose.GREEDY_BASELINE}
        self.multiplier = 0.0
        if kind == "safe_rlhf":  # mean cost: (0 + 0.5 + 0 + 0.25 + 0.75 + 0.25) / 6
            self.multiplier = math.exp(math.log(2.0) + 0.1 * 2.0 * (1.75 / 6 - 0.1))
        self.correction = {"weight": "none", "weight_max": 2.0, "weight_min": 0.5} | correction
        self.mini_batches, self.epochs = updates.get("mini_batches", 1), updates.get("epochs", 1)
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(m).double() for m in models)
        self.critic = AutoModelForCausalLM.from_pretrained(models[0]).double().model if kind == "ppo" else None
        self.head = torch.nn.Linear(16, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def train(self):
        rows = [
            self.row(t, chain) for group in self.groups for t in group for chain in t.chains if t.purpose is Purpose.TRAIN
        ]
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
            "reward": (trajectory.reward - min(1, max(0, over)) - self.multiplier * trajectory.reward_terms["cost"])
            / (1 + self.multiplier),
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
            baseline = {
                "group_mean": values.mean(),
                "leave_one_out": np.mean(others),
                "greedy": self.greedy.get(row["group"]),
            }.get(o.baseline, 0.0)
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
