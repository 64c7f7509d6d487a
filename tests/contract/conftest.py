"""Fixtures of the contract tests."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trainer.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Ranks]":
    """One rank, alone. Joined once a process, as in a run: DeepSpeed remembers the process group that it saw first."""
    import torch

    from trainer.ranks import join_ranks

    torch.set_num_threads(1)
    alone = join_ranks(0, 1)
    yield alone
    alone.leave()
