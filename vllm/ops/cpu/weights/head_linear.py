"""Matmuls of each head with its own packed matrix.

Knows tensors and packed weights; knows no layers and no models.
"""

from ctypes import byref
from typing import Any, cast

import torch
from torch import Tensor

from vllm.ops.cpu.library import require_cpu_kernels
from vllm.ops.cpu.row_operations import refuse_pair
from vllm.ops.cpu.symbols import Rows
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.platforms.cpu import allocate_weight


class PackedHeads:
    """The matrices [I, O] of H heads, joined into one packed weight that is read sequentially.

    The result of a token does not depend on other tokens, nor on the number of threads.

    Attributes:
        num_heads: H.
        in_features: I.
        out_features: O, of a head.
        weight: [H * O, I], where O of each head is padded to a multiple of the kernels' panel.
    """

    def __init__(self, matrices: Tensor) -> None:
        """Pack the matrices of all heads.

        Args:
            matrices: [H, I, O] float32 or bfloat16; `can_pack` must accept I.

        Raises:
            MemoryError: there is no scratch memory.
        """
        kernels = require_cpu_kernels("packed heads need")
        self.num_heads, self.in_features, self.out_features = matrices.shape
        self._dtype = matrices.dtype
        panel: int = kernels.plain.kPanel
        self._padded = -(-self.out_features // panel) * panel
        shape = (self.num_heads, self._padded, self.in_features)
        rows = allocate_weight(shape, matrices.dtype)
        rows[:, : self.out_features] = matrices.mT
        rows[:, self.out_features :] = 0
        self.weight = PackedWeight.pack(rows.flatten(0, 1))
        self._args = kernels.plain.HeadLinearArgs
        self._kernel = kernels.of[self._dtype].head_linear

    def multiply(self, x: Any, appended: Any = None) -> Tensor:
        """Multiply each head with its matrix; see `PreparedHeads`.

        Raises:
            ValueError: dtypes, shapes or strides do not fit.
            MemoryError: there is no scratch memory.
        """
        if isinstance(x, Rows):
            return cast(Tensor, x.recorder.multiply_heads(x, self, appended))
        shape = (len(x), self.num_heads, self.in_features)
        if x.shape != shape or x.dtype != self._dtype or not x.is_cpu or x.stride(2) != 1:
            raise ValueError(
                f"x must be {self._dtype} {list(shape)} on the CPU with dense heads, got "
                f"{x.dtype} {list(x.shape)} on {x.device} with strides {list(x.stride())}"
            )
        width = self.out_features
        if appended is not None:
            if appended.shape[:2] != shape[:2] or appended.dtype != x.dtype or not appended.is_cpu:
                refuse_pair("the appended tensor", appended, "x", x)
            width += appended.shape[2]
        out = x.new_empty(*shape[:2], width)
        args = self._args(
            weight=self.weight.address,
            x=x.data_ptr(),
            out=out.data_ptr(),
            num_tokens=len(x),
            num_heads=self.num_heads,
            out_features=self.out_features,
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            out_stride=out.stride(0),
            out_head_stride=width,
        )
        if self._kernel(byref(args), torch.get_num_threads()):
            raise MemoryError(f"not enough memory for {len(x)} tokens of {self.num_heads} heads")
        if appended is not None:
            out[..., self.out_features :] = appended
        return out

    def dense(self) -> Tensor:
        """Return the dense matrices [H, I, O]."""
        ids = torch.arange(self.num_heads * self._padded)
        rows = self.weight.rows(ids, self._dtype).unflatten(0, (self.num_heads, -1))
        return rows[:, : self.out_features].mT
