"""A Hugging Face causal model of the Llama family, run without padding and with its weights mapped from a file.

The modules are transformers' own (norms, projections, rotary tables, MLP); only attention is ours, so that keys and values
are written once, in place, and never repeated for grouped heads.

Invariants: the parameters are views into the mapped file; a tied head *is* the embedding, whatever a payload names; nothing
is assigned before every name and shape has been checked.
Shapes: N tokens of all sequences in one row (prefill) or one token of each (decode), R running rows, C contexts of theirs, Q
query heads, K key-value heads, D head size. This module knows neither requests nor sampling.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from laminar.errors import EngineError
from rollout.engines.key_values import KeyValues, Shape
from rollout.engines.mapped_weights import MappedWeights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHUNK_ROWS = 8
"""Rows whose attention is computed together: a chunk is as wide as its longest row, so short rows need their own."""
SCORED_ROWS = 64
"""Rows whose logits exist at once while a prompt is scored."""
WIDTH_STEP = 8
"""Chunk widths are multiples of this: sums over a row then do not depend on its neighbours' lengths."""
INVARIANT_ROWS = 4
"""Matrix products of fewer rows than this take other kernels, whose sums differ in the last bit."""

SLOW_ROWS, QUICK_ROWS = range(9, 16), 16
"""So few rows are padded to 16, since matrix products of theirs take longer (MKL, AVX-512: a step of 12 by a quarter)."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Active rows [start, end) and how far attention looks; `mask` (n, 1, 1, width) is None if all rows are that long."""

    start: int
    end: int
    width: int
    mask: torch.Tensor | None


class CausalModel:
    """The model, its configuration and the mapped weights it serves.

    Args:
        folder: HF checkpoint: `config.json`, `model.safetensors`.
        batch_invariant: pad tiny batches, so that a row's numbers do not depend on how many others run (costs up to 2x at
            batches of fewer than 4 contexts).

    Raises:
        EngineError: if the architecture is not served or the weights do not fit it.
    """

    def __init__(self, folder: Path, *, batch_invariant: bool = False) -> None:
        if not (folder / "config.json").is_file():
            raise EngineError(f"{folder} holds no config.json; name the folder of a Hugging Face checkpoint")
        self.config = transformers.AutoConfig.from_pretrained(folder)
        check_architecture(self.config)
        self._model = build_empty(self.config)
        self._min_rows = INVARIANT_ROWS if batch_invariant else 1
        self._mapped: MappedWeights | None = None
        self.swap(folder)
        self.end_ids = end_ids(self.config, folder)

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return int(self.config.vocab_size)

    @property
    def max_tokens(self) -> int:
        """Longest sequence: the position range, or a sliding window if the model has one (windows are not implemented)."""
        window = getattr(self.config, "sliding_window", None) if uses_window(self.config) else None
        return min(int(self.config.max_position_embeddings), window or 1 << 30)

    def shape(self) -> Shape:
        """What the key-value store must hold."""
        attention = self._model.model.layers[0].self_attn
        heads = int(self.config.num_key_value_heads)
        return Shape(int(self.config.num_hidden_layers), heads, int(attention.head_dim), attention.k_proj.weight.dtype)

    def swap(self, folder: Path) -> None:
        """Serve the weights of `folder` from now on; the old file's lock is given back.

        Raises:
            EngineError: if the file is not whole or does not fit; the weights served before stay assigned.
        """
        mapped = MappedWeights(folder)
        with ExitStack() as undo:
            undo.callback(mapped.close)
            tensors = fitting(
                self._model, mapped.tensors, tied=bool(self.config.tie_word_embeddings), where=str(mapped.path)
            )
            undo.pop_all()
        assign(self._model, tensors)
        if self._mapped is not None:
            self._mapped.close()
        self._mapped = mapped

    def close(self) -> None:
        """Give the lock of the mapped file back."""
        if self._mapped is not None:
            self._mapped.close()

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters as assigned, by name; a tied head is named too."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    def prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[int], store: KeyValues) -> torch.Tensor:
        """Run whole sequences, packed in one row without padding, and write their keys and values.

        Returns:
            (len(sequences), H): the hidden state after each sequence's last token.
        """
        bounds, start = [], 0
        for sequence in sequences:
            bounds.append((start, start + len(sequence)))
            start += len(sequence)
        padding = [0] * max(0, self._min_rows - start)
        ids = torch.tensor([token for sequence in (*sequences, padding) for token in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in (*sequences, padding)])

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            mixed = torch.zeros_like(queries)
            for row, (first, last) in zip(rows, bounds, strict=True):
                k, v = keys[first:last].transpose(0, 1), values[first:last].transpose(0, 1)
                store.keys[layer][row, :, : last - first] = k
                store.values[layer][row, :, : last - first] = v
                q = queries[first:last].transpose(0, 1)[None]
                scale = self._model.model.layers[layer].self_attn.scaling
                out = functional.scaled_dot_product_attention(
                    q, k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
                )
                mixed[first:last] = out[0].transpose(0, 1)
            return mixed

        hidden = self._run(ids, positions, attend)
        return hidden[[last - 1 for _, last in bounds]]

    def decode(
        self, ids: Sequence[int], lengths: Sequence[int], context_of: Sequence[int], store: KeyValues
    ) -> torch.Tensor:
        """Advance the active rows 0 … R-1 by one token each; of rows of one context, all but attention is computed once.

        Args:
            ids: R tokens to be read.
            lengths: R numbers of tokens that the rows hold already; the new token's position.
            context_of: R numbers, counted by first appearance; rows with the same number hold and read the same.
            store: where keys and values lie.

        Returns:
            (C, H) hidden states, one a context.
        """
        num_rows, num_contexts = len(ids), max(context_of) + 1
        of_row: slice | torch.Tensor = slice(None)
        first: slice | torch.Tensor = slice(None)
        if num_contexts < num_rows:
            of_row, first = torch.tensor(context_of), torch.tensor([context_of.index(c) for c in range(num_contexts)])
        positions, active = torch.tensor(lengths), torch.arange(num_rows)
        chunks = plan_chunks([length + 1 for length in lengths])
        heads = int(self.config.num_key_value_heads)
        padding = self._padding(num_contexts)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            stored_keys, stored_values = store.keys[layer], store.values[layer]
            stored_keys[active, :, positions] = keys[:num_contexts][of_row]
            stored_values[active, :, positions] = values[:num_contexts][of_row]
            queries = queries[:num_contexts][of_row] * self._model.model.layers[layer].self_attn.scaling
            grouped = queries.view(num_rows, heads, -1, queries.shape[-1])
            mixed = torch.empty_like(grouped)
            for chunk in chunks:
                rows = slice(chunk.start, chunk.end)
                scores = grouped[rows] @ stored_keys[rows, :, : chunk.width].transpose(2, 3)
                if chunk.mask is not None:
                    scores += chunk.mask
                mixed[rows] = scores.softmax(-1) @ stored_values[rows, :, : chunk.width]
            mixed = mixed.view(queries.shape)[first]
            return functional.pad(mixed, (0, 0, 0, 0, 0, padding)) if padding else mixed

        ids_C, positions_C = (functional.pad(part[first], (0, padding)) for part in (torch.tensor(ids), positions))
        return self._run(ids_C, positions_C, attend)[:num_contexts]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(R, V) float32 for (R, H) hidden states."""
        num_rows = len(hidden)
        hidden = functional.pad(hidden, (0, 0, 0, self._padding(num_rows)))
        return self._model.lm_head(hidden)[:num_rows].float()

    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probs (T - 1) of a sequence's tokens but the first, at temperature 1, by a pass that leaves no trace."""

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            q, k, v = (states.transpose(0, 1)[None] for states in (queries, keys, values))
            scale = self._model.model.layers[layer].self_attn.scaling
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return out[0].transpose(0, 1).reshape(queries.shape)

        hidden = self._run(torch.tensor(ids), torch.arange(len(ids)), attend)[:-1]
        targets = torch.tensor(ids[1:])[:, None]
        parts = zip(hidden.split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True)
        return [value for rows, of in parts for value in self.logits(rows).log_softmax(-1).gather(1, of)[:, 0].tolist()]

    def read_back(self) -> tuple[str, str]:
        """The checksum of the bytes that are served, and how they differ from the manifest beside them."""
        assert self._mapped is not None
        return self._mapped.read_back()

    def _padding(self, num_rows: int) -> int:
        """How many rows are computed beside these, for nothing."""
        return (QUICK_ROWS if num_rows in SLOW_ROWS else max(self._min_rows, num_rows)) - num_rows

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(N, H): the decoder over N tokens, each at its own position."""
        decoder = self._model.model
        hidden = decoder.embed_tokens(ids)
        cosine, sine = (table[0, :, None] for table in decoder.rotary_emb(hidden[None], positions[None]))
        for index, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            states = normalize(layer.input_layernorm, hidden)
            heads = (len(states), -1, attention.head_dim)
            queries, keys = attention.q_proj(states).view(heads), attention.k_proj(states).view(heads)
            if hasattr(attention, "q_norm"):
                queries, keys = normalize(attention.q_norm, queries), normalize(attention.k_norm, keys)
            num_heads = queries.shape[1]
            turned = rotate(torch.cat((queries, keys), dim=1), cosine, sine)
            queries, keys = turned[:, :num_heads], turned[:, num_heads:]
            mixed = attend(index, queries, keys, attention.v_proj(states).view(heads))
            hidden = attention.o_proj(mixed.view(len(states), -1)).add_(hidden)
            states = normalize(layer.post_attention_layernorm, hidden)
            mlp = layer.mlp
            hidden = mlp.down_proj(mlp.act_fn(mlp.gate_proj(states)).mul_(mlp.up_proj(states))).add_(hidden)
        return normalize(decoder.norm, hidden)


def normalize(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """A model's RMS norm; in float32 by the fused operator, which gives the same in half the time."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    return norm(x)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (RoFormer) of (N, heads, D) by tables (N, 1, D), halves rotated as in transformers."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosine + turned.mul_(sine)


def plan_chunks(lengths: Sequence[int]) -> list[Chunk]:
    """Cut the active rows into chunks, neighbours of one width together; `lengths` include the token being read."""
    bounds: list[tuple[int, int, int]] = []
    for start in range(0, len(lengths), CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, len(lengths))
        width = -(-max(lengths[start:end]) // WIDTH_STEP) * WIDTH_STEP
        if bounds and bounds[-1][2] == width:
            start = bounds.pop()[0]
        bounds.append((start, end, width))
    return [make_chunk(lengths[start:end], start, width) for start, end, width in bounds]


def make_chunk(part: Sequence[int], start: int, width: int) -> Chunk:
    """A chunk and, if some row is shorter than it is wide, its mask."""
    mask = None
    if min(part) < width:
        outside = torch.arange(width) >= torch.tensor(part)[:, None]
        mask = torch.zeros(len(part), 1, 1, width).masked_fill_(outside[:, None, None], float("-inf"))
    return Chunk(start, start + len(part), width, mask)


def check_architecture(config: Any) -> None:
    """Refuse models that this engine would compute wrongly.

    Raises:
        EngineError: naming what is served.
    """
    names = config.architectures or []
    if not any(name in ARCHITECTURES for name in names):
        raise EngineError(f"the torch engine serves {', '.join(ARCHITECTURES)}, not {names}; use another engine kind")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in FIXED_ROPE_TYPES:
        raise EngineError(f"rope type {kind!r} depends on the batch; the torch engine serves {', '.join(FIXED_ROPE_TYPES)}")


def uses_window(config: Any) -> bool:
    """Whether any layer attends within a sliding window only."""
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else config.model_type == "mistral"


def build_empty(config: Any) -> Any:
    """The model without weights (on the meta device), but with its rotary tables, which no checkpoint holds."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval().requires_grad_(False)


def fitting(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool, where: str) -> dict[str, torch.Tensor]:
    """The tensors for all parameter names, tied ones included, after checking every name and shape.

    Raises:
        EngineError: naming what is missing, too much, or of another shape.
    """
    found = dict(tensors)
    if tied:
        shared = found.get(EMBEDDING, found.get(HEAD))
        if shared is not None:
            if HEAD in found and not torch.equal(found[HEAD], shared):
                raise EngineError(f"{where}: the model ties {HEAD} to {EMBEDDING}, but the two differ; publish one of them")
            found[EMBEDDING] = found[HEAD] = shared
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    missing, extra = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    wrong = [
        f"{name} {tuple(found[name].shape)} for {tuple(shapes[name])}"
        for name in shapes.keys() & found.keys()
        if found[name].shape != shapes[name]
    ]
    if missing or extra or wrong:
        raise EngineError(
            f"{where} does not fit the model: missing {missing}, not known {extra}, of another shape {sorted(wrong)}"
        )
    return found


def assign(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Point the model's parameters at `tensors`; one parameter object where two names share a tensor.

    A tensor of another dtype than the model serves is converted, and so copied.
    """
    dtype = model.config.dtype or torch.float32
    made: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            made[id(tensor)] = nn.Parameter(tensor.to(dtype), requires_grad=False)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[id(tensor)])


def end_ids(config: Any, folder: Path) -> frozenset[int]:
    """Every end id that the checkpoint declares, in `generation_config.json` or `config.json` (cases D10)."""
    declared = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        declared.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    ids: set[int] = set()
    for value in declared:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
