"""Files in memory by which the engine's other processes read the tensors of an item of media."""

import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from vllm.messages import MediaTensor
from vllm.utils.process.memory_file import memory_file

INLINE_BYTES = 256 * 1024
"""Tensors of an item that are not larger together travel in the request: they cost less there
than a descriptor, of which a process has few."""

_ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple of it."""


class MediaFile:
    """The tensors of an item, readable by all processes of this user and machine.

    The file has no name in any folder. Its descriptor is closed when the last `with` that uses it
    has ended, or when nobody refers to this object; the system closes the files of a killed
    process.

    Args:
        tensors: by name.

    Attributes:
        tensors: what a request has instead of them.

    Raises:
        OSError: the process has too many open files, or there is no memory.
    """

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        name = f"item-{uuid4().hex}"
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
        while left:  # one system call writes at most 2 GiB
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
    """Return the tensors of an item with their data, as a request to a process of another machine
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


class OpenFile:
    """A file of another process, opened for reading. It closes with the last reference to it.

    Args:
        path: of `MediaTensor`.
        file_name: of `MediaTensor`.

    Raises:
        OSError: the other process has closed it or has ended.
        ValueError: another file is there.
    """

    def __init__(self, path: str, file_name: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        found = os.readlink(f"/proc/self/fd/{self.descriptor}")
        if found != f"/memfd:{file_name} (deleted)":
            raise ValueError("its file has been closed")


def open_files(arrays: Iterable[MediaTensor]) -> dict[str, OpenFile]:
    """Return the open files of tensors of a request, by path.

    Raises:
        OSError: the process that has a file open has closed it or has ended.
        ValueError: another file is there.
    """
    found: dict[str, OpenFile] = {}
    for array in arrays:
        if array.path is not None and array.path not in found:
            found[array.path] = OpenFile(array.path, array.file_name)
    return found


def read_tensor(array: MediaTensor, files: Mapping[str, OpenFile]) -> npt.NDArray[Any]:
    """Return a tensor of a request, in memory of its own.

    Args:
        array: of the request.
        files: that `open_files` has opened.

    Raises:
        ValueError: its file is not open, or has another size.
    """
    dtype = np.dtype(array.dtype)
    if array.path is None:
        return np.frombuffer(bytearray(array.data), dtype).reshape(array.shape)
    file = files.get(array.path)
    if file is None:
        raise ValueError("the request has ended")
    flat = np.empty(math.prod(array.shape), dtype)
    left, offset = flat.view(np.uint8).data, array.offset
    while left:
        num_read = os.preadv(file.descriptor, [left], offset)
        if not num_read:
            raise ValueError(f"its file must have {array.offset + flat.nbytes} bytes, got {offset}")
        left, offset = left[num_read:], offset + num_read
    return flat.reshape(array.shape)
