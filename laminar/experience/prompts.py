"""The prompt pool: which prompts are played next, and by whom.

Invariants: a group is admitted only if the staleness rule (DESIGN section 5) and the byte limit allow it; it is played by at
most one worker, under a lease by the server's clock; the order of prompts is a function of the data seed and the epoch.

This module does not know what a trajectory is, nor who trains it.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import redis.exceptions

from laminar.codec import decode_prompt, encode_prompt
from laminar.errors import ConfigError, ExperienceError
from laminar.experience.answers import Claim
from laminar.experience.store import ExperienceStore, new_request_id, unpack
from laminar.seeds import prompt_order
from laminar.types import ClaimedGroup, Prompt, WeightVersion

NO_LIMIT = -1
MOST_STALENESS = 2**53
"""A larger bound is this one: scripts count in float64, and no run has so many versions."""
PROMPTS_PER_WRITE = 500
ORDER_SECONDS = 600
"""An epoch's order can be computed again at any time, so it need not stay for ever."""
ORDER_PAUSE_SECONDS = 1.0
"""After one that found no memory: a long order takes a while to compute."""


class PromptPool:
    """Claims on prompts.

    Args:
        store: the run's data.
    """

    def __init__(self, store: ExperienceStore) -> None:
        self._store = store

    async def configure(
        self,
        *,
        num_prompts: int,
        prompts_per_step: int,
        group_size: int,
        max_staleness: int | None,
        max_attempts: int,
        min_group_size: int,
        max_bytes: int,
        bytes_per_group: int,
        max_epochs: int | None,
        data_seed: int,
        shuffle: bool,
        exempt: bool = False,
        group_failure: str = "shrink",
        is_paused: bool = False,
    ) -> None:
        """Make the run, or give a resumed one new settings; groups already admitted keep their own. May be repeated.

        Args:
            num_prompts: rows of the data.
            prompts_per_step: groups in a batch.
            group_size: trajectories in a group.
            max_staleness: inclusive bound in versions; None for unbounded.
            max_attempts: attempts at a group's lease before it is given up.
            min_group_size: fewest good members of a trained group.
            max_bytes: payload bytes that admitted groups may reserve.
            bytes_per_group: upper bound of one group's payload bytes, reserved at its claim.
            max_epochs: passes over the data; None for no end.
            data_seed: seed of the order.
            shuffle: whether to shuffle each epoch.
            exempt: groups admitted from now on have no deadline (staleness policy `mask`); the bound only paces admission.
            is_paused: grant nothing for the moment.
            group_failure: `refill`, `shrink` or `drop`; see `rollout.group_failure`.

        Raises:
            ConfigError: a batch does not fit into `max_bytes`, or the run exists with other data.
        """
        if max_bytes < prompts_per_step * bytes_per_group:
            raise ConfigError(
                f"experience.max_bytes {max_bytes} cannot hold {prompts_per_step} groups of {bytes_per_group} bytes; "
                f"set it to {prompts_per_step * bytes_per_group} or more"
            )
        try:
            await self._store.run(
                "configure",
                data=json.dumps({"num_prompts": num_prompts, "data_seed": data_seed, "shuffle": shuffle}),
                num_prompts=num_prompts,
                prompts_per_step=prompts_per_step,
                group_size=group_size,
                bound=NO_LIMIT if max_staleness is None else min(max_staleness, MOST_STALENESS),
                max_attempts=max_attempts,
                min_group_size=min_group_size,
                max_bytes=max_bytes,
                bytes_per_group=bytes_per_group,
                max_epochs=NO_LIMIT if max_epochs is None else max_epochs,
                exempt=int(exempt),
                group_failure=group_failure,
                paused=int(is_paused),
            )
        except ExperienceError as error:
            if "other data" in str(error):
                raise ConfigError(f"{error}; resume with the data it was started with, or start a new run") from error
            raise

    async def add_prompts(self, prompts: Sequence[Prompt], start: int = 0) -> None:
        """Store prompts at the indices from `start` on; nothing is claimed before all of them are there. May be repeated."""
        for first in range(0, len(prompts), PROMPTS_PER_WRITE):
            part = prompts[first : first + PROMPTS_PER_WRITE]
            rows = {str(start + first + i): encode_prompt(prompt) for i, prompt in enumerate(part)}
            await self._store.insist("add_prompts", partial(self._write, rows))

    async def claim(
        self, worker: str, engine: WeightVersion, max_groups: int, lease_seconds: float, request_id: str | None = None
    ) -> Claim:
        """Ask for groups to play.

        Args:
            worker: who asks.
            engine: what its engine samples with.
            max_groups: most groups to grant.
            lease_seconds: a worker that is silent for so long loses them.
            request_id: the same for a repeated request, which gets the same answer.

        Raises:
            ExperienceError: the engine holds a number that is not published, or the server is away.
        """
        request_id = request_id or new_request_id()
        while True:
            answer = unpack(
                await self._store.run(
                    "claim",
                    request_id,
                    worker=worker,
                    lineage=engine.lineage,
                    number=engine.number,
                    max_groups=max_groups,
                    lease_ms=round(lease_seconds * 1000),
                )
            )
            if answer.get("need_epoch") is None:
                break
            if not await self._write_order(json.loads(answer["data"]), answer["need_epoch"]):
                await asyncio.sleep(ORDER_PAUSE_SECONDS)
                return Claim((), "bytes", WeightVersion(answer["lineage"], answer["published"]))
        published = WeightVersion(answer["lineage"], answer["published"])
        groups = await self._with_prompts(answer["groups"])
        if groups is None:
            return Claim((), "not_ready", published)
        return Claim(groups, answer.get("refused"), published)

    async def renew(
        self,
        worker: str,
        group_ids: Sequence[str],
        lease_seconds: float,
        known: Mapping[str, tuple[int, int]] | None = None,
    ) -> tuple[str, ...]:
        """Heartbeat: keep the listed groups.

        Args:
            worker: who holds them.
            group_ids: those it still plays.
            lease_seconds: from now on.
            known: oldest and newest number of all tokens of the group's running members, where the worker knows them.

        Returns:
            Ids that the worker has lost: evicted, or claimed by another. It aborts them.
        """
        known = known or {}
        groups = [(group_id, *known.get(group_id, (NO_LIMIT, NO_LIMIT))) for group_id in group_ids]
        packed = await self._store.run("renew", worker=worker, lease_ms=round(lease_seconds * 1000), groups=groups)
        return tuple(unpack(packed))

    async def give_back(self, worker: str, group_ids: Sequence[str]) -> None:
        """Orderly stop: others may claim the groups at once, and the attempt does not count."""
        await self._store.run("give_back", worker=worker, groups=list(group_ids))

    async def reap(self, ahead_seconds: float = 0.0) -> None:
        """End the leases that have expired, or will within `ahead_seconds`; `claim` and `peek` end the expired ones."""
        await self._store.run("reap", ahead_ms=round(ahead_seconds * 1000))

    async def _write(self, rows: dict[str, bytes]) -> None:
        await self._store.client.hset(self._store.key("prompts"), mapping=rows)  # type: ignore[arg-type]

    async def _write_order(self, data: dict[str, Any], epoch: int) -> bool:
        """Whether there was memory for it."""
        order = prompt_order(data["data_seed"], epoch, data["num_prompts"], data["shuffle"]).astype("<i4").tobytes()
        key = self._store.key(f"order:{epoch}")

        async def write() -> bool:
            try:
                await self._store.client.set(key, order, nx=True, ex=ORDER_SECONDS)
            except redis.exceptions.OutOfMemoryError:
                return False
            return True

        return await self._store.insist("order", write)

    async def _with_prompts(self, granted: list[dict[str, Any]]) -> tuple[ClaimedGroup, ...] | None:
        """The groups with what they play; None if an empty server has replaced the one that granted them."""
        if not granted:
            return ()
        indices = [str(row["prompt"]) for row in granted]
        frames = await self._store.insist(
            "prompts", lambda: self._store.client.execute_command("HMGET", self._store.key("prompts"), *indices)
        )
        if None in frames:
            return None
        return tuple(
            ClaimedGroup(
                group_id=row["group_id"],
                admission=row["admission"],
                prompt=decode_prompt(frame),
                members=tuple(row["members"]),
                attempt=row["attempt"],
                claim=row["claim"],
            )
            for row, frame in zip(granted, frames, strict=True)
        )
