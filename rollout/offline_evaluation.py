"""Evaluating a folder of weights without a run: the run's engine, episodes and rewards, on held-out prompts.

It knows neither Redis nor the relay; a folder that is a relay's version is held, as a reader holds it, while it is measured.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, EngineError, LaminarError, first_error
from laminar.scores import EvaluationReport
from laminar.types import Prompt, WeightVersion
from relay.locks import is_same_file, try_lock
from relay.store import WEIGHTS_NAME
from rollout.data import load_held_out
from rollout.evaluation import EvaluationResult, evaluate
from rollout.player import Player
from rollout.replica import Replica
from rollout.start_engine import engine_starter

CHECK_SECONDS = 0.2


class OneFolder:
    """A `WeightSource` of one folder."""

    def __init__(self, folder: Path, version: WeightVersion) -> None:
        self._folder, self._version = folder, version

    def latest(self) -> WeightVersion:
        """The only version."""
        return self._version

    @contextlib.contextmanager
    def lease(self, version: WeightVersion) -> Iterator[Path]:
        """The folder; its weights file is locked as a relay's reader locks it.

        Raises:
            ConfigError: the weights are not there, or are just being rewritten.
        """
        weights = self._folder / WEIGHTS_NAME
        try:
            descriptor = os.open(weights, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{weights} cannot be read ({error.strerror}): engines load a folder whose weights are in that one file, "
                "as `laminar export` writes it"
            ) from error
        try:
            if not (try_lock(descriptor, exclusive=False) and is_same_file(descriptor, weights)):
                raise ConfigError(f"{weights} is being rewritten: name a newer version")
            yield self._folder
        finally:
            os.close(descriptor)


def evaluate_folder(config: LaminarConfig, weights: Path, number: int) -> EvaluationReport:
    """Evaluate a folder of weights with one engine.

    Args:
        config: the run's settings; `[eval]` says what is asked, `[rollout.engine]` who answers.
        weights: a Hugging Face folder with one `model.safetensors`, config and tokenizer.
        number: of the version, for the report.

    Raises:
        ConfigError: the folder or the held-out prompts cannot be used.
        EngineError, DeadlineError: the engine does not start, or dies, or every answer failed.
    """
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(weights)})})
    prompts = load_held_out(config, Path(config.run.config_directory))
    version = WeightVersion(0, number)
    with TemporaryDirectory(prefix="laminar-eval-") as scratch, OneFolder(weights, version).lease(version):
        Path(scratch, "logs").mkdir()
        return asyncio.run(_evaluate(config, OneFolder(weights, version), prompts, Path(scratch))).report(config.eval)


async def _evaluate(config: LaminarConfig, source: OneFolder, prompts: list[Prompt], folder: Path) -> EvaluationResult:
    run_id, token = f"eval-{secrets.token_hex(4)}", secrets.token_hex(16)
    context = RoleContext("eval", run_id, token, redis_url="", run_folder=folder)
    replica = Replica(config.rollout.engine, source, engine_starter(context, config))
    try:
        await replica.start()
        async with asyncio.timeout(config.eval.timeout_seconds):
            return await _evaluate_watched(replica, prompts, config)
    except TimeoutError:
        raise EngineError(
            f"the evaluation took longer than eval.timeout_seconds = {config.eval.timeout_seconds:g}"
        ) from None
    finally:
        await replica.kill()


async def _evaluate_watched(replica: Replica, prompts: list[Prompt], config: LaminarConfig) -> EvaluationResult:
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(replica))
            result = await evaluate(Player(config, worker="eval"), replica, prompts, config)
            watch.cancel()
    except* LaminarError as failures:
        raise first_error(failures) from None
    return result


async def _watch(replica: Replica) -> None:
    """End the evaluation when its engine dies: nobody restarts it here."""
    while True:
        if problem := replica.problem():
            raise EngineError(f"the engine died: {problem}")
        await asyncio.sleep(CHECK_SECONDS)
