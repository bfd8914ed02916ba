"""Test that the result of a parser depends only on the text, not on how it is split, even if the
text makes no sense.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.openai.tool_parsers.formats import OUTPUTS, SAMPLES, extract, read
from vllm.entrypoints.openai.tool_parsers import ToolParserManager

# Markers of all formats: random texts that are made of them are often nearly calls.
MARKERS = sorted(
    {
        marker
        for name in SAMPLES
        for parser in [ToolParserManager.get(name)]
        for marker in (*parser.markers, *parser.further_tokens)
    }
)
PIECES = st.sampled_from(
    [
        *MARKERS,
        *('{"name": "f", "arguments": {', '{"name": "f"', '"name"', '"parameters"', ": ", "null"),
        *("f(a=1)", "f(", "a=", "</think>", "</tool_call>", "json", "<parameter=a>", "</function>"),
        *"{}[]()\",:;\\'<>1 \n",
        "text",
        "é",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=20).map("".join)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("around", ["", "Some text.\n"])
def test_every_cut_gives_the_same(name, around):
    for text in (t for n, t in OUTPUTS if n == name):
        whole = around + text + around
        expected = extract(name, whole)
        for i in range(len(whole)):
            assert read(name, [whole[:i], whole[i:]]) == expected
        for size in (1, 2, 3, 5, 7, 11):
            pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
            assert read(name, pieces) == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_every_beginning_is_read_the_same_in_pieces_and_as_a_whole(name):
    text = SAMPLES[name]
    for end in range(len(text)):
        assert read(name, text[:end]) == extract(name, text[:end])


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, size=st.integers(1, 9))
def test_any_text_is_taken_apart_and_nothing_is_lost_or_made_up(name, text, size):
    content, calls = found = extract(name, text)
    assert read(name, [text[i : i + size] for i in range(0, len(text), size)]) == found
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(letter in rest for letter in content), "content is in the text, in this order"
    for call, arguments in calls:
        assert call
        json.dumps([call, arguments], ensure_ascii=False)


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    size=st.integers(1, 9),
)
def test_any_arguments_come_back(value, size):
    value = json.loads(json.dumps(value).replace("Infinity", "1"))
    arguments = json.dumps({"a": value}, ensure_ascii=False)
    outputs = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
        "deepseek_v3": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "mistral": f"[TOOL_CALLS]f{arguments}",
    }
    for name, text in outputs.items():
        content, calls = read(name, [text[i : i + size] for i in range(0, len(text), size)])
        assert (content, calls) == ("", [["f", arguments]])
    python = f"[f(a={value!r})]"
    _, [[_, found]] = read("pythonic", re.findall(rf"(?s).{{1,{size}}}", python))
    assert json.loads(found) == {"a": value}


LARGE = 8_000
HOSTILE = {
    "open brackets": "[{(" * LARGE,
    "open arguments": '{"name": "f", "arguments": ' + "[" * LARGE,
    "deep arguments": '{"name": "f", "arguments": {"a": ' + "[" * LARGE + "]" * LARGE + "}}",
    "an open string": '{"name": "f", "arguments": {"a": "' + "\\" * LARGE,
    "a long key": '{"' + "a" * LARGE,
    "a long name": '{"name": "' + "a" * LARGE,
    "quotes": '"' * LARGE,
    "beginnings of markers": "<tool" * LARGE,
    "white space": " \n" * LARGE + "x",
    "a text in a string": '{"name": "f", "arguments": "' + "{" * LARGE + '"}',
    "digits": "f(a=" + "1" * LARGE + "x)",
    "escapes": "f(a='" + "\\x4" * LARGE + "')",
    "quotes in threes": "f(a='''" + "''x" * LARGE + ")",
    "names": "f=" * LARGE,
}
"""Long texts on which a careless parser takes the square of it, or the stack."""


@pytest.mark.parametrize("name", SAMPLES)
def test_hostile_texts_are_read_in_linear_time(name):
    parser = ToolParserManager.get(name)
    starts = {"", parser.bare[:1], *parser.markers[:1]}
    if name == "qwen3_coder":
        starts.add("<function=f><parameter=a>")
    for text in [start + text for start in starts for text in HOSTILE.values()]:
        in_pieces = read(name, [text[i : i + 4096] for i in range(0, len(text), 4096)])
        assert in_pieces == extract(name, text)


@pytest.mark.parametrize("name", SAMPLES)
def test_long_texts_of_markers_and_of_calls_are_read(name):
    for marker in (*ToolParserManager.get(name).markers, "<tool_call>", "["):
        text = marker * (30_000 // len(marker))
        content, _ = extract(name, text)
        assert len(content) <= len(text)
    text = SAMPLES[name]
    repeated = text * (8_000 // len(text))
    assert read(name, repeated) == extract(name, repeated)
