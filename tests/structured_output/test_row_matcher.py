"""Test which tokens one request may generate next: the grammar, its end, and other constraints."""

import random
import re

import numpy as np
import pytest

from tests.structured_output.helpers import (
    BYTES,
    END,
    allowed,
    compiled,
    loaded,
    make_request,
    next_tokens,
    row_matcher,
)
from vllm.structured_output.row_matcher import RowMatcher

BOTH = pytest.mark.parametrize(
    ("kind", "source"), [("regex", "ab[0-9]*"), ("ebnf", 'root ::= "ab" [0-9]*')]
)
DIGITS = list(b"0123456789")


@BOTH
def test_the_end_token_comes_only_where_the_output_is_complete(kind, source):
    matcher = row_matcher(kind, source)
    assert next_tokens(matcher) == [ord("a")]
    matcher.accept(ord("a"))
    assert next_tokens(matcher) == [ord("b")]
    matcher.accept(ord("b"))
    assert next_tokens(matcher) == [*DIGITS, END]
    matcher.accept(END)
    assert next_tokens(matcher) == [*DIGITS, END]


@BOTH
def test_an_output_goes_on_after_a_preemption(kind, source):
    assert next_tokens(row_matcher(kind, source, b"ab7")) == [*DIGITS, END]


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        (b"", {"min_tokens": 3}, [ord("a")]),
        (b"ab", {"min_tokens": 3}, DIGITS),
        (b"ab0", {"min_tokens": 3}, [*DIGITS, END]),
        (b"ab0", {"ignore_eos": True}, DIGITS),
        (b"ab", {"stop": [END + 1]}, [*DIGITS, END, END + 1]),
        (b"ab", {"stop": [END + 1], "eos": None}, [*DIGITS, END + 1]),
        (b"ab", {"stop": [ord("5"), 100_000]}, [*DIGITS, END]),
        (b"ab", {"stop": [ord("5")], "min_tokens": 9}, [d for d in DIGITS if d != ord("5")]),
        (b"", {"stop": [ord("a")], "min_tokens": 9}, [ord("a")]),
        (b"ab", {"model_ends": [ord("5")]}, [*DIGITS, END]),
        (
            b"ab",
            {"model_ends": [ord("5")], "ignore_eos": True},
            [d for d in DIGITS if d != ord("5")],
        ),
        (b"", {"model_ends": [END + 1]}, [ord("a")]),
        (b"ab", {"allowed_token_ids": [ord("3"), END]}, [ord("3"), END]),
        (b"ab", {"allowed_token_ids": [ord("3")]}, [ord("3")]),
        (b"ab", {"allowed_token_ids": [ord("x")]}, [END]),
    ],
    ids=str,
)
def test_end_tokens_and_allowed_tokens(output, params, expected):
    matcher = row_matcher("regex", "ab[0-9]*", output, **params)
    assert next_tokens(matcher) == expected


@pytest.mark.parametrize("params", [{"min_tokens": 50}, {"ignore_eos": True}])
@pytest.mark.parametrize(("kind", "source"), [("regex", "ab"), ("ebnf", 'root ::= "ab"')])
def test_an_output_that_can_only_end_ends(kind, source, params):
    assert next_tokens(row_matcher(kind, source, b"ab", **params)) == [END]


def test_an_end_token_that_has_text_ends_and_is_no_text():
    matcher = row_matcher("regex", "ab[0-9]*", b"ab", eos=ord("7"))
    assert next_tokens(matcher) == DIGITS
    matcher.accept(ord("7"))
    matcher.accept(ord("3"))
    assert next_tokens(matcher) == DIGITS
    early = row_matcher("regex", "ab[0-9]*", b"ab", eos=ord("7"), min_tokens=4)
    assert next_tokens(early) == [d for d in DIGITS if d != ord("7")]


@pytest.mark.parametrize(
    ("output", "params", "message"),
    [
        (b"", {"allowed_token_ids": [ord("x")]}, "the grammar allows none of allowed_token_ids"),
        (b"b", {}, r"grammar"),
    ],
)
@BOTH
def test_a_failure_is_an_error_and_leaves_a_mask_to_sample_from(
    kind, source, output, params, message
):
    matcher = row_matcher(kind, source, output, **params)
    mask = np.zeros(BYTES.num_words, np.int32)
    for _ in range(2):
        matcher.fill(mask)
        assert (mask == -1).all()
        assert "structured output failed: " in matcher.error
    assert re.search(message, matcher.error)


def test_whatever_a_library_raises_ends_that_request_only(capsys):
    class Broken:
        def matcher(self):
            return self

        def fill(self, mask):
            raise OSError("broken")

    matcher = RowMatcher(make_request(None), [], lambda: (BYTES, Broken()))
    mask = np.zeros(BYTES.num_words, np.int32)
    matcher.fill(mask)
    assert matcher.error == "structured output failed: OSError('broken')"
    assert "structured output of a failed" in capsys.readouterr().err


def test_matchers_of_one_grammar_do_not_touch_each_other():
    grammar = compiled("regex", "ab|cd")
    first, second = (
        RowMatcher(make_request(grammar), [], lambda: (BYTES, loaded(grammar))) for _ in range(2)
    )
    first.accept(ord("a"))
    assert next_tokens(first) == [ord("b")]
    assert next_tokens(second) == [ord("a"), ord("c")]


@pytest.mark.parametrize(
    ("kind", "source"),
    [("ebnf", 'root ::= "a" | root root'), ("lark", 'start: x\nx: x x | "a"')],
)
def test_a_grammar_that_takes_ever_longer_ends_its_request(kind, source, monkeypatch):
    monkeypatch.setattr("vllm.structured_output.row_matcher.BUDGET_S", 0.1)
    monkeypatch.setattr("vllm.structured_output.row_matcher.BUDGET_PER_TOKEN_S", 0.001)
    matcher = row_matcher(kind, source, max_tokens=5000)
    mask = np.empty(BYTES.num_words, np.int32)
    for _ in range(2000):
        matcher.fill(mask)
        if matcher.error:
            break
        matcher.accept(ord("a"))
    assert "too ambiguous" in matcher.error


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(("kind", "source"), [("json", SCHEMA), ("regex", "(ab|cd[0-9]{1,3}e?)+f")])
def test_masks_behind_drafts_are_those_of_an_output_that_has_them(backend, kind, source):
    grammar = compiled(kind, source, backend=backend)
    assert grammar.backend == backend

    def matcher_of(output: list[int]) -> RowMatcher:
        request = make_request(grammar, min_tokens=6)
        return RowMatcher(request, output, lambda: (BYTES, loaded(grammar)))

    rng, output = random.Random(3), list[int]()
    matcher = matcher_of([])
    for _ in range(12):
        drafts = list[int]()
        want = [next_tokens(matcher_of(output))]
        while len(drafts) < rng.randint(0, 5):
            drafts.append(rng.choice(want[-1]) if rng.random() < 0.9 else ord("?"))
            if drafts[-1] not in want[-1] or drafts[-1] == END:
                break
            want.append(next_tokens(matcher_of(output + drafts)))
        masks = np.empty((1 + len(drafts), BYTES.num_words), np.int32)
        matcher.fill_along(masks, drafts)
        got = [allowed(mask) for mask in masks]
        assert got == want + [[]] * (len(got) - len(want))
        sampled = rng.choice(want[0])
        if sampled == END:
            break
        output.append(sampled)
        matcher.accept(sampled)
    assert len(output) > 4


def test_a_failure_behind_a_draft_is_none_of_the_request():
    matcher = row_matcher("regex", "ab[0-9]*", allowed_token_ids=[ord("a"), END])
    masks = np.empty((3, BYTES.num_words), np.int32)
    matcher.fill_along(masks, [ord("a"), ord("b")])
    assert [allowed(mask) for mask in masks] == [[ord("a")], [], []]
    assert matcher.error is None
    assert next_tokens(matcher) == [ord("a")]
