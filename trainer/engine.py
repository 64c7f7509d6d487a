"""One rank's models: the policy that is trained and published, and as the algorithm needs them a reference and a critic.

It does not know algorithms, batches or steps.
"""

import logging
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from laminar.config.root import LaminarConfig
from laminar.errors import InvariantError
from trainer.critic import Critic
from trainer.model import can_share_prompts, load_model
from trainer.packing import PackedRows
from trainer.policy import Policy
from trainer.ranks import Ranks
from trainer.reference import Reference
from trainer.spikes import SpikeDetector
from trainer.trained_module import TrainedModule, Update, load_tensors

logger = logging.getLogger("laminar.trainer.engine")


class TrainerEngine:
    """The policy under DeepSpeed, and its companions.

    Args:
        config: the run's settings; `model.path` must be a folder.
        ranks: the joined ranks; all construct their engine together.
        needs: what the algorithm asks for; decides whether a reference and a critic are loaded.

    Attributes:
        share_prompts: whether rows of one prompt compute it once.
        spikes: what the last updates were like.

    Raises:
        ConfigError: if a model cannot be loaded or trained.
    """

    def __init__(self, config: LaminarConfig, ranks: Ranks, needs: frozenset[str] = frozenset()) -> None:
        torch.set_num_threads(config.trainer.num_threads)
        torch.manual_seed(config.run.seed + ranks.rank)
        self.config = config
        self.ranks = ranks
        self.model = load_model(config.model, gradient_checkpointing=config.trainer.gradient_checkpointing).to(ranks.device)
        vocabulary_size = self.model.config.vocab_size
        self._policy = TrainedModule(Policy(self.model), self.model.dtype, config.trainer, ranks)
        self._reference = Reference(config, ranks, vocabulary_size) if "ref_logprobs" in needs else None
        self._critic = Critic(config, ranks, vocabulary_size) if "values" in needs else None
        self.share_prompts = self._decide_sharing()
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
        return self._policy.update(learning_rate, largest_norm)

    @property
    def reference(self) -> Reference:
        """The frozen reference; a context manager, on the device inside."""
        if self._reference is None:
            raise InvariantError("the engine was made for an algorithm that needs no reference")
        return self._reference

    @property
    def critic(self) -> Critic | None:
        """The critic, if the algorithm needs one."""
        return self._critic

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The full policy under its Hugging Face names, tied parameters once, in the training dtype; not copies."""
        yield from self.model.named_parameters()
        persistent = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    @property
    def optimizer_is_replicated(self) -> bool:
        """Whether every rank holds the whole optimizer state."""
        return self._policy.is_replicated

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's share of the policy's optimizer state; see `TrainedModule.optimizer_tensors`."""
        return self._policy.optimizer_tensors()

    def load_state(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` and `optimizer_tensors` gave.

        Raises:
            ConfigError: if a name or a shape is another model's.
        """
        load_tensors(dict(self.state_tensors()), model, self.config.model.path)
        self._policy.load_optimizer(optimizer)

    def _decide_sharing(self) -> bool:
        trainer = self.config.trainer
        if trainer.share_prompts and trainer.gradient_checkpointing:
            logger.warning(
                "trainer.share_prompts is off: gradient_checkpointing recomputes layers without a key-value cache"
            )
            return False
        others = [scorer for scorer in (self._reference, self._critic) if scorer is not None]
        is_able = can_share_prompts(self.model) and all(scorer.can_share_prompts for scorer in others)
        if trainer.share_prompts and not is_able:
            logger.warning("trainer.share_prompts is off: a model has layers without a plain key-value cache")
            return False
        return trainer.share_prompts
