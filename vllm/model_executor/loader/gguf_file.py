"""Reads the tensors of a GGUF model with the names, row order and values of this package's modules.

A tensor is read and dequantized a few rows at a time, directly into its parameter. A weight method
that keeps the quantized blocks reads their parts (`BlockSource`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, Index
from vllm.model_executor.loader.row_order import halves_of_neighbours
from vllm.model_executor.quantization.gguf.blocks import (
    DENSE,
    Blocks,
    check_package,
    dequantize_by_package,
    needs_package,
    read_blocks,
)
from vllm.model_executor.quantization.gguf.gguf import BlockSource, GGUFBlocks
from vllm.transformers_utils.gguf.header import SUFFIX, StoredTensor
from vllm.transformers_utils.gguf.model import GGUFModel, open_model

_LATENT_KEYS, _LATENT_VALUES = ".keys.weight", ".values.weight"
"""Ends of the names of the halves of a `kv_b_proj`."""
PART_NUMBERS = 1 << 21
"""Number of elements that are read and dequantized at once."""


def stored_format(files: list[Path]) -> GGUFBlocks | None:
    """Return the quantization format of a GGUF model; None if the files are not GGUF.

    Raises:
        WeightLoadError: a file is damaged.
        ConfigError: its types need the package gguf, which is not installed.
    """
    if not files or files[0].suffix != SUFFIX:
        return None
    names = open_model(files).module_names()
    types = {name: stored.type.name for name, stored in names.items()}
    check_package(types.values())
    return GGUFBlocks(types)


def read_gguf(files: list[Path]) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the parameter name and tensor of every tensor of a GGUF model.

    A tensor can be read only until the next one is yielded.

    Args:
        files: all files of the model, the first one first.

    Raises:
        WeightLoadError: a file is damaged, or has unknown tensors.
    """
    model = open_model(files)
    names = model.module_names()
    for name, stored in names.items():
        if name.endswith(_LATENT_VALUES):  # read together with the keys of the same layer
            continue
        try:
            with ExitStack() as opened:
                file = opened.enter_context(stored.path.open("rb"))
                source = _read(model, name, stored, file.fileno())
                if name.endswith(_LATENT_KEYS):
                    name = name.removesuffix(_LATENT_KEYS)
                    values = names[name + _LATENT_VALUES]
                    other = opened.enter_context(values.path.open("rb"))
                    second = _read(model, name, values, other.fileno())
                    name, source = f"{name}.weight", _joined(source, second, model.num_heads)
                yield name, replace(source, path=stored.path, is_converted=True)
        except OSError as error:
            raise WeightLoadError(f"cannot read {stored.path}: {error.strerror}") from error


def _read(model: GGUFModel, name: str, stored: StoredTensor, fd: int) -> CheckpointTensor:
    """Return one tensor of an open file, with its rows in the order of our modules."""
    order = _order(model, name, stored)
    if len(stored.shape) > 1:
        return _source(_Rows(fd, name, stored, order))
    source = _source(_Rows(fd, name, stored, None))
    if order is None:
        return source
    return source.mapped(partial(torch.index_select, dim=0, index=order))


def _joined(keys: CheckpointTensor, values: CheckpointTensor, num_heads: int) -> CheckpointTensor:
    """Interleave the key and value projections of latent vectors by head, as in `kv_b_proj`.

    H heads, N key size, M value size, V latent size.

    Args:
        keys: [H * V, N].
        values: [H * M, V].
        num_heads: H.

    Returns:
        [H * (N + M), V].
    """
    latent = values.shape[1]
    shape = torch.Size((num_heads * keys.shape[1] + values.shape[0], latent))

    def read(index: Index) -> Tensor:
        of_keys = keys.read(()).float().unflatten(0, (num_heads, -1)).mT
        of_values = values.read(()).float().unflatten(0, (num_heads, -1))
        return torch.cat((of_keys, of_values), dim=1).flatten(0, 1)[index]

    return CheckpointTensor(shape, read, dtype=torch.float32)


def _order(model: GGUFModel, name: str, stored: StoredTensor) -> Tensor | None:
    """Return, for each row of our tensor, its row in the file; None if the order is the same.

    Llama's GGUF files rotate neighbouring elements of a head, so the order is 0, D / 2, 1, D / 2 +
    1...
    """
    is_rotated = ".q_proj." in name or ".k_proj." in name
    if not model.gguf.has_neighbour_rotations or not is_rotated:
        return None
    num_rows = stored.shape[0]
    num_heads = model.num_heads if ".q_proj." in name else model.num_kv_heads
    return halves_of_neighbours(num_rows, num_heads)


@dataclass(frozen=True)
class _Rows:
    """Reads rows of a tensor in a file; a one-dimensional tensor is one row."""

    fd: int
    name: str
    stored: StoredTensor
    order: Tensor | None

    def read(self, start: int, end: int) -> Tensor:
        """Return the bytes of rows [start, end): [rows, bytes] uint8."""
        if self.order is None:
            return self._read(start, end)
        wanted = self.order[start:end]
        if not len(wanted):
            return self._read(0, 0)
        first, last = int(wanted.min()), int(wanted.max())
        return self._read(first, last + 1)[wanted - first]

    def finite(self, numbers: Tensor) -> Tensor:
        """Check that dequantized values are finite, and return them."""
        if not bool(numbers.isfinite().all()):
            raise WeightLoadError(
                f"tensor {self.name} has the type {self.stored.type.name}, and scales that are NaN "
                f"or infinity: the file is damaged"
            )
        return numbers

    def _read(self, start: int, end: int) -> Tensor:
        size = self.stored.row_bytes
        rows = torch.empty(end - start, size, dtype=torch.uint8)
        data = memoryview(cast(Any, rows.flatten().numpy()))
        done = 0
        while done < len(data):
            num_read = os.preadv(self.fd, [data[done:]], self.stored.start + start * size + done)
            if not num_read:
                raise WeightLoadError(f"{self.stored.path} is damaged: it ends inside a tensor")
            done += num_read
        return rows


def _source(rows: _Rows) -> CheckpointTensor:
    type_name = rows.stored.type.name
    dtype = DENSE.get(type_name)
    shape = torch.Size(rows.stored.shape)
    if dtype is not None:
        return _in_parts(shape, dtype, lambda start, end: rows.read(start, end).view(dtype))
    if needs_package(type_name):

        def numbers(start: int, end: int) -> Tensor:
            return rows.finite(dequantize_by_package(type_name, rows.read(start, end)))

        return _in_parts(shape, torch.float32, numbers)

    def blocks(start: int, end: int) -> Blocks:
        return read_blocks(type_name, rows.read(start, end))

    def part(get: Callable[[Blocks], Tensor], dtype: torch.dtype, width: int) -> CheckpointTensor:
        size = torch.Size((*shape[:-1], width))
        return _in_parts(size, dtype, lambda start, end: get(blocks(start, end)))

    dense = part(lambda found: rows.finite(found.dequantize()), torch.float32, shape[-1])
    return BlockSource(dense.shape, dense.read, dense.copy_to, part=part)


def _in_parts(
    shape: torch.Size, dtype: torch.dtype, read_rows: Callable[[int, int], Tensor]
) -> CheckpointTensor:
    """Return a tensor that is produced a few rows at a time.

    Args:
        shape: shape of the tensor.
        dtype: data type of its elements.
        read_rows: returns the rows [start, end) as a matrix.
    """
    num_rows = 1 if len(shape) == 1 else shape[:-1].numel()

    def copy_to(target: Tensor, index: Index) -> None:
        if target.device.type != "cpu":
            target.copy_(read(index))
            return
        if len(shape) == 1:
            target.copy_(read_rows(0, 1)[0][index])
            return
        first, end, _ = (index[0] if index else slice(None)).indices(num_rows)
        columns = index[1] if len(index) > 1 else slice(None)
        step = max(1, PART_NUMBERS // shape[-1])
        for start in range(first, end, step):
            made = read_rows(start, min(end, start + step))
            target[start - first : start - first + len(made)].copy_(made[:, columns])

    def read(index: Index) -> Tensor:
        size = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=False)]
        part = torch.empty(*size, *shape[len(size) :], dtype=dtype)
        copy_to(part, index)
        return part

    return CheckpointTensor(shape, read, copy_to)
