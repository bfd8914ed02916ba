"""Test the content of data: URLs."""

import base64
import re

import pytest

from vllm.errors import RequestError
from vllm.multimodal.fetching.data_url import read_data_url

BYTES = bytes(range(256))
TEXT = base64.b64encode(BYTES).decode()


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
    assert len(read_data_url(f"data:;base64,{text}", where="m", max_bytes=size)) == size
    for read in (
        lambda: read_data_url(f"data:;base64,{text}", where="m", max_bytes=size - 1),
        lambda: read_data_url("data:," + "x" * size, where="m", max_bytes=size - 1),
    ):
        with pytest.raises(RequestError, match=f"at most {size - 1} bytes, and has more"):
            read()


def test_content_that_is_not_base64_is_refused_and_not_shown():
    text = base64.urlsafe_b64encode(BYTES).decode()
    message = "m: its base64 has URL-safe base64 ('-' and '_'); accepted is the standard base64"
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        read_data_url(f"data:image/png;base64,{text}", where="m", max_bytes=1000)
    assert error.value.param == "m" and text not in str(error.value)
