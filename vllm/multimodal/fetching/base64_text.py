"""Media as base64 in a JSON body, with or without the prefix of a data: URL."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from vllm.errors import RequestError
from vllm.multimodal.interface.source import refuse

_PIECE = 2**16
"""Characters that are decoded in one call. A call keeps the interpreter, and other threads wait."""
_MAX_PADS = 2
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
    comma = url.find(",")
    if comma < 0:
        raise refuse(where, "a data: URL must have a comma before its content")
    head, start = url[:comma], comma + 1
    has_escapes = url.find("%", start) >= 0
    if head.rstrip().lower().endswith(";base64"):
        if has_escapes:
            url, start = unquote_to_bytes(url[start:]).decode("latin-1"), 0
        return decode_base64(url, start, where=where, max_bytes=max_bytes)
    if len(data := unquote_to_bytes(url[start:])) > max_bytes:
        raise _too_large(where, max_bytes)
    return data


def decode_base64(text: str, start: int = 0, *, where: str, max_bytes: int) -> bytes:
    """Decode standard base64. Line breaks are ignored, and the padding may be missing.

    Args:
        text: text to decode.
        start: index of its first character; what is before it is ignored.
        where: name of the item in error messages.
        max_bytes: limit of the result.

    Raises:
        RequestError: it is not valid base64, or the result is too large.
    """
    text = text.rstrip()
    while text[start : start + 1].isspace():
        start += 1
    decoded: list[bytes] = []
    num_bytes = num_pads = 0
    digits = b""
    for position in range(start, len(text), _PIECE):
        more = _digits_of(text[position : position + _PIECE], where)
        new = more.rstrip(b"=")
        if b"=" in new or (new and num_pads):
            num_pads = _MAX_PADS + 1
        num_pads += len(more) - len(new)
        if num_pads > _MAX_PADS:
            raise refuse(where, "its base64 has '=' before its end, or more than two of them")
        digits += new
        whole = len(digits) // 4 * 4
        decoded.append(_decode_digits(digits[:whole], where))
        digits = digits[whole:]
        num_bytes += len(decoded[-1])
        if num_bytes > max_bytes:
            raise _too_large(where, max_bytes)
    if len(digits) == 1:
        num_digits = num_bytes // 3 * 4 + 1
        raise refuse(where, f"its base64 has {num_digits} digits: one is missing, or one too many")
    decoded.append(_decode_digits(digits + b"=" * (-len(digits) % 4), where))
    if num_bytes + len(decoded[-1]) > max_bytes:
        raise _too_large(where, max_bytes)
    return b"".join(decoded)


def _digits_of(text: str, where: str) -> bytes:
    """Return the digits and the padding of a piece.

    Raises:
        RequestError: it has other characters of which clients should know.
    """
    try:
        digits = text.encode("ascii").translate(None, b"\r\n\t")
    except UnicodeEncodeError:
        raise refuse(where, f"its base64 has a character that is not of {_ALPHABET}") from None
    for name, found in (("URL-safe base64 ('-' and '_')", b"-_"), ("a space", b" ")):
        if any(character in digits for character in found):
            raise refuse(where, f"its base64 has {name}; accepted is {_ALPHABET}")
    return digits


def _decode_digits(digits: bytes, where: str) -> bytes:
    try:
        return base64.b64decode(digits, validate=True)
    except binascii.Error:
        raise refuse(where, f"its base64 has a character that is not of {_ALPHABET}") from None


def _too_large(where: str, max_bytes: int) -> RequestError:
    return refuse(where, f"its content must have at most {max_bytes} bytes, and has more")
