"""The frozen reference model of a KL term: never trained, never published, the same from the first step to the last."""

from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from trainer.adapters import Adapters
from trainer.batches import Layout
from trainer.deepspeed_setup import zero_stage
from trainer.layout import model_layout, wants_flash
from trainer.model import load_model
from trainer.packing import PackedRows
from trainer.policy import Policy
from trainer.ranks import Ranks


class Reference:
    """A model that only scores. Every rank has the whole of it.

    Args:
        config: the run's settings.
        ranks: the joined ranks.

    Attributes:
        layout: which its model can compute.

    Raises:
        ConfigError: if it cannot be loaded, or its vocabulary is another than the policy's.
    """

    def __init__(self, config: LaminarConfig, ranks: Ranks, vocabulary_size: int) -> None:
        path = config.model.reference or config.model.path
        model = load_model(
            config.model.model_copy(update={"path": path}),
            gradient_checkpointing=False,
            flash=wants_flash(config.trainer, ranks),
        )
        if model.config.vocab_size != vocabulary_size:
            raise ConfigError(
                f"model.reference {path} has {model.config.vocab_size} token ids, the policy {vocabulary_size}: "
                "give a model with the same tokenizer"
            )
        model = model.requires_grad_(False).eval()
        # It is whole under ZeRO 3 too; but laid out as the policy, so that both round alike.
        is_partitioned = zero_stage(config.trainer, model.dtype) == 3
        self.layout = model_layout(model, config.trainer, ranks, is_partitioned=is_partitioned)
        self._policy = Policy(model, group=ranks.sequence, layout=self.layout)
        self._device = ranks.device
        self._home = torch.device("cpu") if config.trainer.keep_reference_on == "cpu" else ranks.device
        self._policy.to(self._home)

    def __enter__(self) -> Self:
        """Come to the device."""
        self._policy.to(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        """Go back to where it stays between its passes."""
        self._policy.to(self._home)

    def parameters(self) -> Iterator[Tensor]:
        """Its weights."""
        return self._policy.parameters()

    @torch.no_grad()
    def score(self, batch: PackedRows) -> Tensor:
        """Log-probs of a micro-batch, (B, T); 0 where nothing is trained."""
        logprobs_BT: Tensor = self._policy(*batch.model_inputs())[0]
        return logprobs_BT


class FrozenPolicy:
    """The reference of a policy with adapters: its own weights without them. Costs no memory.

    Args:
        adapters: of the policy.
        score: scores a micro-batch under the policy, without gradient.
        layout: the policy's.
    """

    def __init__(self, adapters: Adapters, score: Callable[[PackedRows], Tensor], layout: Layout) -> None:
        self._adapters, self._score, self.layout = adapters, score, layout

    def __enter__(self) -> Self:
        """Nothing has to come."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing has to go."""

    def score(self, batch: PackedRows) -> Tensor:
        """Log-probs of a micro-batch, (B, T); 0 where nothing is trained."""
        with self._adapters.switched_off():
            return self._score(batch)
