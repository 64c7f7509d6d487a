"""The policy: a Hugging Face causal model that answers with log-probs of given tokens, and the entropy there.

It is the module that DeepSpeed wraps, so everything that touches parameters happens inside its forward.
Invariants: log-probs and entropy come from one distribution, the logits over the sampling temperature, in float32;
logits exist only at trained places, and at most `max_logits_bytes` of them at once.

In a folded micro-batch, places with the same context have their logits made once, if all fit at once.

Shapes: B rows, T tokens, P distinct prompts, N trained places, D distinct contexts of them, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from laminar.errors import ConfigError
from trainer.batches import Layout
from trainer.ranks import SequenceGroup
from trainer.trunk import Trunk

_SCALED_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Config entries of models that change the logits after the head, and the values that do nothing."""


class Head(nn.Module):
    """Log-probs and entropies from hidden states, chunk by chunk where the logits of all would be too large.

    A module of its own, with the output head's weight as its own: under ZeRO 3 the weight is gathered once a pass, however
    many chunks a rank has; ranks with unlike numbers of chunks would else wait for one another for ever.

    Args:
        head: the model's output head.
        max_logits_bytes: beyond this, logits are made chunk by chunk, and again in the backward pass.

    Raises:
        ConfigError: if it is more than a matrix and a bias.
    """

    def __init__(self, head: nn.Module, max_logits_bytes: int) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ConfigError(f"model.path: its output head is a {type(head).__name__}, which is not supported")
        self.weight, self.bias = head.weight, head.bias
        self._rows_at_once = max(1, max_logits_bytes // (4 * head.weight.shape[0]))

    def forward(
        self, hidden_DH: Tensor, temperature_D: Tensor, context_N: Tensor, targets_N: Tensor, *, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """As `score_tokens`, of the logits of these hidden states."""

        def score(hidden_DH: Tensor, temperature_D: Tensor, context_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
            logits_DV = functional.linear(hidden_DH, self.weight, self.bias)
            return score_tokens(logits_DV, temperature_D, context_N, targets_N, entropy_gradient=entropy_gradient)

        rows = self._rows_at_once
        if len(hidden_DH) <= rows:
            return score(hidden_DH, temperature_D, context_N, targets_N)
        each_N = torch.arange(len(targets_N), device=targets_N.device) % rows  # a chunk's contexts are its own
        parts = (hidden_DH.index_select(0, context_N), temperature_D[context_N], each_N, targets_N)
        chunks = zip(*(part.split(rows) for part in parts), strict=True)
        scores = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([score[0] for score in scores]), torch.cat([score[1] for score in scores])


class Policy(nn.Module):
    """Log-probs of given tokens under a causal model.

    Args:
        model: a causal model with a trunk (`base_model`) and an output head.
        max_logits_bytes: beyond this, logits are made chunk by chunk, and again in the backward pass.
        group: ranks that share each row, if there are any.
        is_partitioned: whether ZeRO 3 will split its parameters.
        layout: which the model can compute; see `trainer.layout`.

    Raises:
        ConfigError: if the model changes its logits after the head, which this class would miss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_logits_bytes: int = 256 * 1024**2,
        group: SequenceGroup | None = None,
        *,
        is_partitioned: bool = False,
        layout: Layout = Layout.SHARED,
    ) -> None:
        super().__init__()
        for name, neutral in _SCALED_LOGITS.items():
            if getattr(model.config, name, neutral) not in (neutral, None):
                raise ConfigError(
                    f"model.path: its config has {name} = {getattr(model.config, name)}, which is not supported"
                )
        self.model = model
        self.head = Head(model.get_output_embeddings(), max_logits_bytes)
        self._trunk = Trunk(model, group, is_partitioned=is_partitioned, layout=layout)

    def forward(
        self,
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        temperature_B: Tensor,
        prompt_ids_PT: Tensor | None = None,
        prompt_lengths_P: Tensor | None = None,
        prompt_of_row_B: Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Score rows, padded on the right.

        Args:
            token_ids_BT: int64; whole rows, or what follows the prompt if prompts are given.
            mask_BT: bool, the places to score; never the first place of a whole row.
            temperature_B: the rows' sampling temperatures.
            prompt_ids_PT: distinct prompts, computed once each.
            prompt_lengths_P: their lengths.
            prompt_of_row_B: which prompt each row follows.
            entropy_gradient: whether entropies carry a gradient too.

        Returns:
            (B, T) log-probs with gradient, and (B, T) entropies in nats; both 0 where nothing is asked.
        """
        before = self._trunk.before(token_ids_BT, mask_BT, prompt_ids_PT, prompt_lengths_P, prompt_of_row_B)
        asked_BU = before.asked
        state_D, temperature_D, context_N = _distinct_contexts(before.state_of, temperature_B, asked_BU)
        inputs = (before.states.index_select(0, state_D), temperature_D, context_N, before.token_ids[asked_BU])
        logprobs_N, entropy_N = self.head(*inputs, entropy_gradient=entropy_gradient)
        empty_BU = torch.zeros(asked_BU.shape, dtype=logprobs_N.dtype, device=mask_BT.device)
        both = (empty_BU.masked_scatter(asked_BU, logprobs_N), empty_BU.masked_scatter(asked_BU, entropy_N))
        return self._trunk.aligned(both[0], mask_BT), self._trunk.aligned(both[1], mask_BT)


def _distinct_contexts(state_of_BU: Tensor, temperature_B: Tensor, asked_BU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of a hidden state and a temperature that something is asked about, each once.

    Returns:
        (D,) their states, (D,) their temperatures, and (N,) which of them each place has.
    """
    temperatures, temperature_of_B = temperature_B.unique(return_inverse=True)
    pair_BU = state_of_BU * len(temperatures) + temperature_of_B[:, None]
    pair_D, context_N = pair_BU[asked_BU].unique(return_inverse=True)
    return pair_D // len(temperatures), temperatures[pair_D % len(temperatures)], context_N


def score_tokens(
    logits_DV: Tensor, temperature_D: Tensor, context_N: Tensor, targets_N: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of targets, and entropies, of the distributions softmax(logits / temperature).

    A temperature of 0 (greedy) reports the untempered distribution, as engines do.

    Args:
        logits_DV: of distinct contexts.
        temperature_D: theirs.
        context_N: int64, which context each target has.
        targets_N: int64 token ids.
        entropy_gradient: whether entropies carry a gradient too.

    Returns:
        (N,) log-probs with gradient, (N,) entropies in nats, with gradient if asked for; float32, or float64 for float64
        logits.
    """
    temperature_D = torch.where(temperature_D > 0, temperature_D, 1.0)
    logits_DV = logits_DV.to(torch.promote_types(logits_DV.dtype, torch.float32))
    if not bool((temperature_D == 1).all()):  # else a pass over the logits, and one back, for nothing
        logits_DV = logits_DV / temperature_D[:, None]
    if entropy_gradient and torch.is_grad_enabled():
        logprobs_DV = logits_DV.log_softmax(dim=-1)
        finite_DV = logprobs_DV.clamp(min=torch.finfo(logprobs_DV.dtype).min)  # 0 times minus infinity has no gradient
        entropy_D = -(logprobs_DV.exp() * finite_DV).sum(dim=-1)
        return logprobs_DV[context_N, targets_N], entropy_D[context_N]
    return _Scores.apply(logits_DV, context_N, targets_N)


class _Scores(torch.autograd.Function):
    """Log-probs of targets, with gradient, and entropies, without.

    The gradient at logit j is that of the log-prob times (1 if j is the target, else 0) minus p_j. The probabilities are at
    hand from the entropies; automatic differentiation would instead fill a table with zeros and pass over three of them.
    """

    @staticmethod
    def forward(ctx: Any, logits_DV: Tensor, context_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        table_DV = logits_DV.log_softmax(dim=-1)
        logprobs_N = table_DV[context_N, targets_N]
        probabilities_DV = table_DV.exp()
        entropy_D = -table_DV.mul_(probabilities_DV).sum(dim=-1)
        if bool(entropy_D.isnan().any()):  # a logit of minus infinity adds nothing
            entropy_D = -table_DV.nan_to_num_(nan=0.0).sum(dim=-1)
        entropy_N = entropy_D[context_N]
        ctx.save_for_backward(probabilities_DV, context_N, targets_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """In place, as such tables are large: a second pass through the same graph is an error, which autograd reports."""
        probabilities_DV, context_N, targets_N = ctx.saved_tensors
        gradient_D = gradient_N.new_zeros(len(probabilities_DV)).index_add_(0, context_N, gradient_N)
        gradient_DV = probabilities_DV.mul_(-gradient_D[:, None])
        return gradient_DV.index_put_((context_N, targets_N), gradient_N, accumulate=True), None, None
