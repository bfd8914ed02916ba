"""Compressed request bodies: gzip and deflate (RFC 9110, section 8.4.1)."""

import zlib

ENCODINGS = ("gzip", "deflate")
_GZIP = 16 + zlib.MAX_WBITS
_CHUNK_BYTES = 2**16


class DecompressionError(Exception):
    """A body is not what its Content-Encoding says."""


class OutputTooLargeError(Exception):
    """A body is larger than the limit once it is decompressed."""


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed data.

    Args:
        data: the whole body.
        encoding: one of `ENCODINGS`.
        max_bytes: of the result.

    Raises:
        DecompressionError: the data is damaged or incomplete.
        OutputTooLargeError: there is more than `max_bytes`; no more than that is in memory.
    """
    if encoding == "gzip":
        return _read(data, _GZIP, max_bytes)
    try:
        return _read(data, zlib.MAX_WBITS, max_bytes)
    except DecompressionError:  # many clients leave out the header of zlib
        return _read(data, -zlib.MAX_WBITS, max_bytes)


def _read(data: bytes, window_bits: int, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while data:  # a gzip file may have several members
        reader = zlib.decompressobj(window_bits)
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
        if window_bits != _GZIP and data:
            raise DecompressionError("there is more data after the end")
    return b"".join(parts)
