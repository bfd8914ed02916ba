"""Access to FFmpeg by PyAV: importing it, and converting its errors to errors of a request."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.errors import RequestError
from vllm.multimodal.interface.source import refuse

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container.input import InputContainer
    from av.video.stream import VideoStream

_MAX_REASON_CHARS = 200
"""Longest part of a message of FFmpeg that is shown: it may have bytes of the file in it."""


class IncompleteError(ValueError):
    """A file is not one complete recording."""


def import_av(items: str, extra: str) -> Any:
    """Import PyAV.

    Args:
        items: items that need it, for the message.
        extra: extra of this package that installs the library.

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


class Decoders(NamedTuple):
    """The accepted decoders of the files of one modality."""

    names: Sequence[str]
    """Names in FFmpeg."""
    codecs: str
    """Formats that the decoders read, for messages."""

    def open(self, data: bytes, reader: str, av: Any) -> "InputContainer":
        """Open a file from memory, so that it cannot refer to other files or URLs.

        Args:
            data: content of the file.
            reader: the only reader of FFmpeg that is used.
            av: the module of PyAV.
        """
        return av.open(
            io.BytesIO(data),
            format=reader,
            options={"codec_whitelist": ",".join(self.names)},
            metadata_errors="ignore",
        )

    def check(self, stream: "AudioStream | VideoStream", where: str, part: str) -> None:
        """Check that the codec of a stream is accepted, and limit the stream to one thread.

        Each thread would take memory of the process for its stack and its frames.

        Args:
            stream: byte stream of a file.
            where: name of the item.
            part: name of the stream in the message.

        Raises:
            RequestError: the codec is not accepted.
        """
        found = stream.codec_context
        name = "" if found is None else found.codec.name
        if found is None or name not in self.names:
            named = f"the codec {name}" if name else "an unknown codec"
            raise refuse(where, f"{part} {named}; accepted are {self.codecs}")
        found.thread_count = 1


@contextmanager
def decoding(name: str, where: str) -> Iterator[None]:
    """Convert exceptions of a decoder in this context to errors of the request.

    Args:
        name: name of the format.
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
    except Exception as error:  # PyAV may raise anything for a damaged file
        what = getattr(error, "strerror", None) or str(error)
        raise refuse(
            where,
            f"this {name} file cannot be decoded: {what[:_MAX_REASON_CHARS]}. Send a complete, "
            f"undamaged file",
        ) from error
