"""Case D07 and the policy's promise: the values and gradients of a plain transformers forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import trainer.layout
from laminar.config.system import ModelConfig
from laminar.config.trainer import TrainerConfig
from laminar.errors import ConfigError, InvariantError
from laminar.types import Chain, WeightVersion, given, sampled
from trainer import folding, trunk
from trainer.batches import Layout
from trainer.layout import common_layout, model_layout, packs_rows
from trainer.model import can_share_prompts, load_model
from trainer.packing import make_row, pack_rows
from trainer.policy import Policy, score_tokens

VERSION = WeightVersion(0, 0)
CPU = torch.device("cpu")


def tiny_llama(**fields):
    torch.manual_seed(0)
    config = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0, **fields}
    return LlamaForCausalLM(LlamaConfig(**config)).double()


def chain_of(generator, *lengths):
    """Given and sampled segments in turn, beginning with a given one."""
    draw = [generator.integers(1, 37, length) for length in lengths]
    return Chain(
        tuple(given(ids) if i % 2 == 0 else sampled(ids, -np.ones(len(ids)), VERSION) for i, ids in enumerate(draw))
    )


def row_of(chain, name="t", prompt=0, temperature=1.0):
    tokens = int(chain.mask().sum())
    return make_row(chain, name=name, prompt=prompt, temperature=temperature, advantage=1.0, sequence_tokens=tokens)


def make_rows():
    """Two groups with prompts of unlike lengths, unlike responses, one with a tool's answer in the middle."""
    generator = np.random.default_rng(0)
    rows = []
    for prompt, length in enumerate([5, 3]):
        start = chain_of(generator, length).segments
        for tail in ([4], [1], [2, 3, 2]):
            chain = Chain(start + chain_of(generator, 0, *tail).segments[1:])
            rows.append(row_of(chain, f"t{len(rows)}", prompt, temperature=0.5 + 0.25 * len(rows)))
    return rows


def forward(model, rows, layout, max_logits_bytes=2**28):
    packed = pack_rows(rows, share_prompts=layout.shares_prompts, device=CPU)
    shared = packed.prompts
    extra = (shared.token_ids, shared.lengths, shared.of_row) if shared else ()
    policy = Policy(model, max_logits_bytes, layout=layout)
    logprobs, entropy = policy(packed.token_ids, packed.mask, packed.temperature, *extra)
    return logprobs, entropy, packed


def assert_like_a_plain_forward(model, rows, logprobs, entropy, packed):
    """In values and in gradients."""
    assert (logprobs[~packed.mask] == 0).all()
    expected = list(naive(model, rows))
    torch.testing.assert_close(logprobs[packed.mask], torch.cat([row[0] for row in expected]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropy[packed.mask], torch.cat([row[1] for row in expected]), rtol=1e-9, atol=1e-9)
    ours = gradients(model, logprobs, packed)
    model.zero_grad()
    sum(weight * row[0].sum() for weight, row in enumerate(naive(model, rows), start=1)).backward()
    assert relative_difference(ours, {name: parameter.grad for name, parameter in model.named_parameters()}) < 1e-6


def gradients(model, logprobs, packed):
    model.zero_grad()
    weights = torch.arange(1, len(packed.names) + 1, dtype=logprobs.dtype)[:, None]
    (logprobs * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def naive(model, rows):
    """One row at a time, no padding, all logits: the log-probs and entropies of the trained places, row after row."""
    for row in rows:
        logits = model(input_ids=torch.tensor(row.token_ids[None], dtype=torch.int64)).logits[0] / row.temperature
        distribution = torch.distributions.Categorical(logits=logits)
        places = torch.tensor(np.flatnonzero(row.mask))
        tokens = torch.tensor(row.token_ids, dtype=torch.int64)[places]
        logprobs = logits.log_softmax(-1)[places - 1, tokens]
        yield logprobs, distribution.entropy()[places - 1]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("chunk_bytes", [2**28, 1024])
def test_values_and_gradients_equal_a_plain_forward(layout, chunk_bytes):
    model, rows = tiny_llama(), make_rows()
    assert_like_a_plain_forward(model, rows, *forward(model, rows, layout, chunk_bytes))


def rows_of_ids(*pairs):
    """A row for each pair of a prompt and an answer; rows with equal prompts share them."""
    prompts = list(dict.fromkeys(prompt for prompt, _ in pairs))
    chains = [Chain((given(prompt), sampled(answer, -np.ones(len(answer)), VERSION))) for prompt, answer in pairs]
    return [row_of(chain, f"t{i}", prompts.index(pairs[i][0])) for i, chain in enumerate(chains)]


ALIKE = rows_of_ids(
    ((3, 4), (5, 6, 7, 8)),
    ((3, 4), (5, 6, 9, 8)),  # two tokens as above
    ((3, 4), (5, 6, 7, 8)),  # all
    ((3, 4), (5, 6)),  # ends where others go on
    ((3, 4, 5), (6, 7)),  # its prompt is the beginning of an answer
    ((9, 4), (5, 6, 7)),  # begins otherwise: nothing in common, though what follows is alike
)


def test_tokens_that_rows_begin_with_alike_are_computed_once():
    """3 4 5 6 7, a 9 beside that 7, and 9 4 5 6: ten tokens, and rows alone have 26 that something is asked after."""
    shared = pack_rows(ALIKE, share_prompts=True, device=CPU)
    prompts = (shared.prompts.token_ids, shared.prompts.lengths, shared.prompts.of_row)
    folded = folding.fold(shared.token_ids, shared.mask, *prompts)
    assert sorted(zip(folded.places.tolist(), folded.token_ids.tolist(), strict=True)) == [
        (0, 3), (0, 9), (1, 4), (1, 4), (2, 5), (2, 5), (3, 6), (3, 6), (4, 7), (4, 9),
    ]  # fmt: skip
    assert folded.sees.sum(dim=1).tolist() == (folded.places + 1).tolist()
    ids = folded.token_ids
    assert ids[folded.before].tolist() == [
        [4, 5, 6, 7], [4, 5, 6, 9], [4, 5, 6, 7], [4, 5, 3, 3], [5, 6, 3, 3], [4, 5, 6, 3],
    ]  # fmt: skip
    model = tiny_llama()
    assert_like_a_plain_forward(model, ALIKE, *forward(model, ALIKE, Layout.FOLDED))


@pytest.mark.parametrize("seed", range(8))
def test_random_rows_of_few_tokens_which_mostly_begin_alike(seed):
    """Prompts too: some are the beginning of others. What is given after a tool's call is not asked about."""
    generator = np.random.default_rng(seed)

    def draw(most):
        return generator.integers(1, 3, generator.integers(1, most)).tolist()

    rows = []
    for prompt in range(3):
        start = given(draw(4))
        for _ in range(4):
            first, tool, last = (draw(5) for _ in range(3))
            parts = [sampled(ids, -np.ones(len(ids)), VERSION) for ids in (first, last)]
            row = row_of(Chain((start, parts[0], given(tool), parts[1])), f"t{len(rows)}", prompt)
            rows.append(replace(row, temperature=float(generator.choice([0.75, 1.0]))))
    model = tiny_llama()
    assert_like_a_plain_forward(model, rows, *forward(model, rows, Layout.FOLDED))


def test_contexts_that_are_alike_get_logits_once_a_temperature():
    """19 places: four contexts at temperature 1; at 0.5 the first three of them and 3 4 5 6 9, and three of the last row."""
    rows = [replace(row, temperature=0.5 if i % 2 else 1.0) for i, row in enumerate(ALIKE)]
    packed = pack_rows(rows, share_prompts=True, device=CPU)
    model, seen = tiny_llama(), []
    policy = Policy(model, layout=Layout.FOLDED)
    policy.head.register_forward_hook(lambda _, inputs, outputs: seen.append((len(inputs[0]), len(outputs[0]))))
    policy(*packed.model_inputs())
    assert seen == [(4 + 4 + 3, 19)]
    for max_logits_bytes in (2**28, 4 * 37 * 3):  # in one piece, and in chunks of three places
        assert_like_a_plain_forward(model, rows, *forward(model, rows, Layout.FOLDED, max_logits_bytes))


def test_more_tokens_than_are_folded_go_by_the_cache(monkeypatch):
    model, rows = tiny_llama(), make_rows()
    monkeypatch.setattr(folding, "MOST_FOLDED_TOKENS", 20)  # 8 of prompts, 16 given of responses, none alike
    monkeypatch.setattr(trunk, "run_folded", None)
    assert_like_a_plain_forward(model, rows, *forward(model, rows, Layout.FOLDED))


def test_shared_prompts_change_no_gradient_in_float32():
    model, rows = tiny_llama().float(), make_rows()
    plain, shared, folded = (
        gradients(model, *forward(model, rows, layout)[::2]) for layout in (Layout.PADDED, Layout.SHARED, Layout.FOLDED)
    )
    assert max(relative_difference(shared, plain), relative_difference(folded, plain)) < 1e-6


def relative_difference(ours, theirs):
    """Largest over parameters, relative to the own gradient's norm (norm layers of transformers round to float32 inside)."""
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def test_a_model_with_learned_positions_shares_prompts_too():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2)).double().eval()
    rows = make_rows()
    for layout in Layout:
        logprobs, _, packed = forward(model, rows, layout)
        torch.testing.assert_close(logprobs[packed.mask], torch.cat([row[0] for row in naive(model, rows)]))


MODELS = {
    "llama": tiny_llama,
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    ).double(),
    "sliding": lambda: MistralForCausalLM(
        MistralConfig(
            vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=4,
        )
    ).double(),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_values_and_gradients_of_rows_alone(name):
    torch.manual_seed(0)
    model, rows = MODELS[name](), make_rows()
    assert_like_a_plain_forward(model, rows, *forward(model, rows, Layout.PACKED))


class Alone:
    """Ranks of one."""

    sequence, device = None, CPU


def test_packing_is_refused_for_a_model_that_does_not_look_at_positions(caplog, monkeypatch):
    model = tiny_llama().float()
    assert packs_rows(model, TrainerConfig(pack_rows="on"), Alone)
    assert not packs_rows(model, TrainerConfig(), Alone)  # no flash attention here
    forward = model.model.forward
    model.model.forward = lambda *, position_ids=None, **arguments: forward(**arguments)
    with pytest.raises(ConfigError, match=r'relative error 0\.\d+; .* set trainer\.pack_rows = "off"'):
        packs_rows(model, TrainerConfig(pack_rows="on"), Alone)
    monkeypatch.setattr(trainer.layout, "uses_flash", lambda model: True)
    assert not packs_rows(model, TrainerConfig(), Alone)
    assert "trainer.pack_rows is off: packed rows come out otherwise than alone" in caplog.text


def test_prompts_are_folded_where_a_model_keeps_to_the_mask_it_is_given(caplog):
    model = tiny_llama().float()
    assert model_layout(model, TrainerConfig(), Alone) is Layout.FOLDED
    assert model_layout(model, TrainerConfig(), Alone, is_partitioned=True) is Layout.SHARED
    assert model_layout(model, TrainerConfig(share_prompts=False), Alone) is Layout.PADDED
    assert model_layout(MODELS["sliding"]().float(), TrainerConfig(), Alone) is Layout.PADDED
    forward = model.model.forward
    model.model.forward = lambda *, attention_mask=None, **arguments: forward(**arguments)
    assert model_layout(model, TrainerConfig(), Alone) is Layout.SHARED
    assert "not folded: they come out otherwise than alone (relative error 0." in caplog.text

    def count_places(*, attention_mask=None, **arguments):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("a mask of rows is wanted")
        return forward(**arguments)

    model.model.forward = count_places
    assert model_layout(model, TrainerConfig(), Alone) is Layout.SHARED
    assert "not folded: the model takes no mask of its tokens: a mask of rows is wanted" in caplog.text
    model.config._attn_implementation = "eager"
    assert model_layout(model, TrainerConfig(), Alone) is Layout.SHARED


@pytest.mark.parametrize(
    ("policy", "others", "expected"),
    [
        ("folded", [], "folded"),
        ("folded", ["folded"], "folded"),
        ("folded", ["shared"], "shared"),
        ("shared", ["folded"], "shared"),
        ("folded", ["folded", "padded"], "padded"),
        ("packed", ["folded"], "packed"),
        ("padded", ["folded"], "padded"),
    ],
)
def test_models_that_score_one_batch_agree_on_a_layout(policy, others, expected):
    assert common_layout(Layout(policy), map(Layout, others)) is Layout(expected)


@pytest.mark.parametrize("layout", Layout)
def test_a_micro_batch_of_nothing_gives_zero_gradients_everywhere(layout):
    model = tiny_llama()
    logprobs, _, packed = forward(model, [], layout)
    assert all((gradient == 0).all() for gradient in gradients(model, logprobs, packed).values())


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.7, [-0.270674, -1.699245, -3.127817, -4.556388]),
        (1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        (1.5, [-0.648333, -1.314999, -1.981666, -2.648333]),
        (0.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
    ],
)
def test_logprobs_and_entropy_are_of_the_tempered_distribution(temperature, expected):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(4, 4)
    logprobs, entropy = score_tokens(logits, torch.full((4,), temperature), torch.arange(4), torch.arange(4))
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=1e-5, rtol=0)
    assert entropy[0].item() == pytest.approx(-sum(np.exp(p) * p for p in expected), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_finite_differences(temperature):
    torch.manual_seed(0)
    logits, step = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), 1e-5
    contexts, targets = torch.tensor([2, 0, 1, 0, 0]), torch.tensor([6, 0, 3, 5, 0])  # one has three, two of them alike
    temperatures, weights = torch.full((3,), temperature).double(), torch.tensor([1.0, -2.0, 0.5, 3.0, 0.25]).double()

    def loss(logits):
        return (score_tokens(logits, temperatures, contexts, targets)[0] * weights).sum()

    loss(logits).backward()
    nudges = step * torch.eye(21, dtype=torch.float64).reshape(21, 3, 7)
    with torch.no_grad():
        expected = torch.stack([(loss(logits + nudge) - loss(logits - nudge)) / (2 * step) for nudge in nudges])
    torch.testing.assert_close(logits.grad, expected.reshape(3, 7), atol=1e-8, rtol=0)


def test_a_gradient_is_made_once():
    """It takes the place of the probabilities: a second pass is refused, never wrong."""
    logits = torch.zeros(1, 4, requires_grad=True)
    logprobs, _ = score_tokens(logits, torch.ones(1), torch.tensor([0]), torch.tensor([1]))
    logprobs.sum().backward(retain_graph=True)
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.75, -0.25, -0.25]]))
    with pytest.raises(RuntimeError, match="inplace operation"):
        logprobs.sum().backward()


def test_an_impossible_token_leaves_the_entropy_defined():
    none = torch.tensor([0])
    _, entropy = score_tokens(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.ones(1), none, none)
    assert entropy.item() == pytest.approx(np.log(2), abs=1e-6)


def test_an_impossible_token_leaves_the_gradient_of_the_entropy_defined():
    """dH / dz_j = -p_j (log p_j + H); at p = 0 its limit is 0."""
    none, values = torch.tensor([0]), [np.log(3), 0.0, -np.inf]
    logits = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    _, entropy = score_tokens(logits, torch.ones(1), none, none, entropy_gradient=True)
    entropy.sum().backward()
    expected = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert entropy.item() == pytest.approx(expected)
    slope = -0.75 * (np.log(0.75) + expected)
    assert logits.grad[0].tolist() == pytest.approx([slope, -slope, 0.0])


def test_tokens_after_the_last_trained_one_are_cut_off():
    chain = Chain((given([1, 2]), sampled([3, 4], [-1, -1], VERSION), given([5, 6, 7])))
    row = row_of(chain)
    assert row.token_ids.tolist() == [1, 2, 3, 4]
    assert (row.shape.prompt_tokens, row.shape.response_tokens) == (2, 2)


def test_masks_come_from_lengths_so_a_pad_equal_to_an_end_id_stays_trained():
    answers = ([5, 6, 0], [5, 21], [5, 6, 7, 8], [5, 6, 7, 0])
    rows = [row_of(Chain((given([9]), sampled(ids, [-1.0] * len(ids), VERSION)))) for ids in answers]
    mask = pack_rows(rows, share_prompts=True, device=CPU).mask
    assert mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_a_row_without_a_prompt_is_refused_by_name():
    with pytest.raises(InvariantError, match="trajectory t7"):
        row_of(Chain((sampled([1], [-1.0], VERSION),)), name="t7")


def test_sliding_windows_turn_sharing_off():
    assert can_share_prompts(tiny_llama())
    sliding = MistralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, sliding_window=4
    )
    assert not can_share_prompts(MistralForCausalLM(sliding))


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    model = tiny_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping = 30"):
        Policy(model)


def test_weights_that_are_a_pickle_are_refused_and_the_same_in_safetensors_load(tmp_path):
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    assert load_model(config, gradient_checkpointing=False).num_parameters() == model.num_parameters()
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"safetensors \(not \.bin\)"):
        load_model(config, gradient_checkpointing=False)
