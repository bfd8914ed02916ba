"""The fused kernels of the simulated card: operators of `torch.ops.hpu`, computed in fp32.

The schemas are the bridge's. A card rounds at other points and has an approximate exponential, so
results agree within a tolerance, never bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gaudi_sim.kernels import blocks as sim_blocks
from gaudi_sim.kernels import fp8 as sim_fp8
from gaudi_sim.kernels import mxfp4 as sim_mxfp4
from gaudi_sim.kernels import uint4 as sim_uint4
from gaudi_sim.kernels.experts import biased_experts, silu_experts, weights_of_experts

_SCHEMAS = {
    "rms_norm": "(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)",
    "rotary_pos_embedding": (
        "(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode)"
        " -> Tensor"
    ),
    "mixture_of_experts.fused_weights": (
        "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12,"
        " Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max)"
        " -> Tensor"
    ),
    "mixture_of_experts.bias_fused_weights": (
        "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12,"
        " Tensor[] w3, Tensor[] w12_bias, Tensor[] w3_bias, *, bool permuted_weights,"
        " int experts_min, int experts_max, int chunk_size=0, int total_experts=0,"
        " float alpha=1.702, float limit=7.0) -> Tensor"
    ),
    "mixture_of_experts.fp8_fused_weights_dynamic": (
        "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12,"
        " Tensor[] w3, Tensor d_scale_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3,"
        " bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor"
    ),
    "sdpa_recomp_fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale,"
        " bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len,"
        " str seq_padding_type, int[] window_size=[-1, -1], Tensor? sink=None)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}

_SCHEMAS["fp8_sdpa_recomp_fwd"] = (
    "(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale,"
    " bool is_causal, bool requires_backward, str softmax_mode, Tensor? d_scale_q,"
    " Tensor? d_scale_k, Tensor? d_scale_v, Tensor? q_scale_s, Tensor? q_scale_o,"
    " Tensor? d_scale_s, bool is_amax_s, bool is_amax_o, Tensor? valid_seq_len,"
    " str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_DISPATCH = "CompositeExplicitAutograd"

PAIRWISE = 1


@cache
def register() -> torch.library.Library:
    """Define the operators, once per process. Keep the result: it keeps them defined."""
    library = torch.library.Library("hpu", "DEF")  # type: ignore[no-untyped-call]
    kernels: dict[str, Callable[..., object]] = {
        "rms_norm": _rms_norm,
        "rotary_pos_embedding": _rotary_pos_embedding,
        "mixture_of_experts.fused_weights": _mixture_of_experts,
        "mixture_of_experts.bias_fused_weights": _bias_mixture_of_experts,
        "mixture_of_experts.fp8_fused_weights_dynamic": _fp8_mixture_of_experts,
        "sdpa_recomp_fwd": _sdpa_recomp_fwd,
        "fp8_sdpa_recomp_fwd": _fp8_sdpa_recomp_fwd,
        **sim_blocks.KERNELS,
        **sim_fp8.KERNELS,
        **sim_mxfp4.KERNELS,
        **sim_uint4.KERNELS,
    }
    schemas = (
        _SCHEMAS | sim_blocks.SCHEMAS | sim_fp8.SCHEMAS | sim_mxfp4.SCHEMAS | sim_uint4.SCHEMAS
    )
    for name, schema in schemas.items():
        library.define(name + schema)  # type: ignore[no-untyped-call]
        library.impl(name, kernels[name], _DISPATCH)  # type: ignore[no-untyped-call]
    shapes = sim_fp8.SHAPES | {
        "mixture_of_experts.fp8_fused_weights_dynamic": _shape_of_fp8_experts,
        "fp8_sdpa_recomp_fwd": _shape_of_fp8_sdpa,
    }
    for name, shape_of in shapes.items():
        library.impl(name, shape_of, "Meta")  # type: ignore[no-untyped-call]
    return library


def _rms_norm(data_in: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    x = data_in.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    dtype = torch.promote_types(data_in.dtype, gamma.dtype)
    return (x * inverse_rms * gamma.float()).to(dtype), inverse_rms


def _rotary_pos_embedding(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    if offset:
        raise NotImplementedError(
            "rotary_pos_embedding: the simulated kernel supports only offset 0"
        )
    if position_ids is not None:
        sin, cos = (_rows_at(table, position_ids, input) for table in (sin, cos))
    if torch.float32 in (input.dtype, sin.dtype, cos.dtype):
        input, sin, cos = input.float(), sin.float(), cos.float()
    else:
        sin, cos = sin.to(input.dtype), cos.to(input.dtype)
    if mode == PAIRWISE:
        rotated = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    else:
        first, second = input.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    return input * cos + rotated * sin


def _rows_at(table: Tensor, position_ids: Tensor, x: Tensor) -> Tensor:
    """Select rows of `table` [..., rows, D] for x [tokens, heads, D] or [batch, heads,
    tokens, D].
    """
    rows = table.reshape(-1, table.shape[-1]).index_select(0, position_ids.reshape(-1))
    return rows.unsqueeze(1) if x.dim() == 3 else rows.view(-1, 1, x.shape[-2], rows.shape[-1])


def _mixture_of_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> Tensor:
    if activation != "silu":
        raise NotImplementedError(
            f"mixture_of_experts: the simulated kernel supports only silu, got {activation}"
        )
    weights = weights_of_experts(
        expert_routing_table, router_weights, experts_min, experts_max, len(w12), len(w3)
    )
    return silu_experts(hidden_states, weights, w12, w3, is_permuted=permuted_weights)


def _bias_mixture_of_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    w12_bias: list[Tensor],
    w3_bias: list[Tensor],
    *,
    permuted_weights: bool,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Compute experts with biases and a clamped activation; gates and ups alternate.

    Chunks have no effect here.
    """
    counts = (len(w12), len(w3), len(w12_bias), len(w3_bias))
    weights = weights_of_experts(
        expert_routing_table, router_weights, experts_min, experts_max, *counts
    )
    return biased_experts(
        *(hidden_states, weights, w12, w3, w12_bias, w3_bias, alpha, limit),
        is_permuted=permuted_weights,
    )


def _fp8_mixture_of_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    d_scale_hidden_states: Tensor,
    d_scale_w12: list[Tensor],
    d_scale_w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> Tensor:
    """Compute FP8 experts; inputs of the second matmul are rounded to FP8 with one scale
    per row.
    """
    if activation != "silu" or not permuted_weights:
        raise NotImplementedError(
            "mixture_of_experts.fp8: the simulated kernel supports only silu with "
            f"permuted_weights=True, got {activation} with {permuted_weights}"
        )
    x = sim_fp8.decode(hidden_states) * d_scale_hidden_states
    out = torch.zeros_like(x)
    counts = (len(w12), len(w3), len(d_scale_w12), len(d_scale_w3))
    weights = weights_of_experts(
        expert_routing_table, router_weights, experts_min, experts_max, *counts
    )
    experts = zip(weights, w12, d_scale_w12, w3, d_scale_w3, strict=True)
    for weight, gate_up, gate_up_scale, down, down_scale in experts:
        gate, up = (x @ sim_fp8.decode(gate_up).T * gate_up_scale).chunk(2, dim=-1)
        middle = sim_fp8.round_rows(torch.nn.functional.silu(gate) * up)
        out = out + weight * (middle @ sim_fp8.decode(down).T * down_scale)
    return out.bfloat16()


def _shape_of_fp8_experts(hidden_states: Tensor, *others: object) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape, dtype=torch.bfloat16)


def _sdpa_recomp_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
    window_size: Sequence[int] = (-1, -1),
    sink: Tensor | None = None,
    round_weights: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute attention as documented, and with sliding windows.

    A window is (keys before the query, keys after it) that the query attends to, in addition to its
    own position; -1 means all.
    """
    if p:
        raise NotImplementedError(f"attention: the simulated kernel has no dropout, got p={p}")
    group = q.shape[-3] // k.shape[-3]
    key, value = (x.float().repeat_interleave(group, -3) for x in (k, v))
    scores = q.float() @ key.transpose(-1, -2) * scale
    rows, columns = scores.shape[-2:]
    minus_inf = float("-inf")
    if is_causal:
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, minus_inf)
    if tuple(window_size) != (-1, -1):
        ahead = (
            torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None]
        )
        for side, distance in zip(window_size, (-ahead, ahead), strict=True):
            if side >= 0:
                scores = scores.masked_fill(distance > side, minus_inf)
    if valid_seq_len is not None:
        positions = torch.arange(columns, device=q.device)
        length = valid_seq_len.view(-1, 1, 1, 1)
        is_left = seq_padding_type == "left"
        padding = positions < columns - length if is_left else positions >= length
        scores = scores.masked_fill(padding, minus_inf)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, minus_inf)
    elif attention_mask is not None:
        scores = scores + attention_mask.float()
    row_max = scores.amax(-1, keepdim=True)
    if sink is not None:
        extra = sink.float().view(-1, 1, 1)
        row_max = torch.maximum(row_max, extra)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    if sink is not None:
        row_sum = row_sum + torch.exp(extra - row_max)
    if round_weights is None:
        out = (weights / row_sum @ value).to(q.dtype)
    else:  # without waiting for the sum, the kernel rounds before it divides
        out = (round_weights(weights) @ value / row_sum).to(q.dtype)
    # Padding on the left attends to no key, so its output does not matter.
    if valid_seq_len is not None:
        out = out.nan_to_num()
    seed = torch.zeros(1, dtype=torch.int32, device=q.device)
    if not requires_backward:
        return out, q.new_zeros(1), q.new_zeros(1, dtype=torch.float32), seed
    return out, row_max.to(q.dtype), row_sum.reciprocal(), seed


def _fp8_sdpa_recomp_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    d_scale_q: Tensor | None,
    d_scale_k: Tensor | None,
    d_scale_v: Tensor | None,
    q_scale_s: Tensor | None,
    q_scale_o: Tensor | None,
    d_scale_s: Tensor | None,
    is_amax_s: bool,
    is_amax_o: bool,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute attention in FP8.

    Scales multiply: d_* the rounded values, q_* the values before they are rounded.
    """
    if q_scale_o is not None or is_amax_s or is_amax_o:
        raise NotImplementedError(
            "attention in FP8: the simulated kernel does not support q_scale_o, is_amax_s and "
            "is_amax_o"
        )

    def round_weights(weights: Tensor) -> Tensor:
        scaled = weights if q_scale_s is None else weights * q_scale_s
        rounded = sim_fp8.decode(sim_fp8.saturate(scaled, q.dtype).to(q.dtype))
        return rounded if d_scale_s is None else rounded * d_scale_s

    query, key, value = (
        sim_fp8.decode(x) if factor is None else sim_fp8.decode(x) * factor
        for x, factor in ((q, d_scale_q), (k, d_scale_k), (v, d_scale_v))
    )
    out, *others = _sdpa_recomp_fwd(
        *(query, key, value, attention_mask, p, scale, is_causal, requires_backward),
        *(softmax_mode, valid_seq_len, seq_padding_type),
        round_weights=round_weights,
    )
    none = torch.empty(0, device=q.device)
    return out.bfloat16(), others[0], others[1], others[2], none, none


def _shape_of_fp8_sdpa(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16)
    return out, *(q.new_empty(0, dtype=torch.float32) for _ in range(5))
