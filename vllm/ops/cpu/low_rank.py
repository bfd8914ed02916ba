"""Adapters in the layout of csrc/cpu/low_rank.h.

A kernel gets raw addresses, so what it relies on is checked here: shapes, dtypes, strides, device.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.low_rank import AdaptedLayer, AdaptedRows, LowRank
from vllm.utils.pace import Rest, no_rest

_num_threads = torch.get_num_threads


class PackedAdapter:
    """The projections of an adapter as the kernel reads them.

    Weights in bfloat16 stay so; others become float32.

    Args:
        kernels: of any dtype.
        layers: of the model.
        parts: of the adapter, by their numbers.
        rest: between two projections.
    """

    def __init__(
        self,
        kernels: Any,
        layers: Sequence[AdaptedLayer],
        parts: Sequence[LowRank | None],
        rest: Rest = no_rest,
    ) -> None:
        known = [part for part in parts if part is not None]
        self.is_float = any(part.a.dtype != torch.bfloat16 for part in known)
        self._dtype = torch.float32 if self.is_float else torch.bfloat16
        self._unit, self._panel = kernels.kRankBlock, kernels.kPanel
        self._tensors: dict[int, Tensor] = {}  # projections may share one
        self._structs = (kernels.LowRank * len(parts))()
        for layer in layers:
            for number, (offset, size) in enumerate(layer.parts, layer.first_part):
                part = parts[number]
                if part is None:
                    continue
                rest()
                rank = -(-len(part.a) // self._unit) * self._unit
                if part.a.shape[1] != layer.in_features or part.b.shape != (size, len(part.a)):
                    raise ValueError(f"{list(part.a.shape)} and {list(part.b.shape)} for {layer}")
                self._structs[number] = kernels.LowRank(
                    a=self._keep(part.a, self._pack_a),
                    b=self._keep(part.b, self._pack_b),
                    rank=rank,
                    in_features=layer.in_features,
                    offset=offset,
                    size=size,
                )
        self.address = ctypes.addressof(self._structs)

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _keep(self, tensor: Tensor, pack: Any) -> int:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = pack(tensor)
        return self._tensors[id(tensor)].data_ptr()

    def _pack_a(self, a: Tensor) -> Tensor:
        """[rank, in_features], the rank a multiple of the unit."""
        missing = -len(a) % self._unit
        return F.pad(a.to(self._dtype), (0, 0, 0, missing)).contiguous()

    def _pack_b(self, b: Tensor) -> Tensor:
        """[panels, rank, outputs of a panel]"""
        size, rank = b.shape
        padded = F.pad(b.to(self._dtype), (0, -rank % self._unit, 0, -size % self._panel))
        return padded.unflatten(0, (-1, self._panel)).mT.contiguous()


class PackedRows:
    """The `AdaptedRows` struct of a launch. Keeps what it points to.

    Args:
        kernels: of any dtype.
        rows: of the launch, with adapters of these kernels.
        num_rows: of the launch.

    Raises:
        ValueError: the rows do not fit.
    """

    def __init__(self, kernels: Any, rows: AdaptedRows, num_rows: int) -> None:
        of_rows = rows.of_rows
        is_dense = of_rows.is_contiguous() and of_rows.is_cpu
        if of_rows.dtype != torch.int32 or of_rows.shape != (num_rows,) or not is_dense:
            raise ValueError(
                f"adapters are {of_rows.dtype} {list(of_rows.shape)} on {of_rows.device}, for "
                f"{num_rows} rows"
            )
        known: list[PackedAdapter] = []
        addresses: list[int | None] = []
        for adapter in rows.adapters:
            if adapter is not None:
                assert isinstance(adapter, PackedAdapter)
                known.append(adapter)
            addresses.append(None if adapter is None else adapter.address)
        if len({adapter.is_float for adapter in known}) > 1:
            raise ValueError("adapters of one launch have weights of one type")
        self._keep = rows, (ctypes.c_void_p * len(addresses))(*addresses)
        self.struct = kernels.AdaptedRows(
            adapters=ctypes.addressof(self._keep[1]),
            of_rows=of_rows.data_ptr(),
            num_adapters=len(addresses),
            is_float=bool(known) and known[0].is_float,
        )
        self.address = ctypes.addressof(self.struct)


def add_low_rank(kernels: Any, y: Tensor, x: Tensor, layer: AdaptedLayer, rows: PackedRows) -> None:
    """As `Ops.add_low_rank`.

    Args:
        kernels: of the dtype of x.
    """
    n = len(x)
    if x.shape != (n, layer.in_features) or y.dim() != 2 or len(y) != n or x.dtype != y.dtype:
        raise ValueError(f"x is {list(x.shape)} and y {list(y.shape)} for {layer}")
    is_dense = x.stride(1) == y.stride(1) == 1 and x.is_cpu and y.is_cpu
    if not is_dense or y.shape[1] < layer.out_features:
        raise ValueError(f"x is {list(x.stride())} and y {list(y.stride())} apart, for {layer}")
    args = kernels.LowRankArgs(
        adapted=rows.address,
        x=x.data_ptr(),
        y=y.data_ptr(),
        num_rows=n,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        first_part=layer.first_part,
        num_parts=len(layer.parts),
    )
    bad = kernels.add_low_rank(ctypes.byref(args), _num_threads())
    if bad >= 0:
        raise IndexError(f"row {bad} has an adapter that is not there")
    if bad != -1:
        raise MemoryError("not enough memory for the adapters of a launch")
