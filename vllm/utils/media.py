"""Read and write audio and video files.

OpenCV is imported only when it is needed.
"""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm.errors import RequestError

Samples = NDArray[np.float32]
"""[n] of one channel or [channels, n], from -1 to 1."""

Frames = NDArray[np.uint8]
"""[frames, height, width, 3] in RGB."""

_WAV_FORMS = {1: ("u1", 128, 2**7), 2: ("<i2", 0, 2**15), 4: ("<i4", 0, 2**31)}
"""Bytes per sample -> type, value of silence, and largest distance from it."""
_MAX_INT16 = 2**15 - 1


def read_wav(data: bytes) -> tuple[Samples, int]:
    """Read the samples of a WAV file with integers of 8, 16 or 32 bits. Several channels are mixed
    to one.

    Returns:
        (samples, samples per second).

    Raises:
        RequestError: it is not such a file.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            dtype, silence, scale = _WAV_FORMS[file.getsampwidth()]
            frames = np.frombuffer(file.readframes(file.getnframes()), dtype)
            channels, rate = file.getnchannels(), file.getframerate()
    except (wave.Error, EOFError, KeyError) as error:
        raise RequestError(
            f"this is not a WAV file with samples of 8, 16 or 32 bits: {error}. Convert it, for "
            "example with: ffmpeg -i FILE out.wav"
        ) from None
    samples = (frames.astype(np.float32) - silence) / np.float32(scale)
    return np.asarray(samples.reshape(-1, channels).mean(1), np.float32), rate


def write_wav(samples: NDArray[Any], rate: int) -> bytes:
    """Write a WAV file of 16-bit integers.

    Args:
        samples: floats from -1 to 1, [n] or [channels, n]; values outside are clipped.
        rate: samples per second.
    """
    channels = np.atleast_2d(np.asarray(samples, np.float32))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes((channels.T.clip(-1, 1) * _MAX_INT16).round().astype("<i2").tobytes())
    return buffer.getvalue()


def read_video(path: Path, num_frames: int = -1) -> Frames:
    """Read frames of a video file, evenly spread over its length.

    Args:
        path: path of the file.
        num_frames: maximum number of frames; -1: all.

    Raises:
        RequestError: OpenCV is not installed, or the file is not a video.
    """
    try:
        import cv2
    except ImportError:
        raise RequestError(
            "videos need OpenCV, which is not installed: pip install opencv-python-headless"
        ) from None
    capture = cv2.VideoCapture(str(path))
    try:
        total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        count = total if num_frames < 0 else min(num_frames, total)
        wanted = set(np.linspace(0, total - 1, count).round().astype(int).tolist())
        read = (capture.read() for _ in range(total))
        frames = [frame for i, (is_read, frame) in enumerate(read) if is_read and i in wanted]
    finally:
        capture.release()
    if not frames:
        raise RequestError(f"OpenCV cannot read the video '{path}'")
    # Reversed, because OpenCV stores blue first.
    return np.stack([frame[..., ::-1] for frame in frames])


def read_file(path: Path) -> bytes:
    """Read the content of a file.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read '{path}': {error.strerror}") from error
