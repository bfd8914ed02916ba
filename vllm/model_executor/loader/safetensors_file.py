"""Reads a safetensors file directly into the memory of its tensors.

The file is not mapped: its pages would count as memory of the process in addition to the tensors.
Large tensors are read in parts by several threads, because most of the time is spent on the first
access to new memory, not on the copy.
"""

import json
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, Index

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtype that a tensor is read as. Exponents are read as bytes, and words as signed ones of the same
bits: torch computes with neither."""
_LENGTH = struct.Struct("<Q")
PART_BYTES = 8 << 20
"""Read at once by one thread; also the size of its buffer where a dtype is converted."""
_SMALL_BYTES = 256 << 10
"""Converting so many takes less time than handing them to another thread."""


def read_safetensors(path: Path) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the name and tensor of every tensor of a file, in the order of the file.

    A tensor can be read only until the next one is yielded.

    Raises:
        WeightLoadError: the file is damaged, is not a safetensors file, or has a dtype that
            torch does not have.
    """
    with open_safetensors(path, torch.get_num_threads()) as tensors:
        yield from tensors


@contextmanager
def open_safetensors(
    path: Path, num_threads: int
) -> Iterator[Iterator[tuple[str, CheckpointTensor]]]:
    """Open a file and return an iterator over its tensors, which can be read until it is closed.

    Args:
        path: path of the file.
        num_threads: threads that read one tensor.
    """
    try:
        with safe_open(path, framework="pt"):  # checks the whole header
            pass
        with path.open("rb") as file, ThreadPoolExecutor(num_threads) as pool:
            yield _sources(path, file.fileno(), pool)
    except (SafetensorError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightLoadError(f"{path} is damaged or not a safetensors file: {reason}") from error


def _sources(
    path: Path, fd: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, CheckpointTensor]]:
    for name, place in _read_header(path, fd).items():
        tensor = _TensorInFile(path, fd, pool, *place)
        source = CheckpointTensor(
            tensor.shape, tensor.read, tensor.copy_to, tensor.dtype, path=path
        )
        yield name, source


_Place = tuple[int, torch.dtype, torch.Size]


def _read_header(path: Path, fd: int) -> dict[str, _Place]:
    """Read the header: tensor name -> first byte in the file, dtype and shape."""
    (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))
    header = json.loads(os.pread(fd, length, _LENGTH.size))
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        if entry["dtype"] not in _DTYPES:
            raise WeightLoadError(
                f"tensor {name} of {path} has the unknown dtype {entry['dtype']}; supported: "
                f"{', '.join(_DTYPES)}"
            )
        start = _LENGTH.size + length + entry["data_offsets"][0]
        entries[name] = (start, _DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
    return entries


class _Buffers(threading.local):
    """One read buffer per thread, kept as long as the thread.

    Memory that is allocated and freed for each part would not be returned to the system.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of_bytes(self, num_bytes: int) -> Tensor:
        """Return uninitialised memory, valid until the same thread calls again."""
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(max(num_bytes, PART_BYTES), dtype=torch.uint8)
        return self._memory[:num_bytes]


_buffers = _Buffers()


@dataclass(frozen=True)
class _TensorInFile:
    path: Path
    fd: int
    pool: ThreadPoolExecutor
    start: int
    dtype: torch.dtype
    shape: torch.Size

    def read(self, index: Index) -> Tensor:
        """Read a part of the tensor into new memory."""
        shape = list(self.shape)
        for dim, part_of_dim in enumerate(index):
            shape[dim] = len(range(*part_of_dim.indices(shape[dim])))
        part = torch.empty(shape, dtype=self.dtype)
        self.copy_to(part, index)
        return part

    def copy_to(self, target: Tensor, index: Index) -> None:
        """Read a part of the tensor into `target` of the same shape, converting to its dtype."""
        if target.device.type != "cpu":
            target.copy_(self.read(index))
            return
        # Treat a tensor without dimensions as one row.
        shape = self.shape or torch.Size((1,))
        first, end, _ = index[0].indices(shape[0]) if index else (0, shape[0], 1)
        rows = target.view(end - first, *target.shape[1:])
        row_bytes = shape[1:].numel() * self.dtype.itemsize
        in_rows = (slice(None), *index[1:])
        has_whole_rows = all(
            part_of_dim.indices(size) == (0, size, 1)
            for part_of_dim, size in zip(index[1:], shape[1:], strict=False)
        )
        is_direct = target.dtype == self.dtype and target.is_contiguous() and has_whole_rows
        step = max(1, PART_BYTES // max(1, row_bytes))
        is_inference = torch.is_inference_mode_enabled()

        def fill(row: int) -> None:
            part = rows[row : row + step]
            start = self.start + (first + row) * row_bytes
            if is_direct:
                self._read_bytes(part, start)
                return
            memory = _buffers.of_bytes(len(part) * row_bytes)
            buffer = memory.view(self.dtype).view(len(part), *shape[1:])
            self._read_bytes(buffer, start)
            with torch.inference_mode(is_inference):  # each thread has its own inference mode
                part.copy_(buffer[in_rows])

        starts = range(0, len(rows), step)
        if len(starts) == 1 and (is_direct or len(rows) * row_bytes <= _SMALL_BYTES):
            fill(0)
            return
        for _ in self.pool.map(fill, starts):  # iterating raises the errors of the threads
            pass

    def _read_bytes(self, target: Tensor, start: int) -> None:
        data = memoryview(cast(Any, target.flatten().view(torch.uint8).numpy()))
        done = 0
        while done < len(data):
            num_read = os.preadv(self.fd, [data[done:]], start + done)
            if not num_read:
                raise WeightLoadError(f"{self.path} is damaged: it ends before its last tensor")
            done += num_read
