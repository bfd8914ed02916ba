import enum

from gaudi_sim.vendor import kernels as card
from habana_frameworks import documented


class RotaryPosEmbeddingMode(enum.IntEnum):
    BLOCKWISE = 0
    PAIRWISE = 1


@documented
def fp8_fused_sdpa(
    q,
    k,
    v,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    softmax_mode="None",
    d_scale_q=None,
    d_scale_k=None,
    d_scale_v=None,
    q_scale_s=None,
    q_scale_o=None,
    d_scale_s=None,
    is_amax_s=False,
    is_amax_o=False,
    valid_seq_len=None,
    seq_padding_type="left",
    recompute=None,
):
    return card.fp8_fused_sdpa(
        q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, d_scale_q, d_scale_k,
        d_scale_v, q_scale_s, q_scale_o, d_scale_s, is_amax_s, is_amax_o, valid_seq_len,
        seq_padding_type, recompute,
    )  # fmt: skip


class FusedSDPA:
    """An autograd function, whose parameters are the parameters of `forward`."""

    @staticmethod
    def forward(
        ctx,
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
        window_size=(-1, -1),
        sink=None,
    ):
        raise NotImplementedError("torch calls this, and nobody else")

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
        window_size=(-1, -1),
        sink=None,
        /,
    ):
        return card.FusedSDPA.apply(
            q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode,
            valid_seq_len, seq_padding_type, return_dropout_mask, return_attn_probs, window_size,
            sink,
        )  # fmt: skip


@documented
def apply_rotary_pos_emb(
    p, cos, sin, position_ids=None, offset=0, mode=RotaryPosEmbeddingMode.BLOCKWISE, /
):
    return card.apply_rotary_pos_emb(p, cos, sin, position_ids, offset, mode)
