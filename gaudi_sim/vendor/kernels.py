"""Simulates `habana_frameworks.torch.hpex.kernels`: fused attention and rotary embedding.

Arguments are positional, as documented. Arguments that the simulation does not support raise an
error.
"""

from enum import IntEnum

import torch
from torch import Tensor

__all__ = [
    "FusedSDPA",
    "RotaryPosEmbeddingHelperV2",
    "RotaryPosEmbeddingMode",
    "apply_rotary_pos_emb",
    "fp8_fused_sdpa",
]


class RotaryPosEmbeddingMode(IntEnum):
    """The pairs of elements: one of each half, or neighbours."""

    BLOCKWISE = 0
    PAIRWISE = 1


class FusedSDPA:
    """Attention over [B, H, S, D].

    The real class is an autograd function, whose `forward` has the parameters. Here it is `apply`
    itself.
    """

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sink: Tensor | None = None,
        /,
    ) -> Tensor:
        """Compute attention; key and value may have fewer heads, which are shared.

        Raises:
            RuntimeError: the kernel does not support this combination of arguments, or the
                simulation does not.
        """
        if is_causal and attn_mask is not None:
            raise RuntimeError("FusedSDPA: is_causal together with attn_mask is not supported")
        if valid_seq_len is not None and not is_causal:
            raise RuntimeError("FusedSDPA: valid_seq_len needs is_causal")
        if dropout_p or return_dropout_mask or return_attn_probs:
            raise RuntimeError(
                "FusedSDPA: the simulation supports neither dropout nor return_attn_probs"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = torch.ops.hpu.sdpa_recomp_fwd(
            q, k, v, attn_mask, 0.0, scale, is_causal, False, softmax_mode,
            valid_seq_len, seq_padding_type, list(window_size), sink,
        )[0]  # fmt: skip
        return out

    forward = apply


def fp8_fused_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "None",
    d_scale_q: Tensor | None = None,
    d_scale_k: Tensor | None = None,
    d_scale_v: Tensor | None = None,
    q_scale_s: Tensor | None = None,
    q_scale_o: Tensor | None = None,
    d_scale_s: Tensor | None = None,
    is_amax_s: bool = False,
    is_amax_o: bool = False,
    valid_seq_len: Tensor | None = None,
    seq_padding_type: str = "left",
    recompute: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention over [B, H, S, D] in FP8, with the softmax in FP8.

    Raises:
        RuntimeError: the kernel does not support this combination of arguments.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("fp8_fused_sdpa: is_causal together with attn_mask is not supported")
    if valid_seq_len is not None and not is_causal:
        raise RuntimeError("fp8_fused_sdpa: valid_seq_len needs is_causal")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    results = torch.ops.hpu.fp8_sdpa_recomp_fwd(
        q, k, v, attn_mask, dropout_p, scale, is_causal, False, softmax_mode, d_scale_q, d_scale_k,
        d_scale_v, q_scale_s, q_scale_o, d_scale_s, is_amax_s, is_amax_o, valid_seq_len,
        seq_padding_type,
    )  # fmt: skip
    return results[0], results[4], results[5]


def apply_rotary_pos_emb(
    p: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
    /,
) -> Tensor:
    """Compute p * cos + rotate(p) * sin; `position_ids` select rows of cos and sin."""
    out: Tensor = torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, int(mode))
    return out


class RotaryPosEmbeddingHelperV2:
    """Rotary embedding with rows of a table."""

    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, /) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, position_ids)
