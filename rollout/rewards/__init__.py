"""Rewards: what an answer is worth. To add one, see rollout/README.md."""

REWARDS = {
    "code_tests": "rollout.rewards.code_tests:CodeTests",
    "exact_match": "rollout.rewards.exact_match:ExactMatch",
    "format": "rollout.rewards.format:Format",
    "judge": "rollout.rewards.judge:Judge",
    "math_verify": "rollout.rewards.math_verify:MathVerify",
    "overlong": "rollout.rewards.overlong:Overlong",
    "reasoning_gym": "rollout.rewards.reasoning_gym:ReasoningGym",
    "relative_length": "rollout.rewards.relative_length:RelativeLength",
    "regex": "rollout.rewards.regex:RegexMatch",
    "verl": "rollout.rewards.verl:Verl",
}
"""Names that `[[rewards]] kind` knows."""
