"""The reference that defines every operator: plain torch, for any device, as simple as possible.

Never optimised. Norms and softmax are computed in float32 for any dtype. Device implementations
derive from this class and override what they can do faster.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops.native.adapters import NativeAdapters
from vllm.ops.native.attention import NativeAttention
from vllm.ops.native.delta_rule import NativeDeltaRule
from vllm.ops.native.experts import NativeExperts
from vllm.ops.native.state_space import NativeScans
from vllm.ops.prepared import PreparedHeads, PreparedTable, PreparedWeight
from vllm.ops.rounded_inputs import RoundedInputs, is_rounding_inputs
from vllm.ops.stored_weight import StoredWeight


class DenseWeight(nn.Module):
    """A quantized weight that was dequantized."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias; see `PreparedWeight`."""
        return F.linear(x, self.weight, bias)


class DenseHeads(nn.Module):
    """Matrices of heads, [H, I, O]."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrices.contiguous(), requires_grad=False)

    def multiply(self, x: Tensor, appended: Tensor | None = None) -> Tensor:
        """Multiply each head with its matrix; see `PreparedHeads`."""
        out = torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)
        return out if appended is None else torch.cat((out, appended), dim=-1)

    def dense(self) -> Tensor:
        """Return the matrices [H, I, O]."""
        return self.weight


class NativeOps(NativeAdapters, NativeAttention, NativeDeltaRule, NativeExperts, NativeScans):
    """Every operator in torch. They change no argument except caches."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: int = 0) -> Tensor:
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}")
        x_float = x.float()
        normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
        scale = weight.float() + offset if offset else weight.float()
        return (normed * scale).to(x.dtype)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        if x.shape != residual.shape or x.dtype != residual.dtype:
            raise ValueError(
                f"residual ({residual.dtype} {list(residual.shape)}) must match x ({x.dtype} "
                f"{list(x.shape)})"
            )
        new_residual = x + residual
        return self.rms_norm(new_residual, weight, eps, offset), new_residual

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        is_by_head = weight is not None and weight.dim() == 2
        by_row = x.shape[-1:]
        for operand, sizes in ((weight, x.shape[1:] if is_by_head else by_row), (bias, by_row)):
            if operand is not None and operand.shape != sizes:
                raise ValueError(
                    f"weight or bias {list(operand.shape)} does not fit x {list(x.shape)}"
                )
        if weight is None or not is_by_head:
            return F.layer_norm(x, by_row, weight, bias, eps)
        normed = F.layer_norm(x.float(), by_row, eps=eps) * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = _gate_and_up(x)
        return F.silu(gate) * up

    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        return F.gelu(x, approximate="tanh" if is_tanh else "none")

    def squared_relu(self, x: Tensor) -> Tensor:
        return F.relu(x).square()

    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        # In float32 and without softplus and expm1, which Gaudi does not support.
        p, n = (alpha.float().exp().add(1.0).log() for alpha in (alpha_p, alpha_n))
        y = x.float()
        below = (y.clamp(max=-1e-6).exp() - 1.0 - y) * (n + 0.5)
        return (torch.where(y > 0, p * y * y, below) + 0.5 * y).to(x.dtype)

    def gelu_and_mul(self, x: Tensor, is_tanh: bool) -> Tensor:
        gate, up = _gate_and_up(x)
        return F.gelu(gate, approximate="tanh" if is_tanh else "none") * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def scale_rows(self, x: Tensor, factor: Tensor, is_gate: bool = False) -> Tensor:
        if factor.shape != (len(x), 1):
            raise ValueError(f"factor must be [{len(x)}, 1], got {list(factor.shape)}")
        factor = factor.sigmoid() if is_gate else factor
        return x * factor.view(-1, *[1] * (x.dim() - 1))

    def to_fp8(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        largest = self.fp8_max if dtype == torch.float8_e4m3fn else torch.finfo(dtype).max
        return (x.float() * factor).clamp(-largest, largest).to(dtype)

    def from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return (x.float() * scale).to(dtype)

    def round_to_fp8(self, x: Tensor, factor: float, largest: int) -> Tensor:
        scaled = (x.float() * factor).clamp(-largest, largest)
        return scaled.to(torch.float8_e4m3fn).to(x.dtype)

    def prepare_weight(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedWeight:
        if is_rounding_inputs(weight):
            return RoundedInputs(weight, self, dtype)
        return DenseWeight(weight.dequantize().to(dtype))

    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        return DenseHeads(matrices)

    def prepare_table(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedTable | None:
        return None

    def rows_of_part(
        self, embed: Callable[[Tensor], Tensor], ids: Tensor, first_id: int, num_rows: int
    ) -> Tensor:
        local_ids = ids - first_id
        is_elsewhere = (local_ids < 0) | (local_ids >= num_rows)
        rows = embed(local_ids.masked_fill(is_elsewhere, 0))
        return rows.masked_fill(is_elsewhere[:, None], 0.0)

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        check_rotary(positions, query, key, cos_sin_cache)
        angles = self.rotary_angles(positions, cos_sin_cache, query.dtype, is_neox, sections)
        return self.rotate(query, key, angles, is_neox)

    def rotary_angles(
        self,
        positions: Tensor,
        cos_sin_cache: Tensor,
        dtype: torch.dtype,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # [T, 1, rot_dim / 2] each: one row of angles per token, the same for every head
        angles = angles_at(positions, cos_sin_cache, sections)
        cos, sin = angles.to(dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def rotate(
        self, query: Tensor, key: Tensor | None, angles: tuple[Tensor, Tensor], is_neox: bool
    ) -> tuple[Tensor, Any]:
        cos, sin = angles
        rotated = None if key is None else _rotate(key, cos, sin, is_neox)
        return _rotate(query, cos, sin, is_neox), rotated


def check_rotary(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor
) -> None:
    """Check the arguments of `rotary_embedding`; raise ValueError if they are wrong."""
    rot_dim, head_size = cos_sin_cache.shape[1], query.shape[2]
    if rot_dim % 2 or rot_dim > head_size:
        raise ValueError(
            f"rot_dim must be even and at most the head size {head_size}, got {rot_dim}"
        )
    num_tokens = positions.shape[-1]
    num_keys = num_tokens if key is None else key.shape[0]
    if query.shape[0] != num_tokens or num_keys != num_tokens:
        raise ValueError(
            f"positions ({num_tokens}), queries ({query.shape[0]}) and keys ({num_keys}) must "
            "have the same number of tokens"
        )


def angles_at(positions: Tensor, cos_sin_cache: Tensor, sections: Tensor | None) -> Tensor:
    """Look up the cosines and sines [T, rot_dim] of tokens at [T] or [P, T] positions.

    See `rotary_embedding`.
    """
    if positions.dim() == 1 or positions.shape[0] == 1:
        return cos_sin_cache.index_select(0, positions.flatten())
    if sections is None:
        raise ValueError(
            "positions must have one entry for each token unless the rotation has sections, got "
            f"{list(positions.shape)}"
        )
    places = torch.cat((sections, sections))
    angles = cos_sin_cache.index_select(0, positions[0])
    for place in range(1, positions.shape[0]):
        others = cos_sin_cache.index_select(0, positions[place])
        angles = torch.where(places == place, others, angles)
    return angles


def _gate_and_up(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension of x must be even (gate and up), got {x.shape[-1]}")
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate pairs of the first 2 * cos.shape[-1] elements of every head of x [T, H, D]."""
    rot_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rot_dim], x[..., rot_dim:]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    # Written as (x * cos) + (rotate_half(x) * sin) so that bf16 rounds as Hugging Face does.
    new_first = first * cos + -second * sin
    new_second = second * cos + first * sin
    if is_neox:
        return torch.cat((new_first, new_second, rest), dim=-1)
    return torch.cat((torch.stack((new_first, new_second), dim=-1).flatten(-2), rest), dim=-1)
