"""Test reading a growing text: when the reader waits, what it holds back, and what counts as
read.
"""

import re

import pytest

from vllm.utils.text.text_stream import Markers, TextStream


def run(read, pieces):
    """Return the result of a reader and its stream for a text that arrives in these pieces."""
    stream = TextStream()
    steps = read(stream)
    results = []

    def step():
        try:
            next(steps)
        except StopIteration as end:
            results.append(end.value)

    for piece in pieces:
        stream.add(piece)
        if not results:
            step()
    stream.is_complete = True
    if not results:
        step()
    return results[0], stream


def unread(stream):
    return stream.text[stream.position :]


READS = [
    (lambda s: s.peek(), "ab", "a", "ab"),
    (lambda s: s.peek(), "", "", ""),
    (lambda s: s.skip_space(), " \n\tab", "a", "ab"),
    (lambda s: s.skip_space(), "  ", "", ""),
    (lambda s: s.read_run(re.compile(r"\d+")), "123ab", "123", "ab"),
    (lambda s: s.read_run(re.compile(r"\d+")), "ab", "", "ab"),
    (lambda s: s.read_literal("abc"), "abcd", True, "d"),
    (lambda s: s.read_literal("abc"), "abd", False, "abd"),
    (lambda s: s.read_literal("abc"), "ab", False, "ab"),
]


@pytest.mark.parametrize(("read", "text", "result", "rest"), READS)
def test_a_result_is_the_same_however_the_text_comes(read, text, result, rest):
    for pieces in ([text], list(text), ["", text, ""]):
        found, stream = run(read, pieces)
        assert (found, unread(stream)) == (result, rest)
        assert stream.pop_read() + unread(stream) == text
        assert stream.pop_read() == ""


@pytest.mark.parametrize(
    ("text", "before", "marker"),
    [("a<b>c", "a", "<b>"), ("a<<b>", "a<", "<b>"), ("a<b", "a<b", ""), ("ab<c>", "ab", "<c>")],
)
def test_text_before_a_marker_is_passed_on(text, before, marker):
    passed = []
    for pieces in ([text], list(text)):
        passed.clear()
        found, _ = run(lambda s: s.read_until(Markers(["<b>", "<c>"]), passed.append), pieces)
        assert ("".join(passed), found) == (before, marker)


def test_only_what_may_be_a_marker_is_held_back():
    markers = Markers(["<b>", "[end]"])
    texts = ["abc", "ab<", "a<b", "<x", "[e", "<[", "<b<"]
    assert [markers.safe_end(text, 0) for text in texts] == [3, 2, 1, 2, 0, 1, 2]
    assert Markers([]).safe_end("abc", 0) == 3
    assert Markers([]).search("abc", 0) is None
