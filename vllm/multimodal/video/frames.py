"""Videos: the supported formats, and decoding some frames of a file to pixels in RGB.

It uses FFmpeg by PyAV (`av`), which is imported when it is needed. A file is not trusted: it is
opened from memory, only by the reader of the format that its bytes show, and only video decoders
are accepted. The times of all frames are read first, without decoding any; then the selected ones
are decoded, from the last key frame before each. No other frame is kept.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm.multimodal.audio.containers import check_complete, describe, sniff
from vllm.multimodal.interface.decoding import Decoders, IncompleteError, decoding, import_av
from vllm.multimodal.interface.family import VideoFrames
from vllm.multimodal.interface.source import MediaSource, refuse

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

MAX_PACKETS = 500_000
"""Frames of a file: more than two hours at 60 per second."""
MAX_KEPT_BYTES = 2**29
"""Pixels of all chosen frames together."""

MAX_SECONDS = 2**20
"""Time of the last frame, about twelve days. Positions and texts of later times would overflow."""

_FFMPEG_NAMES = {"MP4": "mov", "WebM": "matroska", "AVI": "avi", "GIF": "gif"}
"""Accepted format -> the only reader of FFmpeg that is asked. MP4 has .mov as well, WebM .mkv."""
ACCEPTED = "MP4 and MOV, WebM and MKV, AVI, GIF"
_WITH_INDEX = ("MP4", "WebM")
"""Formats in which each frame has a time, and decoding may begin at each key frame."""
_DECODERS = Decoders(
    (
        *("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9"),
        *("mpeg4", "mpeg2video", "mjpeg", "gif", "prores", "theora"),
    ),
    "H.264, HEVC, VP8, VP9, AV1, MPEG-4, MPEG-2, MJPEG, ProRes, Theora and GIF",
)


@dataclass(frozen=True, kw_only=True)
class FrameChoice:
    """Rules for selecting frames of a video, and the limit of their size."""

    num_frames: int
    """Maximum number of frames, spread evenly."""
    fps: float
    """Maximum number of frames per second; -1: no limit."""
    max_given: int
    """Most frames of a video that a program gives as frames, all of which are read."""
    max_pixels: int
    """Limit of width x height."""

    def indices(self, num_frames: int, seconds: float) -> NDArray[np.int64]:
        """Return the indices of the frames to select.

        Args:
            num_frames: number of frames of the video.
            seconds: length of the video.
        """
        count = min(self.num_frames, num_frames)
        if self.fps > 0:
            count = min(count, max(1, int(seconds * self.fps)))
        return np.linspace(0, num_frames - 1, count).round().astype(np.int64)


def read_frames(source: MediaSource, choice: FrameChoice) -> VideoFrames:
    """Return the selected frames of a video of a request.

    Args:
        source: has the content of a file, or frames.
        choice: rules for selecting frames of a file.

    Raises:
        RequestError: the format is not supported, the file is damaged or incomplete, it or its
            frames are too large, it takes too long, or PyAV is not installed.
    """
    found = _read(source, choice)
    last = float(found.seconds[-1])
    if not 0 <= last <= MAX_SECONDS:
        raise refuse(
            source.where,
            f"its last frame must be shown 0 to {MAX_SECONDS} s after the first, got {last:g} s",
        )
    return found


def _read(source: MediaSource, choice: FrameChoice) -> VideoFrames:
    where = source.where
    if source.frames is not None:
        count, height, width, _ = source.frames.pixels.shape
        if count > choice.max_given:
            raise refuse(
                where,
                f"it has {count} frames, and at most {choice.max_given} are accepted "
                f"(limit_mm_per_prompt, num_frames). Leave some out",
            )
        _check_size(width, height, choice.max_pixels, where)
        return source.frames
    return _read_file(source.data or b"", choice, where)


def _read_file(data: bytes, choice: FrameChoice, where: str) -> VideoFrames:
    name = sniff(data)
    if name not in _FFMPEG_NAMES:
        raise refuse(where, f"it must be a video of {ACCEPTED}, got {describe(data)}")
    av = import_av("videos", "video")
    with decoding(name, where):
        check_complete(name, data)
        with _DECODERS.open(data, _FFMPEG_NAMES[name], av) as container:
            if not container.streams.video:
                raise refuse(where, f"it is a {name} file without pictures; send one with pictures")
            stream = container.streams.video[0]
            _DECODERS.check(stream, where, "its pictures have")
            _check_size(stream.width, stream.height, choice.max_pixels, where)
            index = _read_index(container, stream, where)
            chosen = choice.indices(len(index.times), index.seconds)
            frames = _decode(container, stream, index, chosen, name in _WITH_INDEX)
            pixels = _stack(frames, len(chosen), choice.max_pixels, where)
    return VideoFrames(pixels, (index.times[chosen] - index.times[0]) * index.time_base)


@dataclass(frozen=True, slots=True)
class _Index:
    """Times of all frames of a video, in the time unit of its stream."""

    times: NDArray[np.int64]
    """Times in order."""
    key_times: list[int]
    """Times of the frames from which decoding may begin, in order."""
    time_base: float
    """Seconds of a unit."""
    seconds: float = field(init=False)
    """Time from the first frame to the end of the last."""

    def __post_init__(self) -> None:
        count = len(self.times)
        span = float(self.times[-1] - self.times[0]) * self.time_base
        object.__setattr__(self, "seconds", span * count / max(1, count - 1))


def _read_index(container: "InputContainer", stream: "VideoStream", where: str) -> _Index:
    times, key_times = list[int](), list[int]()
    for packet in container.demux(stream):
        time = packet.dts if packet.pts is None else packet.pts
        # The end of the file, or a frame that is not displayed.
        if time is None or packet.is_discard:
            continue
        if len(times) == MAX_PACKETS:
            raise refuse(where, f"it has more than {MAX_PACKETS} frames. Send a shorter video")
        times.append(time)
        if packet.is_keyframe:
            key_times.append(time)
    if not times or stream.time_base is None:
        raise IncompleteError("it must have at least one frame, got none")
    return _Index(np.sort(np.array(times, np.int64)), sorted(key_times), float(stream.time_base))


def _decode(
    container: "InputContainer",
    stream: "VideoStream",
    index: _Index,
    chosen: NDArray[np.int64],
    with_index: bool,
) -> Iterator["VideoFrame"]:
    """Decode and yield the selected frames.

    Raises:
        IncompleteError: the file ends before the last one.
    """
    container.seek(int(index.times[0]), stream=stream)
    frames = enumerate(container.decode(stream))
    time = int(index.times[0])
    for number in chosen.tolist():
        wanted = int(index.times[number])
        begin = bisect_right(index.key_times, wanted) - 1
        if with_index and begin >= 0 and index.key_times[begin] > time:
            container.seek(index.key_times[begin], stream=stream)
            frames = enumerate(container.decode(stream))
        for count, frame in frames:
            is_reached = count == number
            if with_index and frame.pts is not None:
                time = frame.pts
                is_reached = time >= wanted
            if is_reached:
                yield frame
                break
        else:
            raise IncompleteError(
                f"its index lists {len(index.times)} frames, but some of them are missing"
            )


def _stack(
    frames: Iterator["VideoFrame"], count: int, max_pixels: int, where: str
) -> NDArray[np.uint8]:
    """Stack frames to pixels [n, H, W, 3]; they are resized to the size of the first one."""
    found: NDArray[np.uint8] | None = None
    turns, size = 0, (0, 0)
    for number, frame in enumerate(frames):
        _check_size(frame.width, frame.height, max_pixels, where)
        if found is None:
            turns, size = round(frame.rotation / 90), (frame.width, frame.height)
            shape = (size[1], size[0]) if turns % 2 == 0 else size
            num_bytes = count * 3 * size[0] * size[1]
            if num_bytes > MAX_KEPT_BYTES:
                raise refuse(
                    where,
                    f"{count} frames of {size[0]} x {size[1]} pixels have {num_bytes} bytes, more "
                    f"than {MAX_KEPT_BYTES}. Scale the video down, or start the server with fewer "
                    f"frames (--media-io-kwargs)",
                )
            found = np.empty((count, *shape, 3), np.uint8)
        pixels = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
        found[number] = np.rot90(pixels, turns)
    assert found is not None
    return found


def _check_size(width: int, height: int, max_pixels: int, where: str) -> None:
    if min(width, height) < 1 or width * height > max_pixels:
        raise refuse(
            where,
            f"its frames must have 1 to {max_pixels} pixels (VLLM_MAX_IMAGE_PIXELS), got "
            f"{width} x {height}",
        )
