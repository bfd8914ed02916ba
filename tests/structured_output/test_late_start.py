"""Test a grammar that begins after thoughts, and calls without a grammar, for any division of the
output into tokens.
"""

import json

import msgspec
import numpy as np
import pytest

from tests.loops import loop_over
from tests.structured_output.helpers import allowed, make_request, spec
from vllm.guided_decoding_params import GrammarStart, GuidedDecodingParams
from vllm.structured_output.backends import BACKENDS, make_backend
from vllm.structured_output.backends.interface import MAX_WHITESPACE
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.compile_worker import compile_spec
from vllm.structured_output.row_matcher import RowMatcher

END, THINK, THINK_END, CALL, OTHER = range(256, 261)
"""The end token, special tokens that are markers, and one that is none."""
_WORDS = [
    b"\n\n",
    b">\n",
    b">{",
    b"</",
    b"think",
    b"a</think>b",
    b"<tool_",
    b"call>",
    b'{"',
    b"ab",
    b" <",
    b"nk><tool_",
]
VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b""] * 5 + _WORDS)
WORDS = {word: 261 + i for i, word in enumerate(_WORDS)}
SPECIAL = {THINK: "<think>", THINK_END: "</think>", CALL: "[CALL]"}

MARKS = {"thought_ends": ("</think>",), "special_tokens": SPECIAL, "allows_space": True}
INSIDE = GrammarStart(is_thinking=True, **MARKS)
STRICT = GrammarStart(is_thinking=True, **{**MARKS, "allows_space": False})
MAYBE = GrammarStart(thought_starts=("<think>",), **MARKS)
TOOLS = GrammarStart(calls=("<tool_call>", "[CALL]"), special_tokens=SPECIAL, allows_space=True)
ALL = GrammarStart(
    thought_starts=("<think>",), calls=("<tool_call>", "[CALL]", '{"name": "f"'), **MARKS
)
LATE_CALLS = GrammarStart(is_thinking=True, calls_in_thoughts=("[CALL]to=",), **MARKS)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return {request.param: make_backend(request.param, VOCABULARY)}


def matcher_of(backend, start, regex="a[ab]*{?", output=(), **params):
    grammar = compile_spec(spec("regex", regex), VOCABULARY, backend)
    request = make_request(grammar, eos=END, **params)
    guided = GuidedDecodingParams(regex=regex, start=start)
    request.sampling_params.guided_decoding = guided

    def open_grammar():
        return VOCABULARY, backend[grammar.backend].load(grammar.content)

    return RowMatcher(request, list(output), open_grammar)


def tokens_of(text):
    """Return the token ids of special tokens, given by name, and of texts, with one token for each
    byte.
    """
    return [text] if isinstance(text, int) else list(text)


def next_tokens(matcher):
    mask = np.empty(VOCABULARY.num_words, np.int32)
    matcher.fill(mask)
    assert matcher.error is None, matcher.error
    return set(allowed(mask)) & set(range(len(VOCABULARY.tokens)))


def after(matcher, *pieces):
    """Return the tokens that may follow these pieces, after checking that the tokens of the pieces
    are allowed.
    """
    for piece in pieces:
        for token_id in tokens_of(piece):
            assert token_id in next_tokens(matcher), (piece, token_id)
            matcher.accept(token_id)
    return next_tokens(matcher)


ANYTHING = set(range(len(VOCABULARY.tokens))) - {END, WORDS[b"a</think>b"]}
BEGINNING = {ord("a"), WORDS[b"ab"]}
SPACES = {*b" \t\n\r\v\f", WORDS[b"\n\n"]}
INNER = {*b"ab{", WORDS[b"ab"], END}


@loop_over(
    "start, pieces, expected",
    [
        (GrammarStart(), [], BEGINNING),
        (INSIDE, [], ANYTHING),
        (INSIDE, [b"x < y", OTHER, THINK], ANYTHING),
        (INSIDE, [b"x</think"], ANYTHING - {WORDS[b">{"]}),
        (INSIDE, [b"x</think>"], BEGINNING | SPACES),
        (STRICT, [b"x</think"], ANYTHING - {WORDS[b">{"], WORDS[b">\n"]}),
        (STRICT, [THINK_END], BEGINNING),
        (INSIDE, [b"x</think", WORDS[b">\n"]], BEGINNING | SPACES),
        (INSIDE, [WORDS[b"</"], WORDS[b"think"]], ANYTHING - {WORDS[b">{"]}),
        (INSIDE, [THINK_END], BEGINNING | SPACES),
        (INSIDE, [THINK_END, WORDS[b"\n\n"]], BEGINNING | SPACES),
        (INSIDE, [THINK_END, b" " * MAX_WHITESPACE], BEGINNING),
        (INSIDE, [THINK_END, b"a"], INNER),
        (INSIDE, [THINK_END, b"ab{"], {END}),
        (MAYBE, [], BEGINNING | SPACES | {THINK, ord("<"), WORDS[b" <"]}),
        (MAYBE, [WORDS[b" <"], b"t"], {ord("h")}),
        (MAYBE, [b"\n<t"], {ord("h")}),
        (MAYBE, [b"a"], INNER),
        (MAYBE, [b"<think>"], ANYTHING),
        (MAYBE, [THINK, b"<think>", THINK_END], BEGINNING | SPACES),
        (TOOLS, [], BEGINNING | SPACES | {CALL, *b"<[", WORDS[b"<tool_"], WORDS[b" <"]}),
        (TOOLS, [WORDS[b"<tool_"]], {ord("c"), WORDS[b"call>"]}),
        (TOOLS, [WORDS[b"<tool_"], WORDS[b"call>"]], ANYTHING | {END, WORDS[b"a</think>b"]}),
        (TOOLS, [CALL, b"anything"], ANYTHING | {END, WORDS[b"a</think>b"]}),
        (TOOLS, [b"ab"], INNER),
        (ALL, [THINK, THINK_END, CALL], ANYTHING | {END, WORDS[b"a</think>b"]}),
        (ALL, [THINK, THINK_END, b"a"], INNER),
        (LATE_CALLS, [b"a [CALL]", CALL, b"to"], ANYTHING),
        (LATE_CALLS, [b"a ", CALL, b"to=f"], ANYTHING | {END, WORDS[b"a</think>b"]}),
        (LATE_CALLS, [b"a", THINK_END], BEGINNING | SPACES),
    ],
)
def test_what_may_come(backend, start, pieces, expected):
    assert after(matcher_of(backend, start), *pieces) == expected


def test_an_answer_and_a_call_that_begin_alike_are_told_apart_where_they_differ(backend):
    start = GrammarStart(calls=('{"name": "f"',))
    regex = r'\{"name": "(fa|g)"\}'
    both = matcher_of(backend, start, regex)
    assert after(both, b'{"name": "') == {*b"fg"}
    assert after(both, b"f") == {*b'"a'}
    answer = matcher_of(backend, start, regex)
    assert after(answer, WORDS[b'{"'], b'name": "fa"}') == {END}
    call = matcher_of(backend, start, regex)
    assert END in after(call, b'{"name": "f"', b", and what it likes")


@pytest.mark.parametrize("start", [INSIDE, MAYBE, ALL])
def test_an_output_goes_on_after_a_preemption(backend, start):
    output = [THINK, *b"why </thin", *b"</think>\n", *b"ab"]
    assert next_tokens(matcher_of(backend, start, output=output)) == INNER


@pytest.mark.parametrize(
    ("start", "pieces", "drafts"),
    [
        (INSIDE, [b"x"], [*b"y</think>\nab"]),
        (INSIDE, [b"x"], [THINK_END, *b"a", THINK_END]),
        (INSIDE, [b"x</th"], [*b"ink>", WORDS[b"ab"], ord("{"), END]),
        (MAYBE, [], [*b"\n<think>", *b"</think>", ord("a")]),
        (ALL, [], [ord("a"), ord("b"), ord("x")]),
        (ALL, [b"<too"], [*b"l_call>", ord("x"), END]),
    ],
)
def test_drafts_leave_no_trace_and_their_masks_are_those_of_the_same_tokens(
    backend, start, pieces, drafts
):
    matcher, other = matcher_of(backend, start), matcher_of(backend, start)
    after(matcher, *pieces), after(other, *pieces)
    masks = np.zeros((1 + len(drafts), VOCABULARY.num_words), np.int32)
    matcher.fill_along(masks, drafts)
    known = set(range(len(VOCABULARY.tokens)))
    for place, draft in enumerate(drafts):
        expected = next_tokens(other)
        assert set(allowed(masks[place])) & known == expected
        if draft not in expected or draft == END:
            assert not masks[place + 1 :].any()
            break
        other.accept(draft)
    assert next_tokens(matcher) == after(matcher_of(backend, start), *pieces)


@pytest.mark.parametrize(
    ("params", "pieces", "may_end"),
    [
        ({}, [CALL], True),
        ({"min_tokens": 3}, [CALL], False),
        ({"min_tokens": 3}, [CALL, b"xy"], True),
        ({"ignore_eos": True}, [CALL, b"xy"], False),
        ({}, [THINK], False),
        ({}, [THINK, THINK_END], False),
        ({"min_tokens": 3}, [THINK, THINK_END, b"a"], True),
    ],
)
def test_an_output_ends_in_calls_or_where_the_grammar_does(backend, params, pieces, may_end):
    assert (END in after(matcher_of(backend, ALL, **params), *pieces)) is may_end


def test_allowed_tokens_hold_for_thoughts_too(backend):
    matcher = matcher_of(backend, INSIDE, allowed_token_ids=[ord("a"), THINK_END, END])
    assert after(matcher) == {ord("a"), THINK_END}
    assert after(matcher, b"a", THINK_END, b"a") == {ord("a"), END}


def test_the_start_reaches_the_engine_core():
    import msgspec

    guided = GuidedDecodingParams(json=json.dumps({"type": "object"}), start=ALL)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(guided), type=type(guided)) == guided


WORD = GrammarStart(grammar_starts=("<tool_call>", "[CALL]"), **{**MARKS, "thought_ends": ()})
THOUGHTFUL = msgspec.structs.replace(WORD, is_thinking=True, thought_ends=("</think>",))
UNSURE = msgspec.structs.replace(THOUGHTFUL, is_thinking=False, thought_starts=("<think>",))
OR_NAME = msgspec.structs.replace(WORD, calls=("name",))
JSON = r"\[b*\]"
"""A grammar that ends with a bracket, as JSON does."""
FREE = set(range(len(VOCABULARY.tokens)))
OPENED = SPACES | {ord("[")}
INSIDE_CALL = {*b"b]"}


@loop_over(
    "start, pieces, expected",
    [
        (WORD, [], FREE),
        (WORD, [b"x<tool_call"], FREE - {WORDS[b">{"]}),
        (WORD, [b"x<tool_call>"], OPENED),
        (WORD, [CALL], OPENED),
        (WORD, [CALL, WORDS[b"\n\n"], b"["], INSIDE_CALL),
        (WORD, [CALL, b"[bb]"], FREE),
        (WORD, [CALL, b"[b]</tool_call> and", OTHER, CALL, b"["], INSIDE_CALL),
        (WORD, [CALL, b"[]", CALL, b"[]", b"x<tool_call>["], INSIDE_CALL),
        (THOUGHTFUL, [b"x", CALL, b"x"], FREE),
        (THOUGHTFUL, [b"x", CALL, THINK_END, b"x", CALL], OPENED),
        (THOUGHTFUL, [b"x</think>", CALL, b"[b"], INSIDE_CALL),
        (UNSURE, [b"\n<think>x", CALL], FREE),
        (UNSURE, [THINK, CALL, b"x</think>\n", CALL], OPENED),
        (UNSURE, [CALL], OPENED),
        (UNSURE, [b"\nx", CALL, b"["], INSIDE_CALL),
        (UNSURE, [b"<t", CALL], OPENED),
        # A marker that begins in the token that ends the thoughts, or in the token where thoughts
        # might have begun.
        (THOUGHTFUL, [b"x</thi", WORDS[b"nk><tool_"], WORDS[b"call>"]], OPENED),
        (UNSURE, [b"<tool_call>["], INSIDE_CALL),
        (UNSURE, [b"\n<think>x</thi", WORDS[b"nk><tool_"], b"call>["], INSIDE_CALL),
        (OR_NAME, [CALL], SPACES | {*b"[n"}),
        (OR_NAME, [CALL, b"name{", CALL, b"x"], FREE),
    ],
)
@loop_over("with_drafts", [False, True])
def test_a_call_inside_of_free_text_follows_the_grammar(
    backend, start, pieces, expected, with_drafts
):
    matcher = matcher_of(backend, start, JSON)
    tokens = [token_id for piece in pieces for token_id in tokens_of(piece)]
    if with_drafts:  # each token is checked as a draft first, and then taken back
        masks = np.empty((len(tokens) + 1, VOCABULARY.num_words), np.int32)
        for place, token_id in enumerate(tokens):
            matcher.fill_along(masks[: len(tokens) - place + 1], tokens[place:])
            assert token_id in allowed(masks[0])
            matcher.accept(token_id)
        found = next_tokens(matcher)
    else:
        found = after(matcher, *pieces)
    assert found == expected
