"""Frames: how messages follow one another in a stream of bytes, between processes and machines.

    length of the content (8 bytes, little endian), kind (1 byte), content

What kinds and contents mean is for both ends to know. ZMQ has frames of its own.
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
"""Of one read."""


class FrameError(Exception):
    """The reader does not accept what has arrived; str() says why."""


def frame_header(kind: int, size: int) -> bytes:
    """Return what comes before a content of this many bytes."""
    return _HEADER.pack(size, kind)


def frame(kind: int, content: bytes) -> bytes:
    """Return a whole frame."""
    return _HEADER.pack(len(content), kind) + content


def begin_frame() -> bytearray:
    """Return space for a header, after which a content can be written; for `end_frame`."""
    return bytearray(HEADER_BYTES)


def end_frame(data: bytearray, kind: int) -> bytearray:
    """Fill in the header, now that the content is complete; returns the same bytes."""
    _HEADER.pack_into(data, 0, len(data) - HEADER_BYTES, kind)
    return data


def _parse(header: bytes | bytearray, max_bytes: int) -> tuple[int, int]:
    size, kind = _HEADER.unpack_from(header)
    if size > max_bytes:
        raise FrameError(
            f"a message of {size} bytes was announced, and at most {max_bytes} are accepted"
        )
    return kind, size


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read this many bytes. Memory is taken as they come, whatever was announced.

    Args:
        read: returns at most as many bytes as it is asked for, and none at the end of the stream.
        size: number of bytes.

    Raises:
        EOFError: the stream has ended before.
    """
    data = bytearray()
    while len(data) < size:
        part = read(min(size - len(data), _PART_BYTES))
        if not part:
            raise EOFError("the connection ended early")
        data += part
    return bytes(data)


def read_header(read: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> tuple[int, int]:
    """Read the kind of the next frame, and the length of its content.

    Args:
        read: as for `read_exactly`.
        max_bytes: limit of the content.

    Raises:
        FrameError: it is longer.
        EOFError: the stream has ended.
    """
    return _parse(read_exactly(read, HEADER_BYTES), max_bytes)


def read_frame(read: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> tuple[int, bytes]:
    """Read the next frame: its kind and content. Takes and raises the same as `read_header`."""
    kind, size = read_header(read, max_bytes)
    return kind, read_exactly(read, size)


async def read_frame_async(
    reader: asyncio.StreamReader, max_bytes: int = MAX_BYTES
) -> tuple[int, bytes]:
    """Read the next frame in an event loop: its kind and content.

    Raises:
        FrameError: its content is longer than `max_bytes`.
        OSError, EOFError: the connection has ended.
    """
    kind, size = _parse(await reader.readexactly(HEADER_BYTES), max_bytes)
    return kind, await reader.readexactly(size)


class FrameReader:
    """Cuts what a socket receives into frames.

    Args:
        connection: a stream.
        max_bytes: limit of a content.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._part = memoryview(bytearray(_SOCKET_BYTES))

    def receive(self) -> bool:
        """Take what has arrived; waits for the first byte if the socket does. Returns False when
        the other end is closed."""
        count = self._connection.recv_into(self._part)
        self._data += self._part[:count]
        return count > 0

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield kind and content of the frames that are complete; each is given once.

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
