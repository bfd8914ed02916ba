"""The fused kernels of the simulated card: operators of `torch.ops.hpu`, computed in fp32.

The schemas are the bridge's. A card rounds in other places and has an approximate exponent, so
results agree with these to a tolerance, never bit for bit.
"""

from functools import cache

import torch
from torch import Tensor

_SCHEMAS = {
    "rms_norm": "(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)",
    "rotary_pos_embedding": (
        "(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode)"
        " -> Tensor"
    ),
    "sdpa_recomp_fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale,"
        " bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len,"
        " str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}

_DISPATCH = "CompositeExplicitAutograd"

BLOCKWISE, PAIRWISE = 0, 1


class SimulatedKernels:
    """`FusedKernels` over the simulated operators; refuses what the real ones refuse."""

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        valid_seq_len: Tensor | None = None,
    ) -> Tensor:
        if is_causal and attn_mask is not None:
            raise RuntimeError("FusedSDPA: is_causal together with attn_mask is not supported")
        if valid_seq_len is not None and not is_causal:
            raise RuntimeError("FusedSDPA: valid_seq_len needs is_causal")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = torch.ops.hpu.sdpa_recomp_fwd(
            query, key, value, attn_mask, 0.0, scale, is_causal, False, softmax_mode,
            valid_seq_len, "right",
        )[0]  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = torch.ops.hpu.rms_norm(x, weight, eps)[0]
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        mode = PAIRWISE if interleaved else BLOCKWISE
        out: Tensor = torch.ops.hpu.rotary_pos_embedding(x, sin, cos, None, 0, mode)
        return out


@cache
def register() -> torch.library.Library:
    """Define the operators, once per process. The result keeps them alive."""
    library = torch.library.Library("hpu", "DEF")  # type: ignore[no-untyped-call]
    kernels = {
        "rms_norm": _rms_norm,
        "rotary_pos_embedding": _rotary_pos_embedding,
        "sdpa_recomp_fwd": _sdpa_recomp_fwd,
    }
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)  # type: ignore[no-untyped-call]
        library.impl(name, kernels[name], _DISPATCH)  # type: ignore[no-untyped-call]
    return library


def _rms_norm(data_in: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    x = data_in.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    dtype = torch.promote_types(data_in.dtype, gamma.dtype)
    return (x * inverse_rms * gamma.float()).to(dtype), inverse_rms


def _rotary_pos_embedding(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    if position_ids is not None or offset:
        raise NotImplementedError("the simulated kernel takes cos and sin row by row only")
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if p:
        raise NotImplementedError("the simulated kernel has no dropout")
    if valid_seq_len is not None and seq_padding_type != "right":
        raise NotImplementedError("the simulated kernel takes padding on the right only")
    group = q.shape[-3] // k.shape[-3]
    key, value = (x.float().repeat_interleave(group, -3) for x in (k, v))
    scores = q.float() @ key.transpose(-1, -2) * scale
    rows, columns = scores.shape[-2:]
    minus_inf = float("-inf")
    if is_causal:
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, minus_inf)
    if valid_seq_len is not None:
        positions = torch.arange(columns, device=q.device)
        padding = positions >= valid_seq_len.view(-1, 1, 1, 1)
        scores = scores.masked_fill(padding, minus_inf)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, minus_inf)
    elif attention_mask is not None:
        scores = scores + attention_mask.float()
    row_max = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    out = (weights / row_sum @ value).to(q.dtype)
    seed = torch.zeros(1, dtype=torch.int32, device=q.device)
    if not requires_backward:
        return out, q.new_zeros(1), q.new_zeros(1, dtype=torch.float32), seed
    return out, row_max.to(q.dtype), row_sum.reciprocal(), seed
