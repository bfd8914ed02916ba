"""FFmpeg by PyAV: how it is imported, and its errors as errors of a request."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.errors import RequestError
from vllm.multimodal.interface.source import refuse

_MAX_REASON_CHARS = 200
"""Longest part of a message of FFmpeg that is shown: it may have bytes of the file in it."""


class IncompleteError(ValueError):
    """A file is not one complete recording."""


def import_av(items: str, extra: str) -> Any:
    """Return the module of PyAV.

    Args:
        items: that need it, for the message.
        extra: of this package, which installs it.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import av
    except ImportError:
        raise RequestError(
            f"{items} need PyAV, which is not installed: pip install 'vllm[{extra}]'"
        ) from None
    return av


@contextmanager
def decoding(name: str, where: str) -> Iterator[None]:
    """Report the errors of a decoder as errors of the request.

    Args:
        name: of the format.
        where: name of the item.
    """
    try:
        yield
    except (RequestError, GeneratorExit):
        raise
    except IncompleteError as error:
        raise refuse(where, f"this {name} file is damaged or incomplete: {error}") from None
    except MemoryError:
        raise refuse(where, "there is not enough memory to decode it. Send a shorter one") from None
    except Exception as error:  # a damaged file makes PyAV raise anything
        what = getattr(error, "strerror", None) or str(error)
        raise refuse(
            where,
            f"this {name} file cannot be decoded: {what[:_MAX_REASON_CHARS]}. Send a complete, "
            f"undamaged file",
        ) from error
