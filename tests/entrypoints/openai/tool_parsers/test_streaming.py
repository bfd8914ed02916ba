"""Test that the result of a parser depends only on the text, not on how it is split, even if the
text makes no sense.
"""

import json
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.openai.tool_parsers.formats import (
    HARMONY,
    OUTPUTS,
    SAMPLES,
    decoded,
    extract,
    read,
)
from tests.entrypoints.openai.tool_parsers.writers import CALLS, WRITERS, tools_for
from vllm.entrypoints.openai.chat.output_reader import OutputReader
from vllm.entrypoints.openai.chat.tool_choice import merge_deltas
from vllm.entrypoints.openai.tool_parsers import ToolParserManager
from vllm.reasoning import ReasoningParserManager

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
        assert_no_call_is_made_up(name, text, end)


def assert_no_call_is_made_up(name, text, end):
    """Check the calls of an output that was cut: their arguments are right, or no JSON."""
    _, found = read(name, text[:end], is_cut=True)
    for (_, arguments), (_, wanted) in zip(found, extract(name, text)[1], strict=False):
        assert is_no_json(arguments) or json.loads(arguments) == json.loads(wanted)


@pytest.mark.parametrize("has_parser", [False, True])
def test_half_of_a_header_of_gpt_oss_is_no_content(has_parser):
    header = HARMONY.partition("<|message|>")[0]
    for end in range(len("<|channel|>"), len(header) + 5):
        reasoning = ReasoningParserManager.get("openai_gptoss")() if has_parser else None
        reader = OutputReader(reasoning, ToolParserManager.get("openai")())
        delta = reader.feed(HARMONY[:end], is_last=True, is_cut=True)
        assert (delta.reasoning, delta.content, delta.tool_calls) == ("", "", [])


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=20, deadline=None)
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


def cut(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=9, deadline=None)
@given(
    calls=CALLS,
    before=st.sampled_from(["", "Sure.\n", "日本 <tool [ {"]),
    seed=st.integers(0, 99),
    size=st.integers(1, 9),
    share=st.floats(0, 1),
)
def test_any_calls_come_back_and_a_cut_output_makes_up_no_arguments(
    form, calls, before, seed, size, share
):
    name, write = WRITERS[form]
    text = write(calls, random.Random(seed))
    if text.startswith(ToolParserManager.get(name).markers):
        text = before + text
    else:
        before = ""
    request = SimpleNamespace(tools=tools_for(calls))
    content, found = read(name, cut(text, size), request)
    assert decoded(found) == calls
    assert content == before
    text = text[: int(share * len(text))]
    content, found = read(name, cut(text, size), request, is_cut=True)
    assert (content, found) == read(name, [text], request, is_cut=True)
    for call, (function, arguments) in zip(calls, found, strict=False):
        assert function == call.name
        assert is_no_json(arguments) or json.loads(arguments) == call.arguments


def is_no_json(text):
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


# (reasoning parser, text around thoughts, format of calls)
THINKING = [
    ("qwen3", "<think>\n{}\n</think>\n\n", "hermes"),
    ("qwen3", "<think>{}</think>", "qwen3 coder"),
    ("deepseek_r1", "{}</think>\n\n", "hermes"),
    ("deepseek_r1", "<think>{}</think>", "deepseek v3"),
    ("glm45", "\n<think>{}</think>\n", "glm 4.5"),
    ("kimi_k2", "<think>{}</think>", "kimi"),
    ("kimi_k2", "{}", "kimi"),
    ("minimax_m2", "{}</think>\n\n", "minimax m2"),
    ("seed_oss", "<seed:think>{}</seed:think>", "seed"),
    ("hunyuan_a13b", "<think>\n{}\n</think>\n", "hunyuan"),
    ("step3", "{}</think>", "step 3"),
    ("ernie45", "{}</think>\n\n", "hermes"),
    ("mistral", "[THINK]{}[/THINK]", "mistral, later"),
    ("granite", "Here is my thought process:{}Here is my response: ", "granite"),
    ("nemotron_v3", "{}</think>\n", "qwen3 coder"),
    ("cohere_command3", "<|START_THINKING|>{}<|END_THINKING|>", "cohere"),
    ("apertus", "<|inner_prefix|>{}<|inner_suffix|>", "apertus"),
    ("gemma4", "<|channel>thought\n{}<channel|>", "gemma4"),
    ("openai_gptoss", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant", "gpt-oss"),
    (
        "openai_gptoss",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "gpt-oss, recipient first",
    ),
]


@pytest.mark.parametrize(("reasoning", "around", "form"), THINKING)
@settings(max_examples=9, deadline=None)
@given(
    calls=CALLS,
    thoughts=st.sampled_from(["Hm.", "a < b [TOOL <tool_call> {", "1\n\n2", "日本"]),
    seed=st.integers(0, 99),
    size=st.integers(1, 9),
    share=st.floats(0, 1),
)
def test_calls_after_thoughts_come_back(
    reasoning, around, form, calls, thoughts, seed, size, share
):
    name, write = WRITERS[form]
    request = SimpleNamespace(tools=tools_for(calls))

    def split(pieces, is_cut=False):
        tools = ToolParserManager.get(name)()
        tools.adjust_request(request)
        reader = OutputReader(ReasoningParserManager.get(reasoning)(), tools)
        *before, last = pieces
        parts = [reader.feed(each) for each in before]
        parts.append(reader.feed(last, is_last=True, is_cut=is_cut))
        found = merge_deltas([call for part in parts for call in part.tool_calls])
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in found]
        texts = ("".join(getattr(p, kind) for p in parts) for kind in ("reasoning", "content"))
        return (*texts, functions)

    text = around.replace("{}", thoughts) + write(calls, random.Random(seed))
    found_thoughts, content, found = split(cut(text, size))
    assert found_thoughts.strip() == thoughts and not content.strip()
    assert decoded(found) == calls
    text = text[: 1 + int(share * (len(text) - 1))]
    assert split(cut(text, size), is_cut=True) == split([text], is_cut=True)


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
