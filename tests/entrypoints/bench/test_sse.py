import pytest

from tests.loops import loop_over
from vllm.entrypoints.bench.backends import SseParser

BODY = (
    b'data: {"a": 1}\n\n: a comment\n\nevent: x\ndata: two\ndata:lines\n\n'
    b"data: crlf\r\n\r\nid: 1\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"crlf", b"[DONE]"]


@loop_over("size", range(1, len(BODY) + 1))
def test_events_are_the_same_however_the_body_is_cut(size):
    parser = SseParser()
    pieces = [BODY[i : i + size] for i in range(0, len(BODY), size)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_an_event_waits_for_its_end():
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b") == [b"a"]
    assert parser.feed(b"\n\n") == [b"b"]


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.entrypoints.bench.backends.MAX_EVENT_BYTES", 10)
    with pytest.raises(ValueError, match="an event of more than 10 bytes"):
        SseParser().feed(b"data: 1234567")
