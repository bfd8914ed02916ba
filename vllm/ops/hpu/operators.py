"""Operators of a Gaudi card: the fused kernels of the bridge, and torch for all others.

Shapes depend only on the arguments and no value is read on the host, so a graph can capture every
operator here. Attention to the KV cache is in `attention.backends`, which also defines its layouts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.ops.expert_options import NO_BIASES, SILU_EXPERTS, ExpertBiases, ExpertOptions
from vllm.ops.hpu.experts import CardExperts, ExpertOperators
from vllm.ops.hpu.low_bit_experts import prepare_narrow_experts
from vllm.ops.hpu.mxfp4_experts import prepare_mxfp4_experts
from vllm.ops.hpu.quantized import HPUFp8Experts, prepare_on_host
from vllm.ops.native.attention import angles_at
from vllm.ops.native.operators import NativeOps
from vllm.ops.prepared import PreparedExperts, PreparedHeads, PreparedWeight
from vllm.ops.stored_weight import Fp8Weight, StoredWeight, all_of
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.hpu import HPUPlatform
from vllm.platforms.registry import resolve_platform


class HPUOps(NativeOps):
    """Operators of the HPU platform. They change no argument except caches.

    `fused_add_rms_norm` is the sum of the reference, then the kernel of `rms_norm`. Positions may
    also be int32, as in padded forward passes. The reference computes everything that the bridge
    has no kernel for.
    """

    def __init__(self, bridge: HabanaBridge | None = None) -> None:
        """Look up the kernels that the card has.

        Args:
            bridge: the card; None: the card of this process.

        Raises:
            ConfigError: there is no card.
        """
        if bridge is None:
            platform = resolve_platform("hpu")
            assert isinstance(platform, HPUPlatform)
            bridge = platform.bridge
        self.kernels = bridge.kernels
        self._bridge, self._operators = bridge, ExpertOperators.of(bridge.kernels)
        self._fp8_max = bridge.fp8_max
        # Asked once here, because compiled code cannot ask.
        self._has_rms_norm = self.kernels.has("FusedRMSNorm")
        self._has_rotary = self.kernels.has("apply_rotary_pos_emb")
        self._has_sdpa = self.kernels.has("FusedSDPA")

    @property
    def fp8_max(self) -> float:
        return self._fp8_max

    def to_fp8(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return self.kernels.cast_to_fp8(x, factor, dtype)

    def from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return self.kernels.cast_from_fp8(x, scale, dtype)

    def prepare_weight(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedWeight:
        prepared = prepare_on_host(weight, self.kernels, self._fp8_max, dtype)
        return super().prepare_weight(weight, dtype) if prepared is None else prepared

    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        # A recipe with nothing else is the same for all layers, so it is compiled once, and it
        # leaves no workspace that depends on what was recorded before.
        self._bridge.mark_step()
        prepared = super().prepare_heads(matrices)
        self._bridge.mark_step()
        return prepared

    def expect_experts(self, options: ExpertOptions) -> None:
        if options.limit is not None:
            self._operators = ExpertOperators.of(self.kernels, options)

    def prepare_experts(
        self,
        gate: Sequence[StoredWeight],
        up: Sequence[StoredWeight],
        down: Sequence[StoredWeight],
        dtype: torch.dtype,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> PreparedExperts | None:
        self.expect_experts(options)
        gates, ups, downs = (all_of(Fp8Weight, weights) for weights in (gate, up, down))
        card = self._card(options)
        if gates is None or ups is None or downs is None:
            packed = prepare_mxfp4_experts(gate, up, down, dtype, biases, card)
            return packed or prepare_narrow_experts(gate, up, down, dtype, biases, card)
        return HPUFp8Experts(gates, ups, downs, biases, self._fp8_max, card)

    def _card(self, options: ExpertOptions) -> CardExperts:
        return CardExperts(self.kernels, self._bridge, self._operators, options)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: int = 0) -> Tensor:
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}")
        if not self._has_rms_norm:
            return super().rms_norm(x, weight, eps, offset)
        if offset:
            weight = weight + offset
        # The kernel needs at least three dimensions, and models have [T, hidden].
        shaped = x if x.dim() > 2 else x.reshape(1, -1, x.shape[-1])
        return self.kernels.rms_norm(shaped, weight, eps).view(x.shape)

    def full_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Compute full attention with the fused kernel, which keeps no scores in memory, and exact
        softmax.
        """
        if not self._has_sdpa:
            return super().full_attention(query, key, value, mask, scale)
        if mask is not None:
            # The kernel can broadcast a mask over heads, but not over other dimensions.
            num_heads = mask.shape[1] if mask.dim() == 4 else 1
            mask = mask.expand(query.shape[0], num_heads, query.shape[2], key.shape[2])
        scale = query.shape[3] ** -0.5 if scale is None else scale
        return self.kernels.sdpa(query, key, value, mask, scale=scale, softmax_mode="None")

    def moe(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> Tensor:
        return self._card(options).moe(x, topk_ids, topk_weights, gate_up, down, biases)

    def rotary_angles(
        self,
        positions: Tensor,
        cos_sin_cache: Tensor,
        dtype: torch.dtype,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Convert the angles first: a single float32 operand makes the kernel return float32.
        angles = angles_at(positions, cos_sin_cache, sections).to(dtype)[:, None]
        cos, sin = angles.chunk(2, dim=-1)
        return (_widen(cos, is_neox), _widen(sin, is_neox)) if self._has_rotary else (cos, sin)

    def rotate(
        self, query: Tensor, key: Tensor | None, angles: tuple[Tensor, Tensor], is_neox: bool
    ) -> tuple[Tensor, Any]:
        if not self._has_rotary:
            return super().rotate(query, key, angles, is_neox)
        cos, sin = angles
        rotated = None if key is None else self._rotate(key, cos, sin, is_neox)
        return self._rotate(query, cos, sin, is_neox), rotated

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
        """Rotate the first elements of every head of x [T, H, D], as many as `cos` has."""
        rot_dim = cos.shape[-1]
        rotated = self.kernels.rotary(x[..., :rot_dim], cos, sin, interleaved=not is_neox)
        if rot_dim == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., rot_dim:]), dim=-1)


def _widen(half: Tensor, is_neox: bool) -> Tensor:
    """Expand one value per pair, [T, 1, rot_dim / 2], to one per element, in the order of pairs."""
    if is_neox:
        return torch.cat((half, half), dim=-1)
    # Unlike repeat_interleave, this has a static shape.
    return torch.stack((half, half), dim=-1).flatten(-2)
