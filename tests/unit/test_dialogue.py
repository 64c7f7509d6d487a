"""What a chat template adds turn by turn; the ids that the engine saw are the ids that are stored (case D09)."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from laminar.types import ClaimedGroup, FailureKind, FinishReason, Message, Prompt, SamplingParameters, sampled
from rollout.dialogue import Dialogue, Fit
from rollout.environments.base import Observation, StepResult
from rollout.episode import play_episode
from rollout.generation import Generation
from rollout.rewards.scorer import RewardScorer, Term
from rollout.scripted import VERSION
from rollout.tokens import HuggingFaceTokenizer

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m"

IM = "<|im_start|>{{ m.role }}\n"
# Each is written for this test after the way its family behaves; comments say what is peculiar.
TEMPLATES = {
    "qwen2.5": (  # tool results are told by the user, several of them in one message
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}" + IM + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen3": (  # reasoning is left out of every turn before the last question of the user
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}"
        + IM
        + "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
        "{% elif m.role == 'assistant' and '</think>' in m.content %}"
        + IM
        + "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}" + IM + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (  # contents are trimmed, tools are `ipython`, their results JSON
        "<|begin_of_text|>{% for m in messages %}"
        "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
        "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "smollm": "{% for m in messages %}" + IM + "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "deepseek": (  # no newline around turns; reasoning is left out at once; the prompt opens it
        "<s>{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
        "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|/tool|>"
        "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    ),
}
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
END = {"llama3": "<|eot_id|>", "deepseek": "<|end|>"}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>",
    "<|User|>", "<|Assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|endoftext|>",
]  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog; 12 + 30 = 42, and 7 * 8 = 56.",
    '{"name": "calculate", "arguments": {"expression": "3 + 4"}} <tool_call> </tool_call> <think> </think>',
    "Übermäßig viele Zeichen: naïve café, 東京, Москва, 🙂 tabs\tand\n\nnewlines   and blanks",
]


def byte_level():
    """As of GPT-2 and Qwen: merges over bytes, so that a token may hold half a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return tokenizer, trainer


def byte_fallback():
    """As of Llama 2: blanks are marked, unknown characters fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False)
    return tokenizer, trainer


def unigram():
    """As of T5: the likeliest split, over bytes here so that nothing is unknown."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    return tokenizer, trainer


def train(make):
    tokenizer, trainer = make()
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def trained():
    return {make.__name__: train(make) for make in (byte_level, byte_fallback, unigram)}


def with_template(tokenizer, family):
    tokenizer.chat_template = TEMPLATES[family]
    return HuggingFaceTokenizer(tokenizer, family)


@pytest.fixture
def tokenizer_of(trained):
    return lambda family, kind="byte_level": with_template(trained[kind], family)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_short_way_through_a_template_writes_what_the_packages_own_does(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    tokenizer._tokenizer.chat_template = "{{ bos_token }}" + TEMPLATES[family] + "{{ tools | tojson if tools }}"
    tokenizer = HuggingFaceTokenizer(tokenizer._tokenizer, family)
    messages = [{"role": "user", "content": "é "}, {"role": "assistant", "content": "<think>\na</think>b"}]
    messages += [{"role": "tool", "content": "1"}, {"role": "user", "content": "<b>?"}]
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    assert tokenizer._templates_plainly
    for shown in ((), tools):
        wanted = tokenizer._tokenizer.apply_chat_template(
            messages, tools=list(shown) or None, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.render(messages, shown) == wanted


ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
TOOL = [{"role": "tool", "content": "7"}]
NEXT = [{"role": "user", "content": "And 5 + 6?"}]


def go_on(tokenizer, family, turn, messages=TOOL, end=None):
    """Show `messages` behind `turn`; how it fits, the text of what is new, and the dialogue's first text."""
    dialogue = Dialogue(tokenizer, ASK)
    first = tokenizer.decode(dialogue.first_token_ids(), keep_special=True)
    end = END.get(family, "<|im_end|>") if end is None else end
    continuation = dialogue.go_on(tokenizer.encode_observation(turn + end), messages)
    return continuation.fit, tokenizer.decode(continuation.token_ids, keep_special=True), first


@pytest.mark.parametrize(
    ("family", "new"),
    [
        ("qwen2.5", "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("llama3", HEADER.format("ipython") + '"7"<|eot_id|>' + HEADER.format("assistant")),
        ("smollm", "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"),
        ("deepseek", "<|tool|>7<|/tool|><|Assistant|>"),
    ],
)  # fmt: skip
def test_only_what_stands_behind_the_sampled_turn_is_new(tokenizer_of, family, new):
    tokenizer = tokenizer_of(family)
    assert go_on(tokenizer, family, '<tool_call>{"name": "add"}</tool_call>')[:2] == (Fit.APPENDED, new)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_turn_cut_short_gets_the_end_marker_as_given_text(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    end = END.get(family, "<|im_end|>")
    fit, whole, _ = go_on(tokenizer, family, "I was say")
    assert (fit, go_on(tokenizer, family, "I was say", end="")[:2]) == (Fit.APPENDED, (Fit.APPENDED, end + whole))


@pytest.mark.parametrize("family", ["llama3"])
def test_a_template_that_trims_is_a_drift_and_the_rest_still_follows(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    fit, new, _ = go_on(tokenizer, family, " seven \n")
    assert (fit, new) == (Fit.DRIFTED, go_on(tokenizer, family, "seven")[1])
    assert go_on(tokenizer, family, " seven \n", end="")[1] == "<|eot_id|>" + new


def test_another_end_marker_than_the_templates_is_a_drift(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    fit, new, _ = go_on(tokenizer, "smollm", "seven", end="<|endoftext|>")
    assert (fit, new) == (Fit.DRIFTED, "<|im_end|>" + go_on(tokenizer, "smollm", "seven")[1])


def test_reasoning_stays_until_the_users_next_question_then_a_new_context_begins(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    dialogue = Dialogue(tokenizer, ASK)
    begin = tokenizer.decode(dialogue.first_token_ids(), keep_special=True)
    first = tokenizer.encode_observation("<think>\nadd them\n</think>\n\nadd(3, 4)<|im_end|>")
    assert dialogue.go_on(first, TOOL).fit is Fit.APPENDED
    second = dialogue.go_on(tokenizer.encode_observation("<think>\ndone\n</think>\n\n7<|im_end|>"), NEXT)
    assert second.fit is Fit.REWRITTEN
    text = tokenizer.decode(second.token_ids, keep_special=True)
    assert "think" not in text
    assert text == (
        begin + "add(3, 4)<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\nAnd 5 + 6?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert dialogue.go_on(tokenizer.encode_observation("11<|im_end|>"), TOOL).fit is Fit.APPENDED


def test_other_blanks_around_reasoning_are_a_drift_not_a_new_context(tokenizer_of):
    assert go_on(tokenizer_of("qwen3"), "qwen3", "<think>add</think>seven")[0] is Fit.DRIFTED


def test_a_template_that_drops_reasoning_at_once_begins_a_new_context(tokenizer_of):
    fit, text, first = go_on(tokenizer_of("deepseek"), "deepseek", "<think>add</think>seven")
    assert (fit, text) == (Fit.REWRITTEN, first + "seven<|end|><|tool|>7<|/tool|><|Assistant|>")


# ---- whole episodes


class Chat:
    """A conversation that goes as the test says: each step shows the next messages."""

    def __init__(self, showings):
        self.showings = list(showings)

    async def reset(self, prompt):
        return Observation(tuple(Message(m["role"], m["content"]) for m in ASK))

    async def step(self, completion):
        if not self.showings:
            return StepResult(done=True)
        return StepResult(done=False, observation=Observation(self.showings.pop(0)))

    async def close(self):
        pass


class IdEngine:
    """Draws the ids it is told to, whatever they mean, and remembers what it saw."""

    def __init__(self, turns):
        self.turns, self.seen = list(turns), []

    async def generate(self, input_ids, sampling, request_id, on_segment=None):
        ids, reason = self.turns.pop(0)
        self.seen.append((input_ids.tolist(), list(ids)))
        return Generation((sampled(ids, [-1.0] * len(ids), VERSION),), reason)


async def play(tokenizer, turns, showings, **settings):
    engine = IdEngine(turns)
    trajectory = await play_episode(
        group=ClaimedGroup("0", 0, Prompt("p", "?"), (0,), 0),
        member=0,
        attempt=0,
        engine=engine,
        make_environment=lambda: Chat(showings),
        scorer=RewardScorer([Term("one", lambda prompt, text: 1.0)]),
        tokenizer=tokenizer,
        sampling=SamplingParameters(1.0, 100_000, 0),
        run_seed=0,
        wall_seconds=60,
        **settings,
    )
    return trajectory, engine


def random_dialogue(random_, vocabulary, end_id):
    """Turns of any ids at all, and what is shown between them."""
    num_turns = random_.randint(2, 5)
    turns = []
    for _ in range(num_turns):
        ids = [random_.randrange(vocabulary) for _ in range(random_.randint(1, 12))]
        stopped = random_.random() < 0.7
        turns.append((ids + [end_id] * stopped, FinishReason.STOP if stopped else FinishReason.LENGTH))
    words = [*CORPUS[0].split(), "東京", "naïve", "🙂", " ", "\n"]
    showings = [
        tuple(
            Message(random_.choice(["tool", "user"]), " ".join(random_.choices(words, k=random_.randint(1, 6))))
            for _ in range(random_.randint(1, 2))
        )
        for _ in range(num_turns - 1)
    ]
    return turns, showings


async def check_exactness(tokenizer, family, random_):
    end_id = int(tokenizer.encode_observation(END.get(family, "<|im_end|>"))[0])
    turns, showings = random_dialogue(random_, tokenizer.size, end_id)
    trajectory, engine = await play(tokenizer, turns, showings)
    assert trajectory.failure is None
    rows = [chain.token_ids() for chain in trajectory.chains]
    assert [turn.chain for turn in trajectory.turns] == sorted(turn.chain for turn in trajectory.turns)
    assert len(trajectory.turns) == len(turns)
    for turn, (ids, _), (context, drawn) in zip(trajectory.turns, turns, engine.seen, strict=True):
        assert rows[turn.chain][: turn.start].tolist() == context
        assert rows[turn.chain][turn.start : turn.end].tolist() == drawn == ids
    for index, chain in enumerate(trajectory.chains):
        trained = np.zeros(chain.num_tokens, bool)
        for turn in trajectory.turns:
            if turn.chain == index:
                trained[turn.start : turn.end] = True
        assert chain.mask().tolist() == trained.tolist()
    assert len(trajectory.chains) - 1 == trajectory.counts.get("rewritten_contexts", 0)
    return trajectory


@pytest.mark.parametrize("num_dialogues", [4, pytest.param(67, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
async def test_stored_ids_are_the_ids_that_the_engine_saw(tokenizer_of, kind, family, num_dialogues):
    tokenizer, random_ = tokenizer_of(family, kind), random.Random(f"{kind} {family}")
    for _ in range(num_dialogues):
        await check_exactness(tokenizer, family, random_)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="models/smollm2-135m has not been made")
async def test_stored_ids_are_the_ids_that_the_engine_saw_with_smollm2_and_its_own_template():
    tokenizer, random_ = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(SMOLLM2), "smollm2"), random.Random(1)
    for _ in range(1000):
        await check_exactness(tokenizer, "smollm", random_)


async def test_a_rewritten_context_makes_a_second_chain_and_is_counted(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    texts = ["<think>\na\n</think>\n\nb<|im_end|>", "c<|im_end|>"]
    turns = [(tokenizer.encode_observation(text).tolist(), FinishReason.STOP) for text in texts]
    trajectory, engine = await play(tokenizer, turns, [(Message("user", "more"),)])
    assert trajectory.counts == {"rewritten_contexts": 1}
    assert [int(chain.mask().sum()) for chain in trajectory.chains] == [len(ids) for ids, _ in turns]
    assert "think" not in tokenizer.decode(engine.seen[1][0], keep_special=True)


@pytest.mark.parametrize(("text", "counts"), [(" b ", {"drifted_turns": 1}), ("b", {})])
async def test_drift_is_counted_and_a_strict_template_refuses_it(tokenizer_of, text, counts):
    tokenizer = tokenizer_of("llama3")
    turns = [(tokenizer.encode_observation(t).tolist(), FinishReason.STOP) for t in (text + "<|eot_id|>", "c<|eot_id|>")]
    trajectory, _ = await play(tokenizer, turns, [(Message("user", "more"),)])
    strict, _ = await play(tokenizer, turns, [(Message("user", "more"),)], strict_template=True)
    assert trajectory.counts == counts
    assert (strict.failure is not None) == bool(counts)
    if strict.failure:
        assert strict.failure.kind is FailureKind.ENVIRONMENT
        assert "drifted" in strict.failure.text


async def test_plain_text_in_a_chat_is_said_by_the_user(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    turns = [(tokenizer.encode_observation("a<|im_end|>").tolist(), FinishReason.STOP)] * 2
    _, engine = await play(tokenizer, turns, ["more"])
    assert tokenizer.decode(engine.seen[1][0], keep_special=True).endswith(
        "a<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- budgets


async def test_the_turn_budget_ends_an_episode_with_its_own_reason(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    turns = [(tokenizer.encode_observation("a<|im_end|>").tolist(), FinishReason.STOP)] * 3
    trajectory, engine = await play(tokenizer, turns, ["1", "2", "3"], max_turns=2)
    assert trajectory.finish_reason is FinishReason.MAX_TURNS
    assert (len(engine.seen), trajectory.reward, trajectory.is_truncated) == (2, 1.0, False)
    assert trajectory.chains[0].mask()[-1]


async def test_an_answer_that_is_cut_in_the_last_turn_allowed_is_truncated(tokenizer_of):
    """Case D10: what the length limit cut is no answer of the policy's, whichever budget ends the episode."""
    tokenizer = tokenizer_of("smollm")
    whole = tokenizer.encode_observation("a<|im_end|>").tolist()
    turns = [(whole, FinishReason.STOP), (whole[:1], FinishReason.LENGTH)]
    trajectory, engine = await play(tokenizer, turns, ["1", "2"], max_turns=2)
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.STOP, FinishReason.LENGTH]
    assert (len(engine.seen), trajectory.finish_reason, trajectory.is_truncated) == (2, FinishReason.MAX_TOKENS, True)


@pytest.mark.parametrize(("room", "num_turns"), [(0, 1), (1, 2)])
async def test_the_token_budget_ends_an_episode_before_an_observation_that_leaves_no_room(tokenizer_of, room, num_turns):
    tokenizer = tokenizer_of("smollm")
    turns = [(tokenizer.encode_observation("a<|im_end|>").tolist(), FinishReason.STOP)] * 2
    free, _ = await play(tokenizer, turns, ["more"])
    trajectory, engine = await play(tokenizer, turns, ["more"], max_tokens=free.turns[1].start + room)
    assert len(engine.seen) == num_turns
    assert trajectory.num_tokens <= free.turns[1].start + 2
    if num_turns == 1:
        assert trajectory.finish_reason is FinishReason.MAX_TOKENS
        assert trajectory.chains[0].mask()[-1]


async def test_a_first_observation_beyond_the_token_budget_is_a_failure_that_names_the_setting(tokenizer_of):
    trajectory, _ = await play(tokenizer_of("smollm"), [], [], max_tokens=5)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "environment.max_trajectory_tokens allows 5" in trajectory.failure.text
