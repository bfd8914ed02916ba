"""LoRA adapters in the layout of csrc/cpu/low_rank.h.

A kernel gets raw addresses, so everything it relies on is checked here: shapes, dtypes, strides,
device.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.lora_weights import AdaptedLayer, AdaptedRows, LoRAHeads, LoRAWeights
from vllm.utils.background_work import Pause, no_pause

_num_threads = torch.get_num_threads


class PackedAdapter:
    """The projections of an adapter in one block of memory, in the order that the kernel needs.

    Weights in bfloat16 are kept; others are converted to float32.

    Args:
        kernels: kernels of any dtype.
        layers: layers of the model.
        parts: parts of the adapter, by layer index.
        pause: called between two projections.
    """

    def __init__(
        self,
        kernels: Any,
        layers: Sequence[AdaptedLayer],
        parts: Sequence[LoRAWeights | None],
        pause: Pause = no_pause,
    ) -> None:
        known = [part for part in parts if part is not None]
        self.is_float = any(part.a.dtype != torch.bfloat16 for part in known)
        self._structs = (kernels.LowRank * len(parts))()
        self.address = ctypes.addressof(self._structs)
        # For A and for B: the tile's outputs and inputs, and the multiple to which inputs are
        # padded.
        a_tiles = kernels.kRankBlock, kernels.kRankInputs, kernels.kRankInputs
        b_tiles = kernels.kPanel, 1 if self.is_float else 2, kernels.kRankBlock
        found: dict[int, _Tiled] = {}
        """Tiles by the id of their tensor, because projections may share a tensor."""
        size = 0
        for layer in layers:
            own = _parts_of(layer, parts)
            for tensor, tiles in [
                *((part.a, a_tiles) for _, part in own),
                *((part.b, b_tiles) for _, part in own),
            ]:
                if id(tensor) not in found:
                    found[id(tensor)] = each = _Tiled(tensor, *tiles, start=size)
                    size = each.end
        dtype = torch.float32 if self.is_float else torch.bfloat16
        self._memory = memory = torch.empty(size, dtype=dtype)
        for each in found.values():
            pause()
            each.fill(memory, kernels)
        first, item = memory.data_ptr(), memory.element_size()
        for layer in layers:
            for index, part in _parts_of(layer, parts):
                offset, size = layer.parts[index]
                a, b = found[id(part.a)], found[id(part.b)]
                self._structs[layer.first_part + index] = kernels.LowRank(
                    a=first + item * a.start,
                    b=first + item * b.start,
                    rank=a.padded_rows,
                    in_features=layer.in_features,
                    offset=offset,
                    size=size,
                )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._memory.nbytes


def _parts_of(
    layer: AdaptedLayer, parts: Sequence[LoRAWeights | None]
) -> list[tuple[int, LoRAWeights]]:
    """Return the weights that an adapter adds to a layer, with their projection index in
    the layer.
    """
    found = []
    for index, (_, size) in enumerate(layer.parts):
        part = parts[layer.first_part + index]
        if part is None:
            continue
        if part.a.shape[1] != layer.in_features or part.b.shape != (size, len(part.a)):
            raise ValueError(
                f"LoRA weights A {list(part.a.shape)} and B {list(part.b.shape)} do not fit the "
                f"layer {layer}"
            )
        found.append((index, part))
    return found


class _Tiled:
    """Stores a matrix in memory tile by tile, beginning with the tiles of the first rows.

    Args:
        matrix: the matrix; it is padded with zeros to full tiles.
        rows: rows of a tile.
        columns: columns of a tile.
        unit: the number of columns is padded to a multiple of this.
        start: element of the memory at which it begins.
    """

    def __init__(self, matrix: Tensor, rows: int, columns: int, unit: int, start: int) -> None:
        self._matrix = matrix
        self._tile = rows, columns
        self.padded_rows, self._padded_columns = (
            -(-size // each) * each for size, each in zip(matrix.shape, (rows, unit), strict=True)
        )
        self.start, self.end = start, start + self.padded_rows * self._padded_columns

    def fill(self, memory: Tensor, kernels: Any) -> None:
        """Copy the matrix to its tiles in the memory."""
        rows, columns = self._tile
        count, length = self._matrix.shape
        matrix = self._matrix.to(memory.dtype)
        if missing := self._padded_columns - length:
            matrix = F.pad(matrix, (0, missing))
        matrix = matrix.contiguous()
        item = memory.element_size()
        args = kernels.TileArgs(
            matrix=matrix.data_ptr(),
            to=memory.data_ptr() + item * self.start,
            rows=count,
            columns=self._padded_columns // columns,
            tile_rows=rows,
            column_bytes=columns * item,
        )
        if kernels.tile_matrix(ctypes.byref(args)):
            raise ValueError(
                f"the kernels cannot make tiles of {columns} columns of {memory.dtype}"
            )


class PackedRows:
    """The kernels' struct `AdaptedRows` for one forward pass; keeps its memory alive.

    Args:
        kernels: kernels of any dtype.
        rows: the adapter of each token, with adapters of these kernels.
        num_rows: number of tokens.

    Raises:
        ValueError: the number of tokens or an adapter does not fit.
    """

    def __init__(self, kernels: Any, rows: AdaptedRows, num_rows: int) -> None:
        of_rows = rows.of_rows
        is_dense = of_rows.is_contiguous() and of_rows.is_cpu
        if of_rows.dtype != torch.int32 or of_rows.shape != (num_rows,) or not is_dense:
            raise ValueError(
                f"add_low_rank: adapter indices must be int32 [{num_rows}] on cpu, got "
                f"{of_rows.dtype} {list(of_rows.shape)} on {of_rows.device}"
            )
        known: list[PackedAdapter] = []
        addresses: list[int | None] = []
        for adapter in rows.adapters:
            if adapter is not None:
                assert isinstance(adapter, PackedAdapter)
                known.append(adapter)
            addresses.append(None if adapter is None else adapter.address)
        if len({adapter.is_float for adapter in known}) > 1:
            raise ValueError("all adapters of a forward pass must have the same dtype")
        self._keep = rows, (ctypes.c_void_p * len(addresses))(*addresses)
        self.struct = kernels.AdaptedRows(
            adapters=ctypes.addressof(self._keep[1]),
            of_rows=of_rows.data_ptr(),
            num_adapters=len(addresses),
            is_float=bool(known) and known[0].is_float,
        )
        self.address = ctypes.addressof(self.struct)


def add_low_rank(
    kernels: Any, y: Tensor, x: Tensor, layer: AdaptedLayer | LoRAHeads, rows: PackedRows
) -> None:
    """Add the low-rank updates of adapters to y; see `NativeOps.add_low_rank`.

    Args:
        kernels: kernels of the dtype of x.
    """
    has_heads = isinstance(layer, LoRAHeads)
    num_parts = len(layer.heads) if isinstance(layer, LoRAHeads) else len(layer.parts)
    shape = [len(x), num_parts] if has_heads else [len(x)]
    if [*x.shape] != [*shape, layer.in_features] or [*y.shape[:-1]] != shape or x.dtype != y.dtype:
        raise ValueError(
            f"add_low_rank: x {list(x.shape)} and y {list(y.shape)} do not fit the layer {layer}"
        )
    is_dense = x.stride(-1) == y.stride(-1) == 1 and x.is_cpu and y.is_cpu
    if not is_dense or y.shape[-1] < layer.out_features:
        raise ValueError(
            f"add_low_rank: x and y of {layer} must be on the CPU with dense rows, and y at least "
            f"as wide as the layer; got strides {list(x.stride())} and {list(y.stride())}"
        )
    args = kernels.LowRankArgs(
        adapted=rows.address,
        x=x.data_ptr(),
        y=y.data_ptr(),
        num_rows=len(x),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        x_head_stride=x.stride(1) if has_heads else 0,
        y_head_stride=y.stride(1) if has_heads else 0,
        first_part=layer.first_part,
        num_parts=num_parts,
    )
    bad = kernels.add_low_rank(ctypes.byref(args), _num_threads())
    if bad >= 0:
        raise IndexError(f"token {bad} refers to a LoRA slot that is not loaded")
    if bad != -1:
        raise MemoryError("not enough memory for the LoRA adapters of a forward pass")
