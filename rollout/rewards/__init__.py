"""Rewards: what an answer is worth. To add one, see rollout/README.md."""

REWARDS = {
    "exact_match": "rollout.rewards.exact_match:ExactMatch",
    "regex": "rollout.rewards.regex:RegexMatch",
}
"""Names that `[[rewards]] kind` knows."""
