import enum

import torch

from habana_frameworks import documented


class RotaryPosEmbeddingMode(enum.IntEnum):
    BLOCKWISE = 0
    PAIRWISE = 1


class FusedSDPA:
    @staticmethod
    @documented
    def apply(
        q,
        k,
        v,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        softmax_mode="None",
        recompute_mode=None,
        valid_seq_len=None,
        seq_padding_type="left",
        return_dropout_mask=False,
        return_attn_probs=False,
        /,
    ):
        if is_causal and attn_mask is not None:
            raise RuntimeError("causal together with a mask is not supported")
        if valid_seq_len is not None and not is_causal:
            raise RuntimeError("valid_seq_len is for causal attention")
        # Rows behind the valid length are undefined, so plain causal attention will do.
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )


@documented
def apply_rotary_pos_emb(
    p, cos, sin, position_ids=None, offset=0, mode=RotaryPosEmbeddingMode.BLOCKWISE, /
):
    if mode == RotaryPosEmbeddingMode.PAIRWISE:
        turned = torch.view_as_complex(p.unflatten(-1, (-1, 2)).contiguous()) * 1j
        return p * cos + torch.view_as_real(turned).flatten(-2) * sin
    half = p.shape[-1] // 2
    return p * cos + torch.cat((-p[..., half:], p[..., :half]), -1) * sin
