"""Test splitting a stream into frames: however the data arrives, the frames are the written ones,
and invalid data is refused.
"""

import asyncio
import io
import socket

import pytest

from vllm.utils.process.frames import (
    HEADER_BYTES,
    FrameError,
    FrameReader,
    begin_frame,
    end_frame,
    frame,
    frame_header,
    read_exactly,
    read_frame,
    read_frame_async,
    read_header,
)

FRAMES = [(0, b"a" * 70_000), (255, b""), (7, b"content")]
STREAM = b"".join(frame(*each) for each in FRAMES)


def test_all_writers_write_the_same_bytes():
    for kind, content in FRAMES:
        data = begin_frame()
        data += content
        assert end_frame(data, kind) == frame(kind, content)
        assert frame_header(kind, len(content)) + content == frame(kind, content)
        assert len(frame(kind, content)) == HEADER_BYTES + len(content)


@pytest.mark.parametrize("part_bytes", [1, 7, 1_000_000])
def test_all_readers_return_what_was_written(part_bytes):
    stream = io.BytesIO(STREAM)
    assert [read_frame(lambda size: stream.read(min(size, part_bytes))) for _ in FRAMES] == FRAMES

    async def read() -> list[tuple[int, bytes]]:
        reader = asyncio.StreamReader()
        for start in range(0, len(STREAM), part_bytes):
            reader.feed_data(STREAM[start : start + part_bytes])
        return [await read_frame_async(reader) for _ in FRAMES]

    assert asyncio.run(read()) == FRAMES
    got = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(theirs)
        for start in range(0, len(STREAM), part_bytes):
            ours.sendall(STREAM[start : start + part_bytes])
            assert reader.receive()
            got += reader.frames()
        ours.close()
        while reader.receive():
            got += reader.frames()
    assert got == FRAMES


def receive_all(data: bytes, max_bytes: int) -> list[tuple[int, bytes]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        reader = FrameReader(theirs, max_bytes)
        assert reader.receive()
        return list(reader.frames())


async def read_async(data: bytes, max_bytes: int) -> list[tuple[int, bytes]]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return [await read_frame_async(reader, max_bytes)]


READERS = {
    "stream": lambda data, most: [read_frame(io.BytesIO(data).read, most)],
    "event loop": lambda data, most: asyncio.run(read_async(data, most)),
    "socket": receive_all,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_what_is_too_long_is_refused_before_it_is_read(reader):
    assert reader(frame(1, b"12345"), 5) == [(1, b"12345")]
    for data in (frame_header(1, 6), b"HTTP/1.1 400 Bad Request"):
        with pytest.raises(
            FrameError, match=r"announced a message of .* bytes, but at most 5 are accepted"
        ):
            reader(data, 5)


def test_the_end_of_a_stream_is_an_error_within_a_frame_and_at_its_beginning():
    for end in (0, 1, HEADER_BYTES, HEADER_BYTES + 6):
        with pytest.raises(EOFError):
            read_frame(io.BytesIO(frame(7, b"content")[:end]).read)
    assert receive_all(frame(7, b"content")[:-1], 100) == []


def test_a_header_can_be_read_alone():
    read = io.BytesIO(STREAM).read
    assert read_header(read) == (0, 70_000)
    assert read_exactly(read, 70_000) == FRAMES[0][1]
