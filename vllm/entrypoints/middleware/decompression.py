"""Decompress request bodies: gzip, deflate (RFC 9110, section 8.4.1) and zstd (RFC 8878).

zstd needs the package zstandard, the extra `zstd`.
"""

import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

ENCODINGS = ("gzip", "deflate", *(("zstd",) if find_spec("zstandard") else ()))
"""The encodings that this server can read."""
_GZIP = 16 + zlib.MAX_WBITS
_CHUNK_BYTES = 2**16
_ZSTD_PIECE_BYTES = 256
"""Compressed data that is read at a time: a block of 128 KiB may come from four bytes."""
_ZSTD_WINDOW_BYTES = 8 * 2**20
"""Memory that a body may ask for; RFC 9659 allows no more in HTTP."""


_Data = bytes | memoryview


class DecompressionError(Exception):
    """A body does not have the format that its Content-Encoding names."""


class OutputTooLargeError(Exception):
    """A body is larger than the limit after decompression."""


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed data of a body.

    Args:
        data: the whole body.
        encoding: one of `ENCODINGS`.
        max_bytes: largest accepted result.

    Raises:
        DecompressionError: the data is damaged or incomplete.
        OutputTooLargeError: the result is larger than `max_bytes`; the rest is not decompressed.
    """
    if encoding == "gzip":
        return _read(data, lambda: zlib.decompressobj(_GZIP), max_bytes)
    if encoding == "zstd":
        return _read(memoryview(data), _ZstdReader, max_bytes)
    try:
        return _read_deflate(data, zlib.MAX_WBITS, max_bytes)
    except DecompressionError:  # raw deflate: many clients leave out the zlib header
        return _read_deflate(data, -zlib.MAX_WBITS, max_bytes)


class _Reader(Protocol):
    """Decompressor for one member or frame, with the interface of zlib."""

    @property
    def eof(self) -> bool: ...

    @property
    def unconsumed_tail(self) -> _Data: ...

    @property
    def unused_data(self) -> _Data: ...

    def decompress(self, data: Any, max_length: int, /) -> bytes: ...


class _ZstdReader:
    """Decompresses one zstd frame in small pieces."""

    def __init__(self) -> None:
        import zstandard

        context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._reader: Any = context.decompressobj()
        self._error = zstandard.ZstdError
        self.eof = False
        self.unconsumed_tail: _Data = b""
        self.unused_data: _Data = b""

    def decompress(self, data: _Data, max_length: int, /) -> bytes:
        """Decompress the next piece, to at most a few megabytes."""
        try:
            part: bytes = self._reader.decompress(data[:_ZSTD_PIECE_BYTES])
        except self._error as error:
            raise DecompressionError(str(error)) from None
        self.eof = self._reader.eof
        num_unused = len(self._reader.unused_data) if self.eof else 0
        rest = data[min(len(data), _ZSTD_PIECE_BYTES) - num_unused :]
        self.unused_data, self.unconsumed_tail = (rest, b"") if self.eof else (b"", rest)
        return part


def _read_deflate(data: bytes, window_bits: int, max_bytes: int) -> bytes:
    return _read(data, lambda: zlib.decompressobj(window_bits), max_bytes, may_repeat=False)


def _read(
    data: _Data, open_reader: Callable[[], _Reader], max_bytes: int, *, may_repeat: bool = True
) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while data:  # the data may consist of several gzip members or zstd frames
        reader = open_reader()
        while not reader.eof:
            try:
                part = reader.decompress(data, _CHUNK_BYTES)
            except zlib.error as error:
                raise DecompressionError(str(error)) from None
            data = reader.unconsumed_tail
            if not part and not data and not reader.eof:
                raise DecompressionError("the data ends too early")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise OutputTooLargeError
            parts.append(part)
        data = reader.unused_data
        if data and not may_repeat:
            raise DecompressionError("there is more data after the end")
    return b"".join(parts)
