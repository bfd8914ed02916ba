"""Frame messages in a stream of bytes between processes or machines.

    length of the content (8 bytes, little endian), kind (1 byte), content

The two ends define the meaning of kinds and contents. ZMQ is not framed by this module.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator

_HEADER = struct.Struct("<QB")
HEADER_BYTES = _HEADER.size
MAX_BYTES = 2**32
"""Limit of a content, where the reader gives no other."""
_PART_BYTES, _SOCKET_BYTES = 2**20, 2**16
"""Maximum number of bytes of one read."""


class FrameError(Exception):
    """A received frame is not acceptable; str() says why."""


def frame_header(kind: int, size: int) -> bytes:
    """Return the header of a frame whose content has `size` bytes."""
    return _HEADER.pack(size, kind)


def frame(kind: int, content: bytes) -> bytes:
    """Return a whole frame: header and content."""
    return _HEADER.pack(len(content), kind) + content


def begin_frame() -> bytearray:
    """Return space for a header, after which the content can be appended; `end_frame` fills the
    header in.
    """
    return bytearray(HEADER_BYTES)


def end_frame(data: bytearray, kind: int) -> bytearray:
    """Fill in the header after the content is complete, and return the same bytes."""
    _HEADER.pack_into(data, 0, len(data) - HEADER_BYTES, kind)
    return data


def _parse(header: bytes | bytearray, max_bytes: int) -> tuple[int, int]:
    size, kind = _HEADER.unpack_from(header)
    if size > max_bytes:
        raise FrameError(
            f"the peer announced a message of {size} bytes, but at most {max_bytes} are accepted"
        )
    return kind, size


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read exactly `size` bytes. Memory is allocated only as data arrives.

    Args:
        read: returns at most the requested number of bytes, and none at the end of the stream.
        size: number of bytes.

    Raises:
        EOFError: the stream has ended too early.
    """
    data = bytearray()
    while len(data) < size:
        part = read(min(size - len(data), _PART_BYTES))
        if not part:
            raise EOFError("the connection ended early")
        data += part
    return bytes(data)


def read_header(read: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> tuple[int, int]:
    """Read the header of the next frame.

    Args:
        read: function that reads, as for `read_exactly`.
        max_bytes: largest accepted content.

    Returns:
        (kind, length of the content in bytes).

    Raises:
        FrameError: the content is longer than `max_bytes`.
        EOFError: the stream has ended.
    """
    return _parse(read_exactly(read, HEADER_BYTES), max_bytes)


def read_frame(read: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> tuple[int, bytes]:
    """Read the next frame and return its kind and content.

    Args:
        read: function that reads, as for `read_exactly`.
        max_bytes: largest accepted content.

    Raises:
        FrameError: the content is longer than `max_bytes`.
        EOFError: the stream has ended.
    """
    kind, size = read_header(read, max_bytes)
    return kind, read_exactly(read, size)


async def read_frame_async(
    reader: asyncio.StreamReader, max_bytes: int = MAX_BYTES
) -> tuple[int, bytes]:
    """Read the next frame in an event loop, and return its kind and content.

    Raises:
        FrameError: its content is longer than `max_bytes`.
        OSError, EOFError: the connection has ended.
    """
    kind, size = _parse(await reader.readexactly(HEADER_BYTES), max_bytes)
    return kind, await reader.readexactly(size)


class FrameReader:
    """Splits the data that a socket receives into frames.

    Args:
        connection: a stream socket.
        max_bytes: largest accepted content.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._part = memoryview(bytearray(_SOCKET_BYTES))

    def receive(self) -> bool:
        """Receive the available data; a blocking socket waits for the first byte. Returns False if
        the other end is closed.
        """
        count = self._connection.recv_into(self._part)
        self._data += self._part[:count]
        return count > 0

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield (kind, content) of each frame that is complete. Each frame is yielded once.

        Raises:
            FrameError: a frame is longer than the limit.
        """
        data = self._data
        while len(data) >= HEADER_BYTES:
            kind, size = _parse(data, self._max_bytes)
            end = HEADER_BYTES + size
            if len(data) < end:
                return
            content = bytes(data[HEADER_BYTES:end])
            del data[:end]
            yield kind, content
