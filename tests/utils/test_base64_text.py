"""Test base64 in JSON bodies."""

import base64
import os
import re

import pytest

from vllm.utils.text import base64_text
from vllm.utils.text.base64_text import Base64Error, TooManyBytesError

BYTES = bytes(range(256))
TEXT = base64.b64encode(BYTES).decode()


def decode(text, max_bytes=1000):
    return base64_text.decode_base64(text, max_bytes=max_bytes)


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.rstrip("="),
        TEXT.rstrip("=") + "=",
        base64.encodebytes(BYTES).decode(),
        base64.encodebytes(BYTES).decode().replace("\n", "\r\n"),
        f"\n  {TEXT}\n",
    ],
)
def test_line_breaks_are_ignored_and_padding_may_be_missing(text):
    assert decode(text) == BYTES


@pytest.mark.parametrize("size", range(5))
def test_every_length_is_decoded(size):
    data = os.urandom(size)
    text = base64.b64encode(data).decode()
    assert decode(text) == decode(text.rstrip("=")) == data


@pytest.mark.parametrize("size", [-3, -2, -1, 0, 1, 2, 3, 4])
def test_a_large_text_is_decoded_in_pieces(size):
    data = os.urandom(base64_text.PIECE // 4 * 3 * 2 + size)
    text = base64.b64encode(data).decode()
    lines = base64.encodebytes(data).decode()
    for each in (text, text.rstrip("="), lines):
        assert decode(each, len(data)) == data
    for wrong in (text[:9] + "?" + text[10:], text[:9] + "=" + text[10:]):
        with pytest.raises(Base64Error):
            decode(wrong, len(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (base64.urlsafe_b64encode(BYTES).decode(), "has URL-safe base64 ('-' and"),
        (
            TEXT.replace("+", " "),
            "has a space; accepted is the standard base64 alpha",
        ),
        ("AAAAA", "has 5 characters, which is not a possible length: it is cut off, or has one"),
        ("AA=A", "has '=' before its end, or more than two of them"),
        ("AA===", "has '=' before its end, or more"),
        ("AAA?", "has a character"),
        ("AAA\0", "has a character"),
        ("AAAé", "has a character"),
    ],
)
def test_other_texts_are_refused_and_not_shown(text, message):
    with pytest.raises(Base64Error, match=re.escape(message)) as error:
        decode(text)
    assert text not in str(error.value)


@pytest.mark.parametrize("size", [10, 11, 12, 1000])
def test_a_result_above_the_limit_is_refused(size):
    text = base64.b64encode(bytes(size)).decode()
    assert len(decode(text, size)) == len(decode(text, None)) == size
    with pytest.raises(TooManyBytesError, match=f"more than {size - 1} bytes"):
        decode(text, size - 1)
