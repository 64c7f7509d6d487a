"""How calls are read: Hermes and Qwen, Llama's JSON, Llama's Python; whatever is malformed says why."""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tools.calls import PARSERS, Call, parse_hermes, parse_llama, parse_pythonic, write_call


def test_hermes_calls_are_taken_out_of_the_text_in_their_order():
    turn = parse_hermes(
        'First.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "</x>"}]}}\n</tool_call> then '
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert turn.calls == (Call("add", {"a": 1, "b": [2, {"c": "</x>"}]}), Call("now", {}))
    assert turn.text == "First.\n then"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>{name: add}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {}', "closing </tool_call> is missing"),
        ("<tool_call>[1]</tool_call>", 'an object with "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'an object with "name"'),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', '"arguments" must be an object'),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_hermes_call_says_why(text, why):
    (call,) = parse_hermes(text).calls
    assert isinstance(call, str)
    assert why in call


def test_one_bad_call_leaves_its_neighbours_alone():
    calls = parse_hermes(
        '<tool_call>{"name": "a"}</tool_call><tool_call>?</tool_call><tool_call>{"name": "b"}</tool_call>'
    ).calls
    assert [call if isinstance(call, Call) else "bad" for call in calls] == [Call("a", {}), "bad", Call("b", {})]


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama_calls_stand_alone_and_may_be_several(tag):
    text = tag + '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}'
    assert parse_llama(text).calls == (Call("add", {"a": 1}), Call("now", {}))


@pytest.mark.parametrize("text", ["7", 'The object {"name": "x"} is no call', '{"answer": 7}', ""])
def test_a_llama_turn_that_is_no_call_is_text(text):
    assert parse_llama(text) == parse_llama(text).__class__(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "add", "parameters": {', "not valid JSON"),
        ('{"name": "add", "parameters": 3}', '"parameters" must be an object'),
        ('{"name": "add"} and more', "more behind the call"),
        ("<|python_tag|>print(1)", "not valid JSON"),
        ('{"name": "add", "parameters": ' + "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_llama_call_says_why(text, why):
    last = parse_llama(text).calls[-1]
    assert isinstance(last, str)
    assert why in last


def test_pythonic_calls_take_literals_by_name():
    turn = parse_pythonic('[add(a=1, b=[2, -3.5]), find(query="x, y")]')
    assert turn.calls == (Call("add", {"a": 1, "b": [2, -3.5]}), Call("find", {"query": "x, y"}))
    assert parse_pythonic("[1, 2]").calls == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[add(1)]", "by name"),
        ("[add(a=open('x'))]", "must be literals"),
        ("[add(a=1)", "not a list of calls"),
        ("[add(a=1), 3]", "a call by name"),
        ("[add(**{'a': 1})]", "by name"),
    ],
)
def test_a_malformed_pythonic_call_says_why(text, why):
    last = parse_pythonic(text).calls[-1]
    assert isinstance(last, str)
    assert why in last


SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.text(string.ascii_letters, min_size=1, max_size=9), st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_what_is_written_is_read_back(name, arguments):
    text = write_call(name, arguments)
    if text.count("<tool_call>") + text.count("</tool_call>") == 2:
        assert parse_hermes(text).calls == (Call(name, arguments),)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from('<tool_call>{}[]";:nameargumentspt, ()=/\\')))
def test_no_text_breaks_a_parser(text):
    for parse in PARSERS.values():
        assert all(isinstance(call, Call | str) for call in parse(text).calls)


@pytest.mark.parametrize(
    "arguments",
    [
        {"word": "caf\ud83d"},
        {"\ud83d": 1},
        {"word": [1, {"a": ["b", "\ud83d"]}]},
        {"word": {"\ud83d": 1}},
    ],
)
def test_half_of_a_character_makes_a_call_malformed_in_every_format(arguments):
    """Escaped, as a policy writes it: UTF-8 cannot hold it."""
    written = {"hermes": f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"}
    written["llama"] = json.dumps({"name": "f", "parameters": arguments})
    if "word" in arguments:
        written["pythonic"] = f"[f(word={arguments['word']!a})]"
    for name, text in written.items():
        assert PARSERS[name](text).calls == ("it holds half of a character, '\\ud83d'; write it whole or leave it out",)
