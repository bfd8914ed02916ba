"""The reference that defines every operator: plain torch, any device, obviously right.

Never optimised. Norms and softmax are computed in float32 whatever the dtype of the data. A
device implementation derives from this class and replaces what it does better.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops.interface import (
    FP8_DTYPES,
    ONE_GROUP,
    SILU_EXPERTS,
    ExpertGroups,
    ExpertOptions,
    PreparedExperts,
    PreparedHeads,
    PreparedTable,
    PreparedWeight,
    Routing,
)
from vllm.ops.native_adapters import NativeAdapters
from vllm.ops.rounded_inputs import RoundedInputs, is_rounding_inputs
from vllm.ops.state_space import NativeScans
from vllm.ops.stored_weight import StoredWeight


class DenseWeight(nn.Module):
    """A dequantized weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `PreparedWeight`."""
        return F.linear(x, self.weight, bias)


class DenseHeads(nn.Module):
    """Matrices of heads, [H, I, O]."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrices.contiguous(), requires_grad=False)

    def multiply(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """See `PreparedHeads`."""
        out = torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)
        return out if beside is None else torch.cat((out, beside), dim=-1)

    def dense(self) -> Tensor:
        """[H, I, O]"""
        return self.weight


class NativeOps(NativeAdapters, NativeScans):
    """Every operator in torch. Writes over no argument but the caches."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight is {list(weight.shape)}, x is {list(x.shape)}")
        x_float = x.float()
        normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.shape != residual.shape or x.dtype != residual.dtype:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}, residual is {residual.dtype} "
                f"{list(residual.shape)}"
            )
        new_residual = x + residual
        return self.rms_norm(new_residual, weight, eps), new_residual

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        is_by_head = weight is not None and weight.dim() == 2
        by_row = x.shape[-1:]
        for operand, sizes in ((weight, x.shape[1:] if is_by_head else by_row), (bias, by_row)):
            if operand is not None and operand.shape != sizes:
                raise ValueError(f"weight or bias is {list(operand.shape)}, x is {list(x.shape)}")
        if weight is None or not is_by_head:
            return F.layer_norm(x, by_row, weight, bias, eps)
        normed = F.layer_norm(x.float(), by_row, eps=eps) * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            raise ValueError(
                f"the last dimension of x must be even (gate and up), got {x.shape[-1]}"
            )
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        return F.gelu(x, approximate="tanh" if is_tanh else "none")

    def gelu_and_mul(self, x: Tensor, is_tanh: bool) -> Tensor:
        if x.shape[-1] % 2:
            raise ValueError(
                f"the last dimension of x must be even (gate and up), got {x.shape[-1]}"
            )
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh" if is_tanh else "none") * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def scale_rows(self, x: Tensor, factor: Tensor, is_gate: bool = False) -> Tensor:
        if factor.shape != (len(x), 1):
            raise ValueError(f"factor is {list(factor.shape)}, not [{len(x)}, 1]")
        factor = factor.sigmoid() if is_gate else factor
        return x * factor.view(-1, *[1] * (x.dim() - 1))

    def route(
        self,
        logits: Tensor,
        top_k: int,
        routing: Routing,
        scale: float = 1.0,
        groups: ExpertGroups = ONE_GROUP,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_choice(top_k, logits, groups, bias)
        key = logits = logits.float()
        if bias is not None:
            is_softmax = routing in ("softmax", "softmax_of_chosen")
            key = (logits.softmax(-1) if is_softmax else logits.sigmoid()) + bias
        if groups.top_groups < groups.num_groups:
            key = _within_groups(key, groups, num_best=1 if bias is None else 2)
        ids = key.topk(top_k, dim=-1).indices
        chosen = logits.gather(-1, ids)
        if routing == "softmax":
            weights = (chosen - logits.logsumexp(-1, keepdim=True)).exp()
        elif routing == "softmax_of_chosen":
            weights = chosen.softmax(-1)
        else:
            weights = chosen.sigmoid()
            if routing == "sigmoid_of_chosen":
                weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * scale

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
            return RoundedInputs(weight, lambda stored: self.prepare_weight(stored, dtype))
        return DenseWeight(weight.dequantize().to(dtype))

    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        return DenseHeads(matrices)

    def prepare_table(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedTable | None:
        return None

    def prepare_experts(
        self,
        gate: Sequence[StoredWeight],
        up: Sequence[StoredWeight],
        down: Sequence[StoredWeight],
        dtype: torch.dtype,
        first_expert: int | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> PreparedExperts | None:
        return None

    def moe(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        options: ExpertOptions = SILU_EXPERTS,
        first_expert: int | None = None,
    ) -> Tensor:
        num_experts, hidden, size = down.shape
        if gate_up.shape != (num_experts, 2 * size, hidden) or x.shape[1:] != (hidden,):
            raise ValueError(
                f"x is {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)}"
            )
        if topk_ids.shape != topk_weights.shape or len(topk_ids) != len(x):
            raise ValueError(
                f"topk_ids is {list(topk_ids.shape)}, topk_weights {list(topk_weights.shape)} "
                f"for {len(x)} tokens"
            )
        # All tokens through all experts: no shape depends on the choices.
        out = torch.zeros_like(x, dtype=torch.float32)
        choices = choices_of(num_experts, topk_ids, topk_weights, first_expert)
        for expert, (is_other, weight) in enumerate(choices):
            middle_bias = None if gate_up_bias is None else gate_up_bias[expert]
            bias = None if down_bias is None else down_bias[expert]
            given = (x * weight).to(x.dtype) if options.scales_inputs else x
            middle = self._activated(F.linear(given, gate_up[expert], middle_bias), options)
            result = F.linear(middle, down[expert], bias)
            if options.scales_inputs:  # also of experts without a bias, which give zero for zero
                weight = (~is_other).any(-1, keepdim=True).float()
            out += weight * result
        return out.to(x.dtype)

    def _activated(self, gate_up: Tensor, options: ExpertOptions) -> Tensor:
        """The middle of an expert: [..., 2 * I] -> [..., I]."""
        if options.limit is None:
            return self.silu_and_mul(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
        return (gate * (options.alpha * gate).sigmoid() * (up + 1)).to(gate_up.dtype)

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
        key: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
    ) -> tuple[Tensor, Tensor]:
        check_rotary(positions, query, key, cos_sin_cache)
        angles = self.rotary_angles(positions, cos_sin_cache, query.dtype, is_neox)
        return self.rotate(query, key, angles, is_neox)

    def rotary_angles(
        self, positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype, is_neox: bool
    ) -> tuple[Tensor, Tensor]:
        # [T, 1, rot_dim / 2] each: one row of angles per token, the same for every head
        cos, sin = cos_sin_cache[positions].to(dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def rotate(
        self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor], is_neox: bool
    ) -> tuple[Tensor, Tensor]:
        cos, sin = angles
        return _rotate(query, cos, sin, is_neox), _rotate(key, cos, sin, is_neox)

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
        pairs = [(key, key_cache, key_scales)]
        if value is not None and value_cache is not None:
            pairs.append((value, value_cache, value_scales))
        for new, cache, _ in pairs:
            if new.shape[1:] != cache.shape[2:] or new.shape[0] != slot_mapping.shape[0]:
                raise ValueError(
                    f"new tokens are {list(new.shape)}, the cache is {list(cache.shape)}, "
                    f"slot_mapping is {list(slot_mapping.shape)}"
                )
        if slot_mapping.shape[0] == 0:
            return
        # A boolean mask would read its size back to the host. Instead, padding tokens repeat
        # the first real token (the same row to the same slot), or, when no token is real,
        # write back what slot 0 holds.
        is_real = slot_mapping >= 0
        first_real = is_real.int().argmax(dim=0, keepdim=True)
        source = torch.where(is_real, torch.arange(len(key), device=key.device), first_real)
        slots = slot_mapping[source].clamp(min=0)
        for pair in pairs:
            new, cache = _as_stored(*pair)
            flat = cache.flatten(0, 1)
            flat[slots] = torch.where(is_real.any(), new[source], flat[slots])

    def paged_attention_decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int | None,
        alibi_slopes: Tensor | None = None,
        logits_soft_cap: float | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
        sinks: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        check_attention(query, key_cache, value_cache, sliding_window, chunk_size)
        check_scores(query, alibi_slopes, logits_soft_cap, sinks)
        num_kv_heads = key_cache.shape[2]
        grouped = query.float().unflatten(1, (num_kv_heads, -1))  # [B, G, H / G, D]
        # [B, max_blocks, S, G, D] -> [B, K, G, D], K = keys a table can hold
        keys = _as_read(_read_blocks(key_cache, block_tables), key_scales).flatten(1, 2).float()
        values = _as_read(_read_blocks(value_cache, block_tables), value_scales)
        values = values.flatten(1, 2).float()
        position = torch.arange(keys.shape[1], device=query.device)
        is_hidden = position >= seq_lens[:, None]  # [B, K]
        if sliding_window is not None:
            is_hidden |= position < seq_lens[:, None] - sliding_window
        if chunk_size is not None:
            is_hidden |= position < (seq_lens[:, None] - 1) // chunk_size * chunk_size
        # What a block holds past the end may be NaN, and 0 * NaN is NaN: clear it.
        values = values.masked_fill(is_hidden[:, :, None, None], 0.0)
        scores = torch.einsum("bgrd,bkgd->bgrk", grouped, keys) * scale
        distance = (seq_lens[:, None] - 1 - position)[:, None, None]  # [B, 1, 1, K]
        adjusted = _adjust(
            scores.flatten(1, 2)[:, :, None], distance, alibi_slopes, logits_soft_cap
        )
        scores = adjusted.view(scores.shape)
        scores = scores.masked_fill(is_hidden[:, None, None], float("-inf"))
        if sinks is not None:
            sinks = sinks.view(1, num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1).masked_fill((seq_lens == 0)[:, None, None, None], 0.0)
        weights = weights[..., : keys.shape[1]]
        return torch.einsum("bgrk,bkgd->bgrd", weights, values).flatten(1, 2).to(query.dtype)

    def paged_attention_prefill(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        scale: float,
        sliding_window: int | None,
        alibi_slopes: Tensor | None = None,
        logits_soft_cap: float | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
        sinks: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        check_attention(query, key_cache, value_cache, sliding_window, chunk_size)
        check_scores(query, alibi_slopes, logits_soft_cap, sinks)
        # Numbers of an fp8 cache times their scales would be rounded in bfloat16.
        dtype = torch.float32 if key_cache.dtype in FP8_DTYPES else query.dtype
        block_size = key_cache.shape[1]
        shape = (*query.shape[:2], value_cache.shape[3])
        out = torch.zeros(shape, dtype=query.dtype, device=query.device)
        for b, seq_len in enumerate(map(int, seq_lens)):
            start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
            num_blocks = -(-seq_len // block_size)
            if end - start > seq_len or num_blocks > block_tables.shape[1]:
                raise ValueError(
                    f"request {b} has {end - start} new tokens of {seq_len} in all, and a table "
                    f"of {block_tables.shape[1]} blocks of {block_size}"
                )
            if end == start:
                continue
            block_ids = block_tables[b, :num_blocks]
            # [1, heads, tokens, D], as scaled_dot_product_attention wants them
            q = query[start:end].transpose(0, 1)[None].to(dtype)
            k, v = (
                _as_read(_read_blocks(cache, block_ids).flatten(0, 1)[:seq_len], scales)
                .transpose(0, 1)[None]
                .to(dtype)
                for cache, scales in ((key_cache, key_scales), (value_cache, value_scales))
            )
            options = (alibi_slopes, logits_soft_cap, sinks, chunk_size)
            attended = attend_prompt(q, k, v, scale, sliding_window, *options)
            out[start:end] = attended[0].transpose(0, 1)
        return out


def check_rotary(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """Raise ValueError for what no `rotary_embedding` takes."""
    rot_dim, head_size = cos_sin_cache.shape[1], query.shape[2]
    if rot_dim % 2 or rot_dim > head_size:
        raise ValueError(f"rot_dim is {rot_dim}: not even, or above head size {head_size}")
    num_tokens = positions.shape[0]
    if query.shape[0] != num_tokens or key.shape[0] != num_tokens:
        raise ValueError(
            f"{num_tokens} positions for {query.shape[0]} queries and {key.shape[0]} keys"
        )


def choices_of(
    num_experts: int, topk_ids: Tensor, topk_weights: Tensor, first_expert: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each of the experts which choices [T, k] are of others, and its weight [T, 1] for each
    token, 0 where it was not chosen. No shape depends on the choices."""
    for expert in range(num_experts):
        is_other = topk_ids != expert + (first_expert or 0)
        yield is_other, topk_weights.masked_fill(is_other, 0.0).sum(-1, keepdim=True)


def check_choice(
    top_k: int, logits: Tensor, groups: ExpertGroups = ONE_GROUP, bias: Tensor | None = None
) -> None:
    """Raise ValueError for choices that no router can make."""
    num_experts = logits.shape[-1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to {num_experts} experts")
    if num_experts % groups.num_groups or not 1 <= groups.top_groups <= groups.num_groups:
        raise ValueError(f"{num_experts} experts cannot be chosen from {groups}")
    if bias is not None and (bias.shape != (num_experts,) or bias.dtype != torch.float32):
        raise ValueError(
            f"the bias of choices is {bias.dtype} {list(bias.shape)}, it must be float32 "
            f"[{num_experts}]"
        )


def _within_groups(key: Tensor, groups: ExpertGroups, num_best: int) -> Tensor:
    """Minus infinity for the experts of other groups than the best ones."""
    grouped = key.unflatten(-1, (groups.num_groups, -1))
    best = grouped.topk(min(num_best, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = best.topk(groups.top_groups, dim=-1).indices  # [T, top_groups]
    index = torch.arange(groups.num_groups, device=key.device)
    is_chosen = (chosen.unsqueeze(-1) == index).any(1)  # [T, num_groups]
    return grouped.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).flatten(-2)


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sliding_window: int | None,
    chunk_size: int | None = None,
) -> None:
    """The part of the attention contract that does not depend on the phase.

    Raises:
        ValueError: heads, head sizes, dtypes or the window do not fit.
    """
    *places, head_size = key_cache.shape
    *value_places, value_size = value_cache.shape
    if places != value_places or not value_size <= head_size == query.shape[2]:
        raise ValueError(
            f"query is {list(query.shape)}, key_cache is {list(key_cache.shape)}, "
            f"value_cache is {list(value_cache.shape)}"
        )
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"{query.shape[1]} query heads is not a multiple of {key_cache.shape[2]} kv heads"
        )
    is_known = key_cache.dtype == query.dtype or key_cache.dtype in FP8_DTYPES
    if not is_known or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"query is {query.dtype}, the caches are {key_cache.dtype} and {value_cache.dtype}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1, or None")


def check_scores(
    query: Tensor,
    alibi_slopes: Tensor | None,
    logits_soft_cap: float | None,
    sinks: Tensor | None = None,
) -> None:
    """The part of the attention contract that is about what is done to scores.

    Raises:
        ValueError: slopes or sinks do not fit the heads, or the cap is not positive.
    """
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap is {logits_soft_cap}; it must be positive, or None")
    for name, numbers in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if numbers is not None and (
            numbers.shape != query.shape[1:2]
            or numbers.dtype != torch.float32
            or not numbers.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {numbers.dtype} {list(numbers.shape)} with strides "
                f"{list(numbers.stride())}, not one dense torch.float32 for each of "
                f"{query.shape[1]} heads"
            )


def to_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in one of FP8_DTYPES: the nearest number, at most the largest; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def _as_stored(new: Tensor, cache: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """New tokens [T, G, D] and their cache with one dtype, in which torch can index."""
    if cache.dtype not in FP8_DTYPES:
        return new, cache
    scale = 1.0 if scales is None else scales.to(new.device)[:, None]
    return to_fp8(new, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)


def _as_read(stored: Tensor, scales: Tensor | None) -> Tensor:
    """Numbers of a cache [..., G, D] as attention reads them: of an fp8 cache times the scales."""
    if stored.dtype not in FP8_DTYPES:
        return stored
    return stored.float() if scales is None else stored.float() * scales.to(stored.device)[:, None]


def _read_blocks(cache: Tensor, block_ids: Tensor) -> Tensor:
    """`cache[block_ids]`, which torch does not have for fp8."""
    if cache.dtype not in FP8_DTYPES:
        return cache[block_ids]
    return cache.view(torch.uint8)[block_ids].view(cache.dtype)


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


def _prefill_mask(
    query_len: int,
    seq_len: int,
    sliding_window: int | None,
    chunk_size: int | None,
    device: torch.device,
) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) of one request; the mask is bool [query_len, seq_len]."""
    has_window = sliding_window is not None and sliding_window < seq_len
    has_window = has_window or (chunk_size is not None and chunk_size < seq_len)
    if query_len == seq_len and not has_window:
        return None, True
    if query_len == 1 and not has_window:
        return None, False
    # Bottom right: the last query sees the last key.
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)
    mask = key_pos <= query_pos
    if sliding_window is not None:
        mask &= key_pos > query_pos - sliding_window
    if chunk_size is not None:
        mask &= key_pos >= query_pos // chunk_size * chunk_size
    return mask, False


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int | None,
    alibi_slopes: Tensor | None,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
    chunk_size: int | None,
) -> Tensor:
    """[1, H, Q, V]: the last Q tokens of one request; q [1, H, Q, D], k [1, G, K, D], v
    [1, G, K, V]."""
    query_len, seq_len = q.shape[2], k.shape[2]
    mask, is_causal = _prefill_mask(query_len, seq_len, sliding_window, chunk_size, q.device)
    if alibi_slopes is None and logits_soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    position = torch.arange(seq_len, device=q.device)
    distance = position[seq_len - query_len :, None] - position
    scores = _adjust(
        (q.float() @ k.transpose(2, 3) * scale)[0], distance, alibi_slopes, logits_soft_cap
    )
    is_hidden = distance < 0 if mask is None else ~mask
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)), dim=-1)
    return (scores.softmax(-1)[..., :seq_len] @ v).to(q.dtype)


def _adjust(
    scores: Tensor, distance: Tensor, alibi_slopes: Tensor | None, logits_soft_cap: float | None
) -> Tensor:
    """Soft cap, then ALiBi. scores: [..., H, Q, K]; distance: from key to query, without H."""
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance
    return scores
