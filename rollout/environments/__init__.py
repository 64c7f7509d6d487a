"""Environments: what an episode plays against. To add one, see rollout/README.md."""

ENVIRONMENTS = {"single_turn": "rollout.environments.single_turn:SingleTurn"}
"""Names that `[environment] kind` knows."""
