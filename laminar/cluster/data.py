"""A run's prompts: read once by the supervisor, handed to the prompt pool and to evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.codec import encode_prompt
from laminar.config.root import LaminarConfig
from laminar.config.sizes import bytes_per_group, members_per_group
from laminar.experience.prompts import PromptPool
from laminar.experience.store import ExperienceStore
from laminar.plugins import load_attribute
from laminar.types import Prompt

LOADER = "rollout.data:load_run_prompts"
"""Reads and checks the rows; lives above this floor, so it is named, not imported."""


@dataclass(frozen=True, slots=True)
class RunData:
    """Training prompts and held-out prompts."""

    prompts: list[Prompt]
    held_out: list[Prompt]

    def encoded_held_out(self) -> list[bytes]:
        """Held-out prompts as they travel to a worker."""
        return [encode_prompt(prompt) for prompt in self.held_out]

    async def put_into_pool(self, client: Any, run_id: str, config: LaminarConfig, *, is_paused: bool = False) -> None:
        """Fill the prompt pool; doing it again changes nothing."""
        await self.configure_pool(client, run_id, config, is_paused=is_paused)
        await PromptPool(ExperienceStore(client, run_id)).add_prompts(self.prompts)

    async def configure_pool(self, client: Any, run_id: str, config: LaminarConfig, *, is_paused: bool) -> None:
        """Give the pool its settings; those of a living run may change."""
        pool = PromptPool(ExperienceStore(client, run_id))
        await pool.configure(
            num_prompts=len(self.prompts),
            prompts_per_step=config.trainer.prompts_per_step,
            group_size=members_per_group(config),
            max_staleness=config.staleness.bound,
            max_attempts=config.rollout.max_attempts,
            min_group_size=config.rollout.min_group_size,
            max_bytes=config.experience.max_bytes,
            bytes_per_group=bytes_per_group(config),
            max_epochs=config.data.max_epochs,
            data_seed=config.data.seed,
            shuffle=config.data.shuffle,
            exempt=config.staleness.policy == "mask",
            group_failure=config.rollout.group_failure,
            is_paused=is_paused,
        )


def load_run_data(config: LaminarConfig, config_folder: Path) -> RunData:
    """Read all rows; a malformed or too long one is refused with its file and line.

    Raises:
        ConfigError: naming the row and the remedy.
    """
    prompts, held_out = load_attribute(LOADER)(config, config_folder)
    return RunData(prompts, held_out)
