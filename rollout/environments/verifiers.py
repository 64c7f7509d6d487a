"""Environment `verifiers`: an environment of that package (`verifiers.v1`), which plays itself against the gateway.

It is not stepped: its harness makes the calls (`rollout.verifiers_driver`); tasks come from the data's column `task`, which
`python -m rollout.verifiers_data` writes.
"""

from typing import Any, Literal

from laminar.config.section import Section


class Verifiers:
    """What to play for each trajectory."""

    gives_reward = True

    class Options(Section):
        """Settings of `verifiers`."""

        env: dict[str, Any]
        """The `[env]` table of that package's own configs, such as `{ taskset = { id = "my-env" } }`."""
        task_field: str = "task"
        """Data column with the task's data."""
        call_format: Literal["hermes", "llama", "pythonic"] = "hermes"
        """How the model writes calls of the tools that the environment offers."""
