"""Jobs for the child processes of test_pool.py."""

import os
import signal
import time

import numpy as np

from vllm.errors import RequestError
from vllm.multimodal.images.image import image_pixels
from vllm.multimodal.interface.family import EncoderInput
from vllm.multimodal.interface.source import MediaSource


def decode(brightness: int, max_pixels: int = 10**6):
    """Return a job that adds a brightness to each pixel; some contents are commands."""

    def work(source: MediaSource) -> EncoderInput:
        match source.data:
            case b"sleep":
                time.sleep(60)
            case b"exit":
                os._exit(3)
            case b"kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"raise":
                raise KeyError("a bug")
            case b"value":
                raise ValueError("a processor does not take it")
            case b"memory":
                return answer(np.zeros(2**31, np.uint8))
            case b"large":
                return answer(np.arange(2**20, dtype=np.int32).reshape(2, -1))
            case b"told":
                raise RequestError(f"{source.where}: it is wrong", param=source.where)
        return answer(image_pixels(source, max_pixels=max_pixels) + np.uint8(brightness), source)

    return work


def tell_torch(needs_torch):
    """Return a job that reports whether torch is imported, which depends on its image processor."""
    if needs_torch:
        import torch  # noqa: F401
    import transformers.utils

    has_torch = transformers.utils.is_torch_available()
    return lambda source: EncoderInput({"has_torch": np.array([has_torch])}, ())


def answer(pixels, source=None) -> EncoderInput:
    tensors = {
        "pixels": pixels,
        "grid": np.array([[1, *pixels.shape[:2]]], np.int64),
        "scale": np.float32(0.5),
        "none": np.empty((0, 3), np.float16),
        "pid": np.array([os.getpid()]),
    }
    if source is not None:
        tensors["told"] = np.frombuffer(f"{source.uuid} {source.detail}".encode(), np.uint8)
    return EncoderInput(tensors, pixels.shape[:2])


def broken(**settings):
    raise RuntimeError(f"cannot start with {settings}")
