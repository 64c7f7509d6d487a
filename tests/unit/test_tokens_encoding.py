import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.types import ClaimedGroup, FinishReason, Message, Prompt, Purpose, WeightVersion, sampled
from rollout.generation import Generation
from rollout.player import Player
from rollout.scripted import ScriptedEngine
from rollout.tiny import CHARACTERS, VOCABULARY, make_model
from rollout.tokens import HuggingFaceTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load_tokenizer(tiny_folder)


def byte_level(*, leading=False, template=None):
    """All 256 bytes as tokens, and optionally a leading and a trailing special token by default."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*alphabet, "<s>", "</s>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if leading:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return HuggingFaceTokenizer(fast, "bytes")


def test_one_character_is_one_token_and_comes_back(tiny):
    token_ids = tiny.encode(CHARACTERS)
    assert token_ids.dtype == np.int32
    assert token_ids.tolist() == [VOCABULARY[character] for character in CHARACTERS]
    assert tiny.decode(token_ids) == CHARACTERS
    assert tiny.size == len(VOCABULARY)


def test_special_tokens_are_left_out_of_text_unless_asked_for(tiny):
    token_ids = [VOCABULARY["7"], VOCABULARY["<end>"]]
    assert tiny.decode(token_ids) == "7"
    assert tiny.decode(token_ids, keep_special=True) == "7<end>"


def test_spaces_before_punctuation_are_not_tidied_away():
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode("a . b 's")) == "a . b 's"


def test_raw_text_gets_the_default_leading_token_and_no_trailing_one():
    assert byte_level(leading=True).encode("a").tolist()[:1] == [256]
    assert 257 not in byte_level(leading=True).encode("a")
    assert byte_level().encode("a").tolist() == byte_level().encode_observation("a").tolist()
    assert 256 not in byte_level(leading=True).encode_observation("a")


@pytest.mark.parametrize("content", ["no entry for caf\ud83d", (Message("user", "no entry for caf\ud83d"),)])
def test_half_of_a_character_is_shown_as_a_question_mark(content):
    tokenizer = byte_level(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.decode(tokenizer.encode(content)) == "no entry for caf?"


def test_messages_go_through_the_template_with_a_generation_prompt_and_no_second_leading_token():
    template = (
        "<s>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = byte_level(leading=True, template=template)
    token_ids = tokenizer.encode((Message("user", "hé"),))
    assert tokenizer.decode(token_ids, keep_special=True) == "<s>user:hé;assistant:"
    assert token_ids.tolist().count(256) == 1


def test_messages_without_a_template_are_refused(tiny):
    with pytest.raises(ConfigError, match="no chat template"):
        tiny.encode((Message("user", "1"),))


def test_half_a_character_does_not_break_decoding():
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_a_prompt_at_the_limit_passes_and_one_beyond_is_named(tiny):
    prompt = Prompt("train-000004", "123", {})
    assert len(tiny.encode_prompt(prompt, 3)) == 3
    with pytest.raises(ConfigError, match="train-000004 has 3 tokens"):
        tiny.encode_prompt(prompt, 2)
    assert tiny.check_prompts([prompt, Prompt("b", "1")], 3) == 3


def test_a_folder_without_a_tokenizer_is_named_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_the_tokenizers_own_end_id_ends_an_answer_too(tiny_folder):
    """Case D10: the config and the tokenizer may declare different ones; engines read the config."""
    config = LaminarConfig.model_validate(
        {"model": {"path": str(tiny_folder)}, "rollout": {"sampling": {"stop_token_ids": [40]}}, "data": {"path": "data"}}
    )
    engine = ScriptedEngine([Generation((sampled([5], [-1.0], WeightVersion(0, 0)),), FinishReason.STOP)])
    group = ClaimedGroup("00000001", 1, Prompt("p", "1", {"answer": "1"}), (0,), 0)
    await Player(config, worker="w").play(engine, group, 0, 0, Purpose.TRAIN)
    assert engine.requests[0].sampling.stop_token_ids == (VOCABULARY["<end>"], 40)


def test_a_tokenizer_with_methods_of_its_own_is_asked_through_them():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *arguments, **settings):
            return super()._decode(*arguments, **settings).upper()

    own = Shouting(tokenizer_object=byte_level()._tokenizer.backend_tokenizer)
    assert HuggingFaceTokenizer(own, "own").decode(byte_level().encode("abc")) == "ABC"
    assert byte_level().decode(byte_level().encode("abc")) == "abc"


def test_the_short_way_to_the_tokenizer_gives_what_the_long_one_gives(tiny):
    wrapper = tiny._tokenizer
    for text in ("12>", "3 4\n<end>5", "", "é?"):
        assert tiny.encode_observation(text).tolist() == wrapper(text, add_special_tokens=False)["input_ids"]
    ids = [1, 2, 0, 14, 13]
    for keep in (True, False):
        expected = wrapper.decode(ids, skip_special_tokens=not keep, clean_up_tokenization_spaces=False)
        assert tiny.decode(ids, keep_special=keep) == expected
