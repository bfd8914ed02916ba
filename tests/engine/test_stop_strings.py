"""Test stop strings: they are found however tokens split the text, and no part of them is shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.engine.output.output_text import OutputText
from vllm.engine.output.stop_strings import StopStrings


class FakeDetokenizer:
    """Token i is the i-th piece of a list; nothing is held back."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token_ids):
        return "".join(self.pieces[token_id] for token_id in token_ids)

    def flush(self):
        return ""


def run(pieces, stop, *, is_shown=False, min_tokens=0):
    """Process the pieces; return the text, the stop string found, and the text shown each time."""
    strings = StopStrings(stop, is_shown=is_shown) if stop else None
    output = OutputText(FakeDetokenizer(pieces), strings, min_tokens)
    matched, shown = None, []
    for token_id in range(len(pieces)):
        matched = output.append([token_id])
        shown.append(output.text[: output.num_shown])
        if matched is not None:
            break
    else:
        output.finish()
    shown.append(output.text[: output.num_shown])
    return output.text, matched, shown


def read_by_character(text, stop):
    """Return the result of searching character by character: start of the match, and the stop
    string.
    """
    for end in range(1, len(text) + 1):
        if found := [string for string in stop if text[:end].endswith(string)]:
            longest = max(found, key=len)
            return end - len(longest), longest
    return len(text), None


letters = st.text("ab", min_size=1, max_size=4)


@given(pieces=st.lists(letters, max_size=8), stop=st.lists(letters, min_size=1, max_size=3))
@settings(max_examples=500)
def test_how_tokens_cut_the_text_does_not_matter(pieces, stop):
    start, string = read_by_character("".join(pieces), stop)
    text, matched, _ = run(pieces, stop)
    assert (text, matched) == ("".join(pieces)[:start], string)


@given(pieces=st.lists(letters, max_size=8), stop=st.lists(letters, min_size=1, max_size=3))
@settings(max_examples=500)
def test_nothing_is_shown_that_is_taken_back(pieces, stop):
    text, _, shown = run(pieces, stop)
    assert all(text.startswith(earlier) for earlier in shown)
    assert shown[-1] == text


@given(pieces=st.lists(letters, max_size=8), stop=st.lists(letters, min_size=1, max_size=3))
@settings(max_examples=300)
def test_no_more_is_held_back_than_might_become_a_stop_string(pieces, stop):
    _, matched, shown = run(pieces, stop)
    for count, seen in enumerate(shown[: -2 if matched else -1], start=1):
        held = "".join(pieces[:count])[len(seen) :]
        assert not held or any(string.startswith(held) for string in stop)


def test_a_stop_string_over_three_tokens_is_cut_off_and_never_shown():
    text, matched, shown = run(["one </", "end", "> two"], ["</end>"])
    assert (text, matched) == ("one ", "</end>")
    assert shown == ["one ", "one ", "one ", "one "]


def test_text_held_back_in_vain_is_shown_as_soon_as_that_is_clear():
    _, matched, shown = run(["a<", "/e", "!", "b<"], ["</end>"])
    assert matched is None
    assert shown == ["a", "a", "a</e!", "a</e!b", "a</e!b<"]


def test_the_string_that_is_complete_first_wins_whatever_the_order_of_the_list():
    assert run(["xabcde"], ["abcde", "bc"])[:2] == ("xa", "bc")
    assert run(["xabcde"], ["bc", "abcde"])[:2] == ("xa", "bc")


def test_of_strings_complete_at_the_same_character_the_longer_wins():
    assert run(["xabc"], ["bc", "abc"])[:2] == ("x", "abc")


def test_an_included_stop_string_is_shown_at_once_and_what_follows_it_is_cut():
    text, matched, shown = run(["a<", "e>b"], ["<e>"], is_shown=True)
    assert (text, matched) == ("a<e>", "<e>")
    assert shown == ["a<", "a<e>", "a<e>"]


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ababcd"), (4, "ababcd")]
)
def test_no_stop_string_ends_the_output_before_min_tokens(min_tokens, text):
    assert run(["ab", "ab", "cd", "ab"], ["ab"], min_tokens=min_tokens)[:2] == (text, "ab")


def test_a_stop_string_begun_before_min_tokens_and_completed_after_counts():
    assert run(["xa", "b"], ["ab"], min_tokens=2)[:2] == ("x", "ab")


def test_without_stop_strings_everything_is_shown_at_once():
    assert run(["a", "b"], [])[2] == ["a", "ab", "ab"]
