"""Test base64 in JSON bodies, and data: URLs."""

import base64
import os
import re

import pytest

from vllm.errors import RequestError
from vllm.multimodal.fetching import base64_text
from vllm.multimodal.fetching.base64_text import decode_base64, read_data_url

BYTES = bytes(range(256))
TEXT = base64.b64encode(BYTES).decode()


def decode(text, max_bytes=1000):
    return decode_base64(text, where="m", max_bytes=max_bytes)


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
    data = os.urandom(base64_text._PIECE // 4 * 3 * 2 + size)
    text = base64.b64encode(data).decode()
    lines = base64.encodebytes(data).decode()
    for each in (text, text.rstrip("="), lines):
        assert decode(each, len(data)) == data
    for wrong in (text[:9] + "?" + text[10:], text[:9] + "=" + text[10:]):
        with pytest.raises(RequestError):
            decode(wrong, len(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (base64.urlsafe_b64encode(BYTES).decode(), "m: its base64 has URL-safe base64 ('-' and"),
        (
            TEXT.replace("+", " "),
            "m: its base64 has a space; accepted is the standard base64 alpha",
        ),
        ("AAAAA", "m: its base64 has 5 digits: one is missing, or one too many"),
        ("AA=A", "m: its base64 has '=' before its end, or more than two of them"),
        ("AA===", "m: its base64 has '=' before its end, or more"),
        ("AAA?", "m: its base64 has a character"),
        ("AAA\0", "m: its base64 has a character"),
        ("AAAé", "m: its base64 has a character"),
    ],
)
def test_other_texts_are_refused_and_not_shown(text, message):
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        decode(text)
    assert text not in str(error.value)


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64", "data:;base64", "data:text/html;charset=x;BASE64", "DATA:;base64 "],
)
def test_a_data_url_is_its_content_whatever_type_it_says(head):
    for text in (TEXT, TEXT.replace("+", "%2B").replace("/", "%2f")):
        assert read_data_url(f"{head},{text}", where="m", max_bytes=1000) == BYTES


def test_a_data_url_may_be_quoted_text():
    assert read_data_url("data:text/plain,a%20b,c", where="m", max_bytes=9) == b"a b,c"
    with pytest.raises(RequestError, match="m: a data: URL must have a comma"):
        read_data_url("data:image/png;base64", where="m", max_bytes=9)


@pytest.mark.parametrize("size", [10, 11, 12, 1000])
def test_what_is_too_large_is_refused(size):
    text = base64.b64encode(bytes(size)).decode()
    assert len(decode(text, max_bytes=size)) == size
    for read in (
        lambda: decode(text, max_bytes=size - 1),
        lambda: read_data_url(f"data:;base64,{text}", where="m", max_bytes=size - 1),
        lambda: read_data_url("data:," + "x" * size, where="m", max_bytes=size - 1),
    ):
        with pytest.raises(RequestError, match=f"at most {size - 1} bytes, and has more"):
            read()
