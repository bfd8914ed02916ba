"""Media as base64 in a JSON body, with or without the prefix of a data: URL."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from vllm.errors import RequestError
from vllm.multimodal.interface.source import refuse

_PIECE = 2**18
"""Characters that are decoded in one call. A call keeps the interpreter, and other threads wait."""
_ALPHABET = "the standard base64 alphabet: letters, digits, '+' and '/'"


def read_data_url(url: str, *, where: str, max_bytes: int) -> bytes:
    """Decode the content of a data: URL. The media type in it is ignored.

    Args:
        url: begins with "data:".
        where: name of the item in error messages.
        max_bytes: limit of the content.

    Raises:
        RequestError: it is malformed, or too large.
    """
    head, comma, text = url.partition(",")
    if not comma:
        raise refuse(where, "a data: URL must have a comma before its content")
    if head.rstrip().lower().endswith(";base64"):
        if "%" in text:
            text = unquote_to_bytes(text).decode("latin-1")
        return decode_base64(text, where=where, max_bytes=max_bytes)
    if len(data := unquote_to_bytes(text)) > max_bytes:
        raise _too_large(where, max_bytes)
    return data


def decode_base64(text: str, *, where: str, max_bytes: int) -> bytes:
    """Decode standard base64. Line breaks are ignored, and the padding may be missing.

    Args:
        text: to decode.
        where: name of the item in error messages.
        max_bytes: limit of the result.

    Raises:
        RequestError: it is not valid base64, or the result is too large.
    """
    try:
        raw = text.strip().encode("ascii")
    except UnicodeEncodeError:
        raise refuse(where, f"its base64 has a character that is not of {_ALPHABET}") from None
    raw = b"".join(raw[i : i + _PIECE].translate(None, b"\r\n\t") for i in _pieces(len(raw)))
    if len(raw) // 4 * 3 > max_bytes + 3:
        raise _too_large(where, max_bytes)
    for name, found in (("URL-safe base64 ('-' and '_')", b"-_"), ("a space", b" ")):
        if any(character in raw for character in found):
            raise refuse(where, f"its base64 has {name}; accepted is {_ALPHABET}")
    end = len(raw) - (2 if raw.endswith(b"==") else raw.endswith(b"="))
    if raw.find(b"=", 0, end) >= 0:
        raise refuse(where, "its base64 has '=' before its end, or more than two of them")
    if end % 4 == 1:
        raise refuse(where, f"its base64 has {end} digits: one is missing, or one too many")
    try:
        data = b"".join(_decode_digits(raw[i : min(i + _PIECE, end)]) for i in _pieces(end))
    except binascii.Error:
        raise refuse(where, f"its base64 has a character that is not of {_ALPHABET}") from None
    if len(data) > max_bytes:
        raise _too_large(where, max_bytes)
    return data


def _pieces(size: int) -> range:
    return range(0, size, _PIECE)


def _decode_digits(digits: bytes) -> bytes:
    return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)


def _too_large(where: str, max_bytes: int) -> RequestError:
    return refuse(where, f"its content must have at most {max_bytes} bytes, and has more")
