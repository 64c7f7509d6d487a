"""Environments: what an episode plays against. To add one, see rollout/README.md."""

ENVIRONMENTS = {
    "agent": "rollout.environments.agent:Agent",
    "gymnasium": "rollout.environments.gymnasium:Gymnasium",
    "remote": "rollout.environments.remote:Remote",
    "single_turn": "rollout.environments.single_turn:SingleTurn",
    "textarena": "rollout.environments.textarena:TextArena",
    "tools": "rollout.environments.tools:Tools",
    "verifiers": "rollout.environments.verifiers:Verifiers",
}
"""Names that `[environment] kind` knows."""
