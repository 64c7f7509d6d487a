"""The rollout tier: workers, episodes, engines, environments, rewards."""
