"""Test the parsers of thoughts and answers, in pieces and as a whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loops import loop_over
from vllm.errors import ConfigError
from vllm.reasoning import ReasoningParser, ReasoningParserManager

THOUGHTS = "Here is my thought process:"
ANSWER = "Here is my response:"


def read(name, pieces, **options):
    parser = ReasoningParserManager.get(name)(None, **options)
    parts = [*map(parser.feed, pieces), parser.finish()]
    joined = ("".join(part[kind] or "" for part in parts) for kind in (0, 1))
    return tuple(text or None for text in joined)


@loop_over(
    "name, text, reasoning, content",
    [
        ("deepseek_r1", "<think>a</think>b", "a", "b"),
        ("deepseek_r1", "\n<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("deepseek_r1", "a</think>b", "a", "b"),
        ("deepseek_r1", " a </think>", " a ", None),
        ("deepseek_r1", "a < b, </thin", "a < b, </thin", None),
        ("deepseek_r1", "a</think>b</think><think>c", "a", "b</think><think>c"),
        ("deepseek_r1", "<think></think>b", None, "b"),
        ("deepseek_r1", "", None, None),
        ("qwen3", "<think>a</think>b", "a", "b"),
        ("qwen3", "<think>a", "a", None),
        ("qwen3", "b", None, "b"),
        ("qwen3", " <thin", None, " <thin"),
        ("qwen3", "b<think>a</think>", None, "b<think>a</think>"),
        ("granite", f"{THOUGHTS} a {ANSWER} b", " a ", " b"),
        ("granite", "Here's my thought process: a. Here's my response: b", " a. ", " b"),
        ("granite", f"Here is an answer. {ANSWER}", None, f"Here is an answer. {ANSWER}"),
        ("granite", "Here", None, "Here"),
        ("deepseek_v3", "a</think>b", None, "a</think>b"),
        ("glm45", "\n<think>a</think>\nb", "a", "\nb"),
        ("kimi_k2", "a<|tool_calls_section_begin|>b", "a", "<|tool_calls_section_begin|>b"),
        ("kimi_k2", "a</think><|tool_calls_section", "a", "<|tool_calls_section"),
        ("mistral", "[THINK]a[/THINK]b", "a", "b"),
        ("seed_oss", "<seed:think>a</seed:think>b", "a", "b"),
        ("apertus", "<|inner_prefix|>a<|inner_suffix|>\nb", "a", "\nb"),
        ("apertus", "<|inner_prefix|>a<|tools_prefix|>b", "a", "<|tools_prefix|>b"),
        ("apertus", "b", None, "b"),
        ("gemma4", "<|channel>thought\na\n<channel|>b", "a\n", "b"),
        ("gemma4", "<|channel>thought\n<channel|>b", None, "b"),
        ("gemma4", "<|channel>thoughta<channel|><|tool_call>b", "a", "<|tool_call>b"),
        ("gemma4", "<|channel>final<channel|>b", None, "<|channel>final<channel|>b"),
        ("gemma4", "<|channel>thought", None, None),
        ("gemma4", "b", None, "b"),
        ("nemotron_v3", "a\n</think>\nb", "a\n", "\nb"),
        ("minimax_m2", "a</think>b", "a", "b"),
        ("minimax_m2_append_think", "a</think>b", None, "<think>a</think>b"),
        ("minimax_m2_append_think", "<think>a</think>b", None, "<think>a</think>b"),
        ("minimax_m2_append_think", "", None, None),
        ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n</answer>", "\na\n", "b"),
        ("hunyuan_a13b", "<think>a</think>b", "a", "b"),
        ("hunyuan_a13b", "<answer>b", None, "b"),
        ("hunyuan_a13b", " \n<answe", None, " \n<answe"),
        ("ernie45", "a\n</think>\n\n<response>\nb\nc\n</response>\n", "a\n", "b\nc"),
        ("ernie45", "a</think>\n\n<tool_call>b", "a", "\n\n<tool_call>b"),
        (
            "cohere_command3",
            "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
            "a",
            "b",
        ),
        (
            "cohere_command3",
            "<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>b",
            "a",
            "<|START_ACTION|>b",
        ),
        ("openai_gptoss", "<|channel|>analysis<|message|>a", "a", None),
        ("openai_gptoss", "<|channel|>final<|message|>b<|return|>", None, "b"),
        ("openai_gptoss", "plain < text", None, "plain < text"),
        (
            "openai_gptoss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "a",
            "b",
        ),
        (  # several messages of the same kind, and end markers that the model forgot
            "openai_gptoss",
            "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>commentary<|message|>b"
            "<|end|><|channel|>analysis<|message|>c<|channel|>final <|constrain|>json<|message|>{}",
            "a\nc",
            "b\n{}",
        ),
        (  # a call of a tool is left to the tool parser
            "openai_gptoss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.f <|constrain|>json<|message|>{}<|call|>",
            "a",
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
            "<|call|>",
        ),
        (
            "openai_gptoss",
            " to=functions.f<|channel|>commentary json<|message|>{}",
            None,
            " to=functions.f<|channel|>commentary json<|message|>{}",
        ),
        ("openai_gptoss", " to= b <|channel|>x<|message|>", None, " to= b <|channel|>x<|message|>"),
        ("openai_gptoss", "<|channel|>anal<", None, "<|channel|>anal<"),
    ],
)
def test_thoughts_and_answer_are_taken_apart_however_the_text_is_cut(
    name, text, reasoning, content
):
    assert ReasoningParserManager.get(name)().split(text) == (reasoning, content)
    for i in range(len(text)):
        assert read(name, [text[:i], text[i:]]) == (reasoning, content)
    assert read(name, text) == (reasoning, content)


def test_a_model_that_was_told_not_to_think_has_no_thoughts():
    for name in ReasoningParserManager.names():
        assert read(name, ["<think>a", "</think>b"], is_thinking=False) == (
            None,
            "<think>a</think>b",
        )


def test_a_model_that_thinks_on_demand_has_thoughts_if_the_request_says_so():
    expected = {True: ("a", "b"), False: (None, "a</think>b"), None: (None, "a</think>b")}
    for is_thinking, found in expected.items():
        assert read("deepseek_v3", "a</think>b", is_thinking=is_thinking) == found


REWRITING = (
    "cohere_command3",
    "ernie45",
    "hunyuan_a13b",
    "minimax_m2_append_think",
    "openai_gptoss",
)
"""Parsers that add a marker, or that leave out markers after the beginning of the answer."""
PIECES = st.sampled_from(
    [
        *("<think>", "</think>", THOUGHTS, ANSWER, "Here", "<", " ", "\n", "a"),
        *("<answer>", "</answer>", "<|channel|>", "analysis", "final", "<|message|>", "<|start|>"),
        *("<|channel>", "thought", "<channel|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        *("to=", "<|end|>", "<|constrain|>", "<|tool_calls_section_begin|>", "[THINK]"),
    ]
)


@settings(max_examples=200, deadline=None)
@given(text=st.lists(PIECES | st.text(max_size=2)).map("".join), size=st.integers(1, 9))
def test_any_text_is_read_the_same_in_pieces_and_nothing_is_made_up(text, size):
    for name in ReasoningParserManager.names():
        found = ReasoningParserManager.get(name)().split(text)
        assert read(name, [text[i : i + size] for i in range(0, len(text), size)]) == found
        if name in REWRITING:
            continue
        reasoning, content = (part or "" for part in found)
        assert text.endswith(content) and reasoning in text
        markers = len(text) - len(reasoning) - len(content)
        assert markers == 0 or reasoning != text


class Tokenizer:
    """A tokenizer with one token per letter."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_the_end_of_the_thoughts_is_found_among_tokens():
    parser = ReasoningParserManager.get("qwen3")(Tokenizer())
    text = [ord(letter) for letter in "<think>a</think>b"]
    assert parser.reasoning_end_token_ids(Tokenizer()) == [ord(letter) for letter in "</think>"]
    assert [end for end in range(len(text) + 1) if parser.is_reasoning_end(text[:end])] == [16, 17]
    assert not ReasoningParserManager.get("qwen3")().is_reasoning_end(text)


def test_parsers_are_registered_by_name(monkeypatch):
    monkeypatch.setattr(ReasoningParserManager, "parsers", dict(ReasoningParserManager.parsers))

    @ReasoningParserManager.register_module(["muse", "mull"])
    class Muse(ReasoningParser):
        starts, ends = ("(",), (")",)

    assert ReasoningParserManager.get("mull") is Muse
    assert read("muse", "(a)b") == ("a", "b")
    with pytest.raises(
        ConfigError,
        match=r"'r1' is not one of apertus, cohere_command3, .*, mull, muse, nemotron_v3",
    ):
        ReasoningParserManager.get("r1")
    with pytest.raises(TypeError, match="not a subclass of ReasoningParser"):
        ReasoningParserManager.register_module("x")(object)


PROMPT = "<user>What does <think> do?<assistant>"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected", "start"),
    [
        ("qwen3", PROMPT, "<think>a</think>b", ("a", "b"), "may think"),
        ("qwen3", PROMPT, "a</think>b", (None, "a</think>b"), "may think"),
        ("qwen3", PROMPT + "<think>\n", "a</think>b", ("a", "b"), "thinks"),
        ("qwen3", PROMPT + "<think>\n", "<think>a</think>b", ("a", "b"), "thinks"),
        ("qwen3", PROMPT + "<think>\n\n</think>\n\n", "b", (None, "b"), "answers"),
        ("deepseek_r1", PROMPT, "a</think>b", ("a", "b"), "thinks"),
        ("deepseek_r1", PROMPT + "</think>", "b", (None, "b"), "answers"),
        ("granite", PROMPT, f"{THOUGHTS}a{ANSWER}b", ("a", "b"), "may think"),
        ("deepseek_v3", PROMPT, "b", (None, "b"), "answers"),
        ("gemma4", PROMPT, "<|channel>thought\na<channel|>b", ("a", "b"), "may think"),
        ("gemma4", PROMPT + "<|channel>thought\n", "a<channel|>b", ("a", "b"), "thinks"),
        ("gemma4", PROMPT + "<|channel>thought\n<channel|>", "b", (None, "b"), "answers"),
        ("nemotron_v3", PROMPT + "<think></think>", "b", (None, "b"), "answers"),
        ("deepseek_v3", PROMPT + "<think>", "a</think>b", ("a", "b"), "thinks"),
    ],
)
def test_the_prompt_says_whether_the_output_begins_inside_of_thoughts(
    name, prompt, text, expected, start
):
    kind = ReasoningParserManager.get(name)
    parser = kind()
    parser.follow(prompt)
    found = parser.grammar_start()
    marks = {"may think": (False, kind.starts), "thinks": (True, ()), "answers": (False, ())}
    assert (found.is_thinking, found.thought_starts) == marks[start]
    assert found.thought_ends == (() if start == "answers" else kind.ends)
    assert parser.split(text) == expected
    first, last = parser.feed(text), parser.finish()
    assert (
        tuple((a or "") + (b or "") or None for a, b in zip(first, last, strict=True)) == expected
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("<think>a", (True, ())), ("<think>a</think>b", (False, ())), ("b", (False, ("<think>",)))],
)
def test_of_a_message_that_is_continued_the_last_marker_counts(prompt, expected):
    parser = ReasoningParserManager.get("qwen3")()
    parser.follow(prompt, is_continued=True)
    found = parser.grammar_start()
    assert (found.is_thinking, found.thought_starts) == expected


def test_a_model_that_was_told_not_to_think_answers_at_once_whatever_the_prompt():
    parser = ReasoningParserManager.get("deepseek_r1")(is_thinking=False)
    parser.follow("<think>\n")
    assert not parser.grammar_start().is_late
    assert parser.split("b") == (None, "b")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("openai_gptoss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"),
        ("openai_gptoss", "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}"),
    ],
)
def test_calls_end_thoughts_where_the_model_writes_them_without_an_answer(name, call):
    start = ReasoningParserManager.get(name)().grammar_start()
    assert start.is_thinking and call.startswith(start.calls_in_thoughts)


def test_gemma_4_writes_empty_thoughts_where_it_was_told_not_to_think():
    text = "<|channel>thought\n<channel|>b"
    assert read("gemma4", text, is_thinking=False) == (None, "b")


def test_gpt_oss_thinks_also_where_it_was_told_not_to():
    kind = ReasoningParserManager.get("openai_gptoss")
    start = kind(is_thinking=False).grammar_start()
    assert start.is_thinking and start.thought_ends == kind.ends
