"""One rank's models: the policy that is trained and published, and as the algorithm needs them a reference and a critic.

It does not know algorithms, batches or steps.
"""

import logging
import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from laminar.config.root import LaminarConfig
from laminar.errors import InvariantError
from trainer.adapters import add_adapters
from trainer.batches import Layout
from trainer.critic import Critic
from trainer.deepspeed_setup import zero_stage
from trainer.gathering import gathered, load_tensors, without_data
from trainer.layout import common_layout, model_layout, wants_flash
from trainer.model import load_model
from trainer.optimizer_shares import SavedShares
from trainer.packing import PackedRows
from trainer.policy import Policy
from trainer.ranks import Ranks
from trainer.reference import FrozenPolicy, Reference
from trainer.spikes import SpikeDetector
from trainer.trained_module import TrainedModule, Update
from trainer.utilisation import device_peak, model_shape

logger = logging.getLogger("laminar.trainer.engine")


class TrainerEngine:
    """The policy under DeepSpeed, and its companions.

    Args:
        config: the run's settings; `model.path` must be a folder.
        ranks: the joined ranks; all construct their engine together.
        needs: what the algorithm asks for; decides whether a reference and a critic are loaded.

    Attributes:
        layout: how the rows of a micro-batch lie.
        spikes: what the last updates were like.
        shape: what the policy's arithmetic hangs on.
        peak_flops: operations a second that this rank's device could do; None if that is not known.

    Raises:
        ConfigError: if a model cannot be loaded or trained.
    """

    def __init__(self, config: LaminarConfig, ranks: Ranks, needs: frozenset[str] = frozenset()) -> None:
        torch.set_num_threads(config.trainer.num_threads)
        seed = config.run.seed + ranks.rank
        for begin in (torch.manual_seed, np.random.seed, random.seed):  # a user's algorithm may draw from any of them
            begin(seed % 2**32)
        self.config = config
        self.ranks = ranks
        self.model = load_model(
            config.model,
            gradient_checkpointing=config.trainer.gradient_checkpointing,
            flash=wants_flash(config.trainer, ranks),
        ).to(ranks.device)
        self.shape = model_shape(self.model.num_parameters(), self.model.config)
        self.peak_flops = device_peak(config.trainer, ranks.device, self.model.dtype)
        vocabulary_size = self.model.config.vocab_size
        lora = config.trainer.lora
        self.adapters = add_adapters(self.model, lora, config.run.seed) if lora.rank else None
        is_partitioned = zero_stage(config.trainer, self.model.dtype) == 3
        layout = model_layout(self.model, config.trainer, ranks, is_partitioned=is_partitioned)
        policy = Policy(self.model, group=ranks.sequence, is_partitioned=is_partitioned, layout=layout)
        self._policy = TrainedModule(policy, self.model.dtype, config.trainer, ranks)
        self._reference = self._make_reference(vocabulary_size, layout) if "ref_logprobs" in needs else None
        self._critic = Critic(config, ranks, vocabulary_size) if "values" in needs else None
        others = [scorer.layout for scorer in (self._reference, self._critic) if scorer is not None]
        self.layout = common_layout(layout, others)
        self.before_update: Callable[[], None] = lambda: None
        self.spikes = SpikeDetector(config.trainer.spikes, config.trainer.max_grad_norm)

    def forward(self, batch: PackedRows, *, is_last: bool, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Score a micro-batch; all ranks call `forward` and `backward` equally often before an update.

        Args:
            batch: the rows.
            is_last: whether the update follows this micro-batch.
            entropy_gradient: whether entropies carry a gradient too.

        Returns:
            Log-probs with gradient and entropies, (B, T) each, 0 where nothing is trained.
        """
        self._policy.set_boundary(is_last=is_last)
        logprobs_BT, entropy_BT = self._policy(*batch.model_inputs(), entropy_gradient=entropy_gradient)
        return logprobs_BT, entropy_BT

    @torch.no_grad()
    def score(self, batch: PackedRows) -> Tensor:
        """Log-probs of a micro-batch under the weights as they are, (B, T), without gradient; 0 where nothing is trained.

        All ranks call it equally often.
        """
        logprobs_BT: Tensor = self._policy(*batch.model_inputs())[0]
        return logprobs_BT

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradient; see `TrainedModule.backward`."""
        self._policy.backward(loss)

    def update(self, learning_rate: float, largest_norm: float = math.inf) -> Update:
        """Apply the gradient gathered since the last update; see `TrainedModule.update`."""
        self.before_update()
        return self._policy.update(learning_rate, largest_norm)

    @property
    def reference(self) -> Reference | FrozenPolicy:
        """The frozen reference; a context manager, on the device inside."""
        if self._reference is None:
            raise InvariantError("the engine was made for an algorithm that needs no reference")
        return self._reference

    @property
    def critic(self) -> Critic | None:
        """The critic, if the algorithm needs one."""
        return self._critic

    def state_tensors(self) -> Generator[tuple[str, Tensor]]:
        """The full policy under its Hugging Face names, tied parameters once, in the training dtype; not copies.

        Adapters come merged into the weights they belong to.

        Under ZeRO 3 all ranks iterate together; each tensor is to be read before the next is asked for.
        """
        parameters = gathered(self.model.named_parameters()) if self.adapters is None else self.adapters.merged_tensors()
        yield from parameters
        yield from self.buffers()

    def state_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """What `state_tensors` will give, as tensors without data; nothing is gathered."""
        if self.adapters is None:
            yield from ((name, without_data(parameter)) for name, parameter in self.model.named_parameters())
        else:
            yield from self.adapters.merged_shapes()
        yield from ((name, without_data(buffer)) for name, buffer in self.buffers())

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's persistent buffers, which every rank has whole; not copies."""
        persistent = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    @property
    def is_partitioned(self) -> bool:
        """Whether a rank holds only its share of the parameters (ZeRO 3)."""
        return self._policy.is_partitioned

    @property
    def optimizer_is_replicated(self) -> bool:
        """Whether every rank holds the whole optimizer state."""
        return self._policy.is_replicated

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's share of the policy's optimizer state; see `TrainedModule.optimizer_tensors`."""
        return self._policy.optimizer_tensors()

    def load_state(self, weights: Mapping[str, Tensor], optimizer: SavedShares) -> None:
        """Restore what was saved; all ranks call it together.

        Args:
            weights: what `state_tensors` gave; with adapters, what `adapters.tensors` gave: all else is as it was loaded.
            optimizer: what `optimizer_tensors` gave.

        Raises:
            ConfigError: if a name or a shape is another model's.
        """
        if self.adapters is None:
            load_tensors([*self.model.named_parameters(), *self.buffers()], weights, self.config.model.path)
        else:
            self.adapters.load(weights, "trainer.lora describes")
        self._policy.load_optimizer(optimizer)

    def _make_reference(self, vocabulary_size: int, layout: Layout) -> Reference | FrozenPolicy:
        if self.adapters is not None and not self.config.model.reference:
            return FrozenPolicy(self.adapters, self.score, layout)
        return Reference(self.config, self.ranks, vocabulary_size)
