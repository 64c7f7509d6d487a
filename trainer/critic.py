"""The critic: a causal model's trunk with a head of one number, the value before each token. Trained beside the policy.

It is never published; a checkpoint holds it with its optimizer, for the two must go on together.
Shapes: B rows, T tokens, H hidden.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from trainer.deepspeed_setup import zero_stage
from trainer.gathering import gathered, load_tensors, without_data
from trainer.layout import model_layout, wants_flash
from trainer.model import load_model
from trainer.optimizer_shares import SavedShares
from trainer.packing import PackedRows
from trainer.ranks import Ranks
from trainer.trained_module import TrainedModule, Update
from trainer.trunk import Trunk


class ValueModel(nn.Module):
    """Values before given tokens; 0 everywhere at first, for the head starts at 0."""

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__()
        self.trunk_model = model.base_model
        self._trunk = trunk
        self.head = nn.Linear(model.config.hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids_BT: Tensor, mask_BT: Tensor, _: Tensor, *prompts: Tensor) -> Tensor:
        """Values, (B, T) float32, 0 where the mask is false; arguments as those of `Policy.forward`."""
        before = self._trunk.before(token_ids_BT, mask_BT, *prompts)
        hidden_NH = before.states.index_select(0, before.state_of[before.asked])
        values_N = self.head(hidden_NH)[:, 0].float()
        values_BU = torch.zeros(before.asked.shape, device=mask_BT.device).masked_scatter(before.asked, values_N)
        return self._trunk.aligned(values_BU, mask_BT)


class Critic:
    """The value model under DeepSpeed.

    Args:
        config: the run's settings; it begins as `model.critic`, or as the policy does.
        ranks: the joined ranks; all construct it together.
        vocabulary_size: the policy's.

    Attributes:
        layout: which its model can compute.

    Raises:
        ConfigError: if it cannot be loaded, or its vocabulary is another than the policy's.
    """

    def __init__(self, config: LaminarConfig, ranks: Ranks, vocabulary_size: int) -> None:
        self._path = config.model.critic or config.model.path
        trainer = config.trainer
        model = load_model(
            config.model.model_copy(update={"path": self._path}),
            gradient_checkpointing=trainer.gradient_checkpointing,
            flash=wants_flash(trainer, ranks),
        )
        if model.config.vocab_size != vocabulary_size:
            raise ConfigError(
                f"model.critic {self._path} has {model.config.vocab_size} token ids, the policy {vocabulary_size}: "
                "give a model with the same tokenizer"
            )
        is_partitioned = zero_stage(trainer, model.dtype) == 3
        self.layout = model_layout(model.to(ranks.device), trainer, ranks, is_partitioned=is_partitioned)
        trunk = Trunk(model.base_model, ranks.sequence, is_partitioned=is_partitioned, layout=self.layout)
        self._module = ValueModel(model, trunk).to(ranks.device)
        self._trained = TrainedModule(self._module, model.dtype, trainer, ranks)
        self._is_finite = torch.ones((), dtype=torch.bool, device=ranks.device)
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._look_at)
        self._rate_ratio = trainer.critic_learning_rate / trainer.learning_rate

    def forward(self, batch: PackedRows, *, is_last: bool) -> Tensor:
        """Values of a micro-batch with gradient, (B, T); as often as the policy's."""
        self._trained.set_boundary(is_last=is_last)
        values_BT: Tensor = self._trained(*batch.model_inputs())
        return values_BT

    @torch.no_grad()
    def score(self, batch: PackedRows) -> Tensor:
        """Values of a micro-batch as they are, (B, T), without gradient."""
        values_BT: Tensor = self._trained(*batch.model_inputs())
        return values_BT

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradient; see `TrainedModule.backward`."""
        self._trained.backward(loss)

    def has_finite_gradient(self) -> bool:
        """Whether what `backward` has made here since the last update is finite; its norm is known in `update` only."""
        return bool(self._is_finite)

    def update(self, policy_learning_rate: float, largest_norm: float = math.inf) -> Update:
        """Apply the gradient; its learning rate follows the policy's schedule."""
        self._is_finite.fill_(value=True)
        return self._trained.update(policy_learning_rate * self._rate_ratio, largest_norm)

    def _look_at(self, gradient: Tensor) -> None:
        self._is_finite &= gradient.isfinite().all()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The whole value model by name; not copies. Under ZeRO 3 as `TrainerEngine.state_tensors`."""
        return gathered(self._module.named_parameters())

    def state_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """What `state_tensors` will give, as tensors without data."""
        for name, parameter in self._module.named_parameters():
            yield name, without_data(parameter)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's share of its optimizer state."""
        return self._trained.optimizer_tensors()

    def load_state(self, model: Mapping[str, Tensor], optimizer: SavedShares) -> None:
        """Restore what `state_tensors` and `optimizer_tensors` gave; all ranks call it together."""
        load_tensors(list(self._module.named_parameters()), model, self._path)
        self._trained.load_optimizer(optimizer)
