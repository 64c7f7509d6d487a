"""Environments: what an episode plays against. To add one, see rollout/README.md."""

ENVIRONMENTS = {
    "agent": "rollout.environments.agent:Agent",
    "single_turn": "rollout.environments.single_turn:SingleTurn",
    "tools": "rollout.environments.tools:Tools",
}
"""Names that `[environment] kind` knows."""
