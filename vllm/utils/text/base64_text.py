"""Decodes base64 from clients. Line breaks are ignored, and the padding may be missing."""

import base64
import binascii

PIECE = 2**16
"""Characters that are decoded in one call. A call keeps the interpreter, and other threads wait."""
_MAX_PADS = 2
_ALPHABET = "the standard base64 alphabet: letters, digits, '+' and '/'"


class Base64Error(ValueError):
    """The text is not valid base64.

    str() says what the text has, such as "has a space", and does not show its content.
    """


class TooManyBytesError(ValueError):
    """The text decodes to more bytes than the limit."""


def decode_base64(text: str, start: int = 0, *, max_bytes: int | None = None) -> bytes:
    """Decode standard base64.

    Args:
        text: text to decode.
        start: index of its first character; what is before it is ignored.
        max_bytes: limit of the result; None: no limit.

    Raises:
        Base64Error: it is not valid base64.
        TooManyBytesError: the result exceeds the limit.
    """
    text = text.rstrip()
    while text[start : start + 1].isspace():
        start += 1
    decoded: list[bytes] = []
    num_bytes = num_pads = 0
    digits = b""
    for position in range(start, len(text), PIECE):
        more = _digits_of(text[position : position + PIECE])
        new = more.rstrip(b"=")
        if b"=" in new or (new and num_pads):
            num_pads = _MAX_PADS + 1
        num_pads += len(more) - len(new)
        if num_pads > _MAX_PADS:
            raise Base64Error("has '=' before its end, or more than two of them")
        digits += new
        whole = len(digits) // 4 * 4
        decoded.append(_decode_digits(digits[:whole]))
        digits = digits[whole:]
        num_bytes += len(decoded[-1])
        _check_size(num_bytes, max_bytes)
    if len(digits) == 1:
        num_digits = num_bytes // 3 * 4 + 1
        raise Base64Error(
            f"has {num_digits} characters, which is not a possible length: it is cut off, or has "
            "one character too many"
        )
    decoded.append(_decode_digits(digits + b"=" * (-len(digits) % 4)))
    _check_size(num_bytes + len(decoded[-1]), max_bytes)
    return b"".join(decoded)


def _digits_of(text: str) -> bytes:
    """Return the digits and the padding of a piece.

    Raises:
        Base64Error: it has other characters of which clients should know.
    """
    try:
        digits = text.encode("ascii").translate(None, b"\r\n\t")
    except UnicodeEncodeError:
        raise Base64Error(f"has a character that is not of {_ALPHABET}") from None
    for name, found in (("URL-safe base64 ('-' and '_')", b"-_"), ("a space", b" ")):
        if any(character in digits for character in found):
            raise Base64Error(f"has {name}; accepted is {_ALPHABET}")
    return digits


def _decode_digits(digits: bytes) -> bytes:
    try:
        return base64.b64decode(digits, validate=True)
    except binascii.Error:
        raise Base64Error(f"has a character that is not of {_ALPHABET}") from None


def _check_size(num_bytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and num_bytes > max_bytes:
        raise TooManyBytesError(f"it has more than {max_bytes} bytes, the limit")
