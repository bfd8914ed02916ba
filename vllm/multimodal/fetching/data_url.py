"""The content of data: URLs in requests."""

from urllib.parse import unquote_to_bytes

from vllm.errors import RequestError
from vllm.multimodal.interface.source import refuse
from vllm.utils.text.base64_text import Base64Error, TooManyBytesError, decode_base64


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
        try:
            return decode_base64(url, start, max_bytes=max_bytes)
        except Base64Error as error:
            raise refuse(where, f"its base64 {error}") from None
        except TooManyBytesError:
            raise _too_large(where, max_bytes) from None
    if len(data := unquote_to_bytes(url[start:])) > max_bytes:
        raise _too_large(where, max_bytes)
    return data


def _too_large(where: str, max_bytes: int) -> RequestError:
    return refuse(where, f"its content must have at most {max_bytes} bytes, and has more")
