"""Run programs that nobody trusts: see `rollout.sandbox.run`."""
