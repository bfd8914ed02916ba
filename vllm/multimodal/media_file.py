"""Memory files through which other processes of the engine read the tensors of media items."""

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
    """A memory file with the tensors of an item, readable by all processes of this user.

    The file has no name in any folder. It is closed when the last `with` block that uses it has
    ended, or when nothing refers to this object; the system closes the files of a killed process.

    Args:
        tensors: tensors by name.

    Attributes:
        tensors: descriptions of the tensors, which a request contains instead of their data.

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
        """Whether the file can be read."""
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
    """Write each tensor to a file, and yield its description."""
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
    """Describe tensors together with their data, for processes on other machines."""
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
    """A memory file of another process, opened for reading.

    It is closed with the last reference to it.

    Args:
        path: path of `MediaTensor`.
        file_name: file name of `MediaTensor`.

    Raises:
        OSError: the other process has closed it or has ended.
        ValueError: the path belongs to another file now.
    """

    def __init__(self, path: str, file_name: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        found = os.readlink(f"/proc/self/fd/{self.descriptor}")
        if found != f"/memfd:{file_name} (deleted)":
            raise ValueError("its file has been closed")


def open_files(arrays: Iterable[MediaTensor]) -> dict[str, OpenFile]:
    """Open the memory files of the tensors of a request, by path.

    Raises:
        OSError: the process that has the file open has closed it or has ended.
        ValueError: the path belongs to another file now.
    """
    found: dict[str, OpenFile] = {}
    for array in arrays:
        if array.path is not None and array.path not in found:
            found[array.path] = OpenFile(array.path, array.file_name)
    return found


def read_tensor(array: MediaTensor, files: Mapping[str, OpenFile]) -> npt.NDArray[Any]:
    """Read a tensor of a request into new memory.

    Args:
        array: array of the request.
        files: files from `open_files`.

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
