"""Small videos, made with PyAV, whose frames encode their number."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FORMATS = {
    "mp4": ("mp4", "libx264", "yuv420p"),
    "mov": ("mov", "libx264", "yuv420p"),
    "webm": ("webm", "libvpx-vp9", "yuv420p"),
    "mkv": ("matroska", "libx264", "yuv420p"),
    "avi": ("avi", "mpeg4", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}
"""Name of a format -> of FFmpeg: the writer, the encoder, and the pixels."""


def make_video(
    name: str = "mp4",
    brightness: Sequence[int] = range(0, 240, 6),
    *,
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    key_every: int = 12,
    last_s: int | None = None,
) -> bytes:
    """Return a video of gray frames.

    Args:
        name: name of its format, one of `FORMATS`.
        brightness: brightness of each frame.
        rate: frames per second.
        size: width and height.
        key_every: frames from one key frame to the next.
        last_s: time of the last frame in seconds; None: by the rate.
    """
    import av

    writer, encoder, pixels = FORMATS[name]
    file = io.BytesIO()
    with av.open(file, "w", format=writer) as container:
        stream = container.add_stream(encoder, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.codec_context.gop_size = key_every
        stream.bit_rate = 4_000_000
        for number, value in enumerate(brightness, 1):
            gray = np.full((size[1], size[0], 3), value, np.uint8)
            frame = av.VideoFrame.from_ndarray(gray, "rgb24")
            if last_s is not None:
                frame.pts = last_s * rate if number == len(brightness) else number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def draw_frames(
    count: int, *, height: int = 40, width: int = 56, seed: int = 0
) -> NDArray[np.uint8]:
    """Return frames [n, H, W, 3] of blocks that move."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    picture = np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:height, :width]
    return np.stack([np.roll(picture, 4 * number, axis=1) for number in range(count)])


def expected_patches(processor: Any, frames: NDArray[np.uint8]) -> tuple[torch.Tensor, list[int]]:
    """Return the pixels of a video as in transformers, and their grid.

    The video processors of transformers need torchvision, which is often missing. Its image
    processors repeat an image for all frames of a patch. So each frame of a patch is taken from the
    patches of an image.

    Args:
        processor: image processor, which resizes each frame alike.
        frames: [n, H, W, 3].
    """
    each = [
        processor(images=[frame], return_tensors="pt", input_data_format="channels_last")
        for frame in [*frames, *[frames[-1]] * (len(frames) % 2)]
    ]
    size = processor.patch_size
    patches = [found["pixel_values"].unflatten(1, (3, 2, size, size)) for found in each]
    pairs = [
        torch.stack((first[:, :, 0], second[:, :, 1]), 2).flatten(1)
        for first, second in zip(patches[::2], patches[1::2], strict=True)
    ]
    _, rows, columns = each[0]["image_grid_thw"][0].tolist()
    return torch.cat(pairs), [len(pairs), rows, columns]
