"""Files in memory by which the engine's other processes read the tensors of an image."""

import math
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from vllm.messages import MediaTensor
from vllm.utils.process.memory_file import memory_file

INLINE_BYTES = 256 * 1024
"""Tensors of an image that are not larger together travel in the request: they cost less there
than a descriptor, of which a process has few."""

_ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple of it."""


class MediaFile:
    """The tensors of an image, readable by all processes of this user and machine.

    The file has no name in any folder. Its descriptor is closed when the last `with` that uses it
    has ended, or when nobody refers to this object; the system closes the files of a killed
    process.

    Args:
        tensors: by name.

    Attributes:
        tensors: what a request has in their place.

    Raises:
        OSError: the process has too many open files, or there is no memory.
    """

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        name = f"image-{uuid4().hex}"
        file = memory_file(name)
        self._close = weakref.finalize(self, os.close, file)
        self._num_users = 0
        path = f"/proc/{os.getpid()}/fd/{file}"
        self.tensors: tuple[MediaTensor, ...] = tuple(_write(file, path, name, tensors))

    @property
    def is_open(self) -> bool:
        """Whether it can be read."""
        return self._close.alive

    def __enter__(self) -> "MediaFile":
        self._num_users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._close()


def _write(
    file: int, path: str, file_name: str, tensors: Mapping[str, npt.NDArray[Any]]
) -> Iterator[MediaTensor]:
    """Write each tensor to a file, and yield where it is."""
    end = 0
    for name, array in tensors.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = offset + array.nbytes
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        while left:  # one call of the system writes at most 2 GiB
            left = left[os.pwrite(file, left, end - len(left)) :]
        yield MediaTensor(
            name=name,
            dtype=array.dtype.str,
            shape=array.shape,
            path=path,
            offset=offset,
            file_name=file_name,
        )


def inline_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> tuple[MediaTensor, ...]:
    """Return the tensors of an image with their data, as a request to a process of another machine
    has them."""
    return tuple(
        MediaTensor(
            name=name,
            dtype=array.dtype.str,
            shape=array.shape,
            data=np.ascontiguousarray(array).tobytes(),
        )
        for name, array in tensors.items()
    )


def read_tensor(array: MediaTensor) -> npt.NDArray[Any]:
    """Return a tensor of a request, in memory of its own.

    Raises:
        OSError: the process that has it open has closed it or has ended.
        ValueError: another file is there, or it has another size.
    """
    dtype = np.dtype(array.dtype)
    if array.path is None:
        flat = np.frombuffer(bytearray(array.data), dtype)
    else:
        with open(array.path, "rb") as file:
            found = os.readlink(f"/proc/self/fd/{file.fileno()}")
            if found != f"/memfd:{array.file_name} (deleted)":
                raise ValueError("its file has been closed")
            flat = np.fromfile(file, dtype, math.prod(array.shape), offset=array.offset)
    return flat.reshape(array.shape)
