"""Operators on the C++ kernels of csrc/cpu, for bfloat16 and float32; torch for other cases.

A kernel gets raw addresses, so this file checks everything it relies on: shapes, dtypes and strides
here (ValueError); the kernel itself checks the values it uses as indices (IndexError). The checks
only read attributes, because a call takes a few microseconds and a decode step makes hundreds.
"""

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.attention_options import FP8_DTYPES, NO_TENSORS, AttentionOptions, AttentionTensors
from vllm.ops.cpu.attention import (
    fp8_arguments,
    full_attention,
    paged_attention_decode,
    paged_attention_prefill,
)
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.low_rank import PackedAdapter, PackedRows, add_low_rank
from vllm.ops.cpu.row_operations import (
    ROUTINGS,
    RowOperations,
    check_rows,
    choices_in,
    refuse_pair,
    refuse_strides,
)
from vllm.ops.cpu.state_space import delta_tokens, scan_tokens
from vllm.ops.cpu.symbols import Rows
from vllm.ops.cpu.weights.head_linear import PackedHeads
from vllm.ops.cpu.weights.stored import pack_stored, pack_stored_experts
from vllm.ops.cpu.weights.weight_format import can_pack
from vllm.ops.expert_options import (
    NO_BIASES,
    SILU_EXPERTS,
    ExpertBiases,
    ExpertOptions,
    RoutingOptions,
)
from vllm.ops.lora_weights import (
    AdaptedLayer,
    AdaptedRows,
    LoRAHeads,
    LoRAWeights,
    PlainAdapter,
    PreparedAdapter,
)
from vllm.ops.native.attention import angles_at
from vllm.ops.native.delta_rule import DeltaTokens
from vllm.ops.native.experts import check_choice
from vllm.ops.native.operators import NativeOps, is_rounding_inputs
from vllm.ops.native.state_space import ScannedTokens, TokenStates
from vllm.ops.prepared import PreparedExperts, PreparedHeads, PreparedTable, PreparedWeight
from vllm.ops.stored_weight import StoredWeight
from vllm.utils.background_work import Pause, no_pause

__all__ = ["CPUOps", "load_cpu_kernels"]

_num_threads = torch.get_num_threads


class CPUOps(NativeOps):
    """Operators of the CPU platform. `rotary_embedding` and `fused_add_rms_norm` work in place.

    Norms, activations and rotary embedding use torch for tensors of other devices; the other
    operators accept only CPU tensors.
    """

    def __init__(self) -> None:
        library = load_cpu_kernels()
        self._kernels: dict[torch.dtype, Any] = {} if library is None else library.of
        self._plain: Any = None if library is None else library.plain
        self._max_top_k = 0 if library is None else int(library.plain.kMaxTopK)
        self._max_groups = 0 if library is None else int(library.plain.kMaxExpertGroups)
        self._row_operations = {d: RowOperations(kernels) for d, kernels in self._kernels.items()}

    def _rows_of(self, x: Any) -> Callable[..., Any] | None:
        """Return a function that runs or records row operations on x; None: torch computes them.

        It takes the arguments of `RowOperations`.
        """
        if x.is_cpu:
            return self._row_operations.get(x.dtype)
        return x.recorder.row_operation if isinstance(x, Rows) else None

    def prepare_weight(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedWeight:
        is_packed = dtype in self._kernels and not is_rounding_inputs(weight)
        packed = pack_stored(weight) if is_packed else None
        return super().prepare_weight(weight, dtype) if packed is None else packed

    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        return (
            PackedHeads(matrices) if can_pack(matrices[0].mT) else super().prepare_heads(matrices)
        )

    def prepare_table(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedTable | None:
        return pack_stored(weight) if dtype in self._kernels else None

    def prepare_experts(
        self,
        gate: Sequence[StoredWeight],
        up: Sequence[StoredWeight],
        down: Sequence[StoredWeight],
        dtype: torch.dtype,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> PreparedExperts | None:
        if dtype not in self._kernels:
            return None
        return pack_stored_experts(gate, up, down, biases, options)

    def prepare_adapter(
        self,
        layers: Sequence[AdaptedLayer],
        parts: Sequence[LoRAWeights | None],
        dtype: torch.dtype,
        pause: Pause = no_pause,
    ) -> PreparedAdapter:
        kernels = self._kernels.get(dtype)
        if kernels is None:
            return super().prepare_adapter(layers, parts, dtype, pause)
        return PackedAdapter(kernels, layers, parts, pause)

    def add_low_rank(
        self, y: Tensor, x: Tensor, layer: AdaptedLayer | LoRAHeads, rows: AdaptedRows
    ) -> Tensor:
        if any(isinstance(adapter, PlainAdapter) for adapter in rows.adapters):
            return super().add_low_rank(y, x, layer, rows)
        kernels = self._kernels[x.dtype]
        add_low_rank(kernels, y, x, layer, PackedRows(kernels, rows, len(x)))
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: int = 0) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().rms_norm(x, weight, eps, offset)
        return run("rms_norm", x, weight=weight, scalar=eps, option=offset)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        run = self._rows_of(x)
        if run is None:
            return super().fused_add_rms_norm(x, residual, weight, eps, offset)
        normed = run(
            "add_rms_norm", x, residual, weight=weight, scalar=eps, option=offset, in_place=True
        )
        return normed, residual

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().layer_norm(x, weight, bias, eps)
        is_by_head = weight is not None and weight.dim() == 2
        return run("layer_norm", x, weight=weight, bias=bias, scalar=eps, option=is_by_head)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().silu_and_mul(x)
        return run("silu_and_mul", x, is_gated=True)

    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        run = self._rows_of(x)
        if run is None or self._plain is None:
            return super().gelu(x, is_tanh)
        return run("gelu", x, option=self._plain.Activation["kGeluTanh" if is_tanh else "kGelu"])

    def quick_gelu(self, x: Tensor) -> Tensor:
        run = self._rows_of(x)
        if run is None or self._plain is None:
            return super().quick_gelu(x)
        return run("gelu", x, option=self._plain.Activation["kQuickGelu"])

    def squared_relu(self, x: Tensor) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().squared_relu(x)
        return run("relu", x, option=True)

    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().xielu(x, alpha_p, alpha_n)
        p, n = (float(F.softplus(alpha.float())) for alpha in (alpha_p, alpha_n))
        return run("xielu", x, scalar=p, second_scalar=n + 0.5)

    def gelu_and_mul(self, x: Tensor, is_tanh: bool) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().gelu_and_mul(x, is_tanh)
        return run("gelu_and_mul", x, is_gated=True, option=is_tanh)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().soft_cap(x, cap)
        return run("soft_cap", x, scalar=cap)

    def scale_rows(self, x: Tensor, factor: Tensor, is_gate: bool = False) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().scale_rows(x, factor, is_gate)
        return run("scale_rows", x, factor=factor, option=is_gate)

    def route(
        self,
        logits: Tensor,
        options: RoutingOptions,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        run = self._rows_of(logits)
        if run is None or self._plain is None or not self._can_choose(options):
            return super().route(logits, options, bias, scales)
        check_choice(logits, options, bias, scales)
        chosen = run(
            "route",
            logits,
            top_k=options.top_k,
            groups=options.groups,
            table=bias,
            scales=scales,
            option=self._plain.Routing[ROUTINGS[options.weights]],
            scalar=options.scale,
            second_scalar=options.tolerance,
        )
        return choices_in(chosen, options.top_k)

    def _can_choose(self, options: RoutingOptions) -> bool:
        """Return whether the kernels support this number of groups and of chosen experts."""
        return options.groups.num_groups <= self._max_groups and options.top_k <= self._max_top_k

    def round_to_fp8(self, x: Tensor, factor: float, largest: int) -> Tensor:
        run = self._rows_of(x)
        if run is None:
            return super().round_to_fp8(x, factor, largest)
        return run("round_to_fp8", x, scalar=factor, option=largest)

    def scan_tokens(self, at: TokenStates, tokens: ScannedTokens) -> Tensor:
        if self._plain is None or not at.states.is_cpu:
            return super().scan_tokens(at, tokens)
        return scan_tokens(self._plain, at, tokens)

    def delta_tokens(self, at: TokenStates, tokens: DeltaTokens) -> Tensor:
        if self._plain is None or not at.states.is_cpu:
            return super().delta_tokens(at, tokens)
        return delta_tokens(self._plain, at, tokens)

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        kernels = self._kernels.get(query.dtype) if query.is_cpu else None
        if kernels is None:
            return super().rotary_embedding(positions, query, key, cos_sin_cache, is_neox, sections)
        if key is None:
            key = query[:, :0]
        if positions.dim() == 2:
            # The kernel takes one index per token into a table of angles. With several positions
            # per token, make a table with one entry per token.
            cos_sin_cache = angles_at(positions, cos_sin_cache, sections)
            positions = torch.arange(len(cos_sin_cache))
        num_tokens, num_heads, head_size = query.shape
        num_positions, rot_dim = cos_sin_cache.shape
        if rot_dim % 2 or rot_dim > head_size:
            raise ValueError(
                f"rot_dim must be even and at most the head size {head_size}, got {rot_dim}"
            )
        if key.shape[0] != num_tokens or key.shape[2] != head_size:
            refuse_pair("key", key, "query", query)
        if key.dtype != query.dtype or not key.is_cpu:
            refuse_pair("key", key, "query", query)
        if not positions.is_cpu or not cos_sin_cache.is_cpu:
            refuse_pair("positions", positions, "cos_sin_cache", cos_sin_cache)
        if positions.shape != (num_tokens,):
            raise ValueError(
                f"positions must have one entry for each query, got {list(positions.shape)} for "
                f"{list(query.shape)}"
            )
        _check_dense("positions", positions, torch.int64)
        _check_dense("cos_sin_cache", cos_sin_cache, torch.float32)
        check_rows("query", query)
        check_rows("key", key)
        bad = kernels.rotary_embedding(
            positions.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            cos_sin_cache.data_ptr(),
            num_tokens,
            num_heads,
            key.shape[1],
            head_size,
            query.stride(0),
            key.stride(0),
            rot_dim,
            num_positions,
            is_neox,
            _num_threads(),
        )
        if bad >= 0:
            raise IndexError(
                f"positions[{bad}] must be at least 0 and below {num_positions}, the length of "
                f"cos_sin_cache, got {positions[bad]}"
            )
        return query, key

    def reshape_and_cache(
        self,
        key: Tensor,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor | None,
        slot_mapping: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        kernels = self._kernels.get(key.dtype)
        if kernels is None:
            return super().reshape_and_cache(
                key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales
            )
        num_tokens, num_kv_heads, head_size = key.shape
        if value is not None and value_cache is not None:
            if value.shape != key.shape or value.dtype != key.dtype:
                refuse_pair("value", value, "key", key)
            check_rows("value", value)
            _check_alike(key_cache, value_cache)
        else:
            value = value_cache = None
        is_fp8 = key_cache.dtype in FP8_DTYPES
        if key_cache.shape[2:] != key.shape[1:] or not (is_fp8 or key_cache.dtype == key.dtype):
            refuse_pair("key_cache", key_cache, "key", key)
        if slot_mapping.shape != (num_tokens,):
            raise ValueError(
                f"slot_mapping must have one entry for each key, got {list(slot_mapping.shape)} "
                f"for {list(key.shape)}"
            )
        if not key_cache.is_contiguous():
            refuse_strides("key_cache", key_cache)
        _check_dense("slot_mapping", slot_mapping, torch.int64)
        check_rows("key", key)
        num_slots = key_cache.shape[0] * key_cache.shape[1]
        if is_fp8:
            tensors = (key, value, key_cache, value_cache, slot_mapping)
            args = fp8_arguments(kernels, *tensors, key_scales, value_scales)
            bad = kernels.reshape_and_cache_fp8(byref(args), _num_threads())
        else:
            bad = kernels.reshape_and_cache(
                key.data_ptr(),
                0 if value is None else value.data_ptr(),
                key_cache.data_ptr(),
                0 if value_cache is None else value_cache.data_ptr(),
                slot_mapping.data_ptr(),
                num_tokens,
                num_kv_heads * head_size,
                key.stride(0),
                0 if value is None else value.stride(0),
                num_slots,
                _num_threads(),
            )
        if bad >= 0:
            raise IndexError(
                f"slot_mapping[{bad}] must be one of the {num_slots} slots of the cache, got "
                f"{slot_mapping[bad]}"
            )

    def paged_attention_decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        options: AttentionOptions,
        tensors: AttentionTensors = NO_TENSORS,
    ) -> Tensor:
        kernels = self._kernels.get(query.dtype)
        if kernels is None:
            return super().paged_attention_decode(
                query, key_cache, value_cache, block_tables, seq_lens, options, tensors
            )
        args = (query, key_cache, value_cache, block_tables, seq_lens, options, tensors)
        return paged_attention_decode(kernels, *args)

    def paged_attention_prefill(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        options: AttentionOptions,
        tensors: AttentionTensors = NO_TENSORS,
        last_keys: np.ndarray | None = None,
    ) -> Tensor:
        kernels = self._kernels.get(query.dtype)
        caches = (key_cache, value_cache, block_tables)
        args = (query, *caches, query_start_loc, seq_lens, options, tensors, last_keys)
        if kernels is None:
            return super().paged_attention_prefill(*args)
        return paged_attention_prefill(kernels, *args)

    def full_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        kernels = self._kernels.get(query.dtype)
        if kernels is None or mask is not None or not query.is_cpu:
            return super().full_attention(query, key, value, mask, scale)
        return full_attention(kernels, query, key, value, scale)


def _check_dense(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, it must be {dtype}")
    if not x.is_contiguous():
        refuse_strides(name, x)


def _check_alike(key_cache: Tensor, value_cache: Tensor) -> None:
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        refuse_pair("value_cache", value_cache, "key_cache", key_cache)
    if not value_cache.is_contiguous():
        refuse_strides("value_cache", value_cache)
