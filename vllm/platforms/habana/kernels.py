"""Call the fused kernels of the bridge, in the same way for a card and for a simulated one.

The facts in the docstrings are about the published bridge (builds 1.19 and later). All arguments of
`FusedSDPA` and `FusedRMSNorm` are passed by position. Signatures of `torch.ops.hpu` follow the
bridge's documentation (`cast_to_fp8_v2`, `cast_from_fp8`, `fp8_gemm_v2`, `convert_from_uint4`,
`mixture_of_experts`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.platforms.habana.parts import PARTS, Found

logger = init_logger(__name__)

_NO_WINDOW = (-1, -1)
_NAME = "mixture_of_experts"
_MXFP4, _BIAS_MXFP4 = "mxfp4_fused_weights", "bias_mxfp4_fused_weights"
_MXFP4_BLOCK = 32
"""Elements with one scale."""


class FusedKernels:
    """Fused kernels of the bridge that the engine calls. Letters: B batch, H heads, S tokens, D
    head size.

    The kernels in `habana.parts` may be missing: call `has` before using one of them.
    """

    window_left = 1
    """Difference between a window of W tokens and the kernel's argument for it."""
    window_multiple = 1
    """The number of tokens must be a multiple of this if `sdpa` gets a window."""

    def __init__(
        self,
        found: Found,
        card: Callable[[], str],
        find_fault: Callable[["FusedKernels", str], str | None],
    ) -> None:
        """Set up the kernels.

        Args:
            found: parts of the bridge that exist.
            card: returns the name of the card.
            find_fault: returns what is wrong with a part on this card, or None; see
                `trials.find_fault`.
        """
        self._found, self._card, self._find_fault = found, card, find_fault
        self._tried: dict[str, str | None] = {}
        self._sdpa: Any = _first(found, "FusedSDPA")
        self._fp8_sdpa: Any = _first(found, "fp8_fused_sdpa")
        self._rms_norm: Any = _first(found, "FusedRMSNorm")
        self._apply_rotary, self._rotary_mode = found.get("apply_rotary_pos_emb", (None, None))

    def has(self, name: str) -> bool:
        """Return whether an optional kernel can be used. Call this outside of compiled code.

        Args:
            name: a key of `habana.parts.PARTS`.
        """
        return self.why_unused(name) is None

    def why_unused(self, name: str) -> str | None:
        """Return why an optional kernel is not used; None if it can be used.

        Either the bridge does not have it, or the card computes a wrong result, which the first
        call of this method tests.

        Args:
            name: a key of `habana.parts.PARTS`.
        """
        if name not in self._found:
            return "this build of the bridge lacks it"
        cards = PARTS[name].cards
        if cards and self._card().upper() not in cards:
            return f"only {' and '.join(cards)} have it"
        if name not in self._tried:
            self._tried[name] = self._find_fault(self, name)
            if self._tried[name] is not None:
                logger.warning(
                    "the kernel %s of the card is not used: %s. Instead, %s",
                    name,
                    self._tried[name],
                    PARTS[name].instead,
                )
        return self._tried[name]

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
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Run FusedSDPA over [B, H, S, D]; key and value may have fewer heads, which are shared.

        Args:
            query: [B, H, S, D].
            key, value: [B, G, S_kv, D].
            attn_mask: added to the scores, or bool with True for "attend"; [B, 1 or H, S, S_kv].
            is_causal: lower triangle, aligned top left. Not together with a mask.
            scale: factor of the scores; None: 1 / sqrt(D).
            softmax_mode: "None", or "fast" with an approximate exponential.
            valid_seq_len: int32 [B], tokens of each right-padded sequence; only with `is_causal`.
                Results after these tokens are undefined.
            window: number of tokens that a query sees, itself included; only with `is_causal` and
                as many keys as queries, without `valid_seq_len`. Needs "FusedSDPA window_size".
            sinks: [H], score of one additional key per head, whose value is zero. Needs "FusedSDPA
                sink".
        """
        dropout, recompute = 0.0, True
        given: tuple[Any, ...] = (
            *(query, key, value, attn_mask, dropout, is_causal, scale, softmax_mode, recompute),
            *(valid_seq_len, "right"),
        )
        if window is not None or sinks is not None:
            size = _NO_WINDOW if window is None else (window - self.window_left, 0)
            given = (*given, False, False, size, sinks)
        out: Tensor = self._sdpa.apply(*given)
        return out

    def fp8_sdpa(
        self,
        scales: tuple[Tensor, Tensor, Tensor],
        weight_scales: tuple[Tensor, Tensor],
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
        """Run FusedSDPA over float8_e4m3fn, with the softmax rounded to FP8. Needs
        "fp8_fused_sdpa".

        Args:
            scales: [1] float32 each, factors of queries, keys and values.
            weight_scales: [1] float32 each: factors of the softmax before it is rounded, and after.

        Returns:
            bfloat16
        """
        out: Tensor = self._fp8_sdpa(
            *(query, key, value, attn_mask, 0.0, is_causal, scale, softmax_mode),
            d_scale_q=scales[0],
            d_scale_k=scales[1],
            d_scale_v=scales[2],
            q_scale_s=weight_scales[0],
            d_scale_s=weight_scales[1],
            valid_seq_len=valid_seq_len,
            seq_padding_type="right",
        )[0]
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute x * rsqrt(mean(x^2) + eps) * weight over the last dimension, reduced in fp32."""
        out: Tensor = self._rms_norm.apply(x, weight, eps)
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """Compute x * cos + rotate(x) * sin.

        Args:
            x: [tokens, heads, rotated].
            cos, sin: [tokens, 1, rotated], already as wide as x.
            interleaved: True pairs neighbours (GPT-J), False the two halves (NeoX).
        """
        mode = self._rotary_mode.PAIRWISE if interleaved else self._rotary_mode.BLOCKWISE
        out: Tensor = self._apply_rotary(x, cos, sin, None, 0, mode)
        return out

    def block_softmax(
        self, scores: Tensor, bias: Tensor, groups: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the exponentials of the scores in each block, minus the highest score per head in
        the block.

        Letters: N blocks, G key/value heads, R query heads of each, S tokens of a block.

        Args:
            scores: [N, G, R, 1, S].
            bias: [N, 1, 1, 1, S], added to the scores.
            groups: [N] int32, request of each block; a block of request -1 becomes zero.

        Returns:
            ([N, G, R, 1, S] exponentials; highest scores and sums, [N, G * R or more] each, for
            `block_softmax_adjustment`)
        """
        hpu: Any = torch.ops.hpu
        weights, maxima, sums = hpu.block_softmax(scores, bias, groups)
        return weights, maxima, sums

    def block_softmax_adjustment(
        self,
        maxima: Tensor,
        sums: Tensor,
        groups: Tensor,
        num_groups: int,
        shape: list[int] | None = None,
    ) -> Tensor:
        """Compute the factor of each block: exp(maximum of the block - maximum of its request) /
        sum of the request.

        Sums are relative to the maximum of the request.

        Args:
            maxima, sums: [N, G, R, 1, 1], or as `block_softmax` returns them.
            groups: [N] int32, request of each block.
            num_groups: number of requests.
            shape: shape of the result, [N, G, R, 1], for results of `block_softmax`; None: the
                shape of `maxima`.
        """
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.block_softmax_adjustment(maxima, sums, groups, num_groups, shape)
        return out

    def cast_to_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * scale, rounded to `dtype` and limited to the range of the card.

        Args:
            x: float32 or bfloat16.
            scale: [1] float32, or for x of two dimensions [T, 1].
            dtype: float8_e4m3fn or float8_e5m2.
        """
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.cast_to_fp8_v2(x, scale, False, False, dtype)[0]
        return out

    def cast_from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * scale, of `dtype`.

        Args:
            x: float8_e4m3fn or float8_e5m2.
            scale: [1] float32.
            dtype: float32 or bfloat16.
        """
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.cast_from_fp8(x, scale, dtype)
        return out

    def fp8_gemm(
        self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Compute (x @ weight.T) * x_scale * weight_scale, [T, N] of `dtype`.

        Args:
            x: [T, K] float8_e4m3fn.
            weight: [N, K] float8_e4m3fn.
            x_scale: [T, 1] or [1] float32.
            weight_scale: [N] float32.
        """
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.fp8_gemm_v2(
            x, False, weight, True, None, dtype, x_scale, weight_scale, None, False
        )
        return out

    def from_uint4(
        self, words: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Compute (code - zero) * scale, [K, N] of `dtype`.

        Args:
            words: [K, N / 8] int32, eight 4-bit codes in a word, from the lowest bits on.
            scales: [G, N], each for K / G inputs.
            zeros: [G, N / 8] int32, packed in the same way.
        """
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.convert_from_uint4(words, scales, zeros, dtype)
        return out

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        first_expert: int = 0,
        has_inputs_first: bool = False,
    ) -> Tensor:
        """Compute the sum of weight * (silu(gate x) * up x) down over the experts of each token.
        Runs only in lazy mode and in compiled code.

        Args:
            x: [tokens, hidden].
            ids: [tokens, k] int32 or int64.
            weights: [tokens, k], with the dtype of x.
            gate_up: per expert [2 * I, hidden], gate then up.
            down: per expert [hidden, I].
            first_expert: id of the first of these experts; other experts are ignored.
            has_inputs_first: gate_up is [hidden, 2 * I] and down [I, hidden].
        """
        options = _options(first_expert, len(down), has_inputs_first)
        return _call(x, ids, weights, gate_up, down, activation="silu", **options)

    def bias_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        gate_up_bias: Sequence[Tensor],
        down_bias: Sequence[Tensor],
        alpha: float,
        limit: float,
        first_expert: int = 0,
        has_inputs_first: bool = False,
    ) -> Tensor:
        """Compute a mixture of experts with biases and limited activations (GPT-OSS). Runs where
        `moe` can run.

        With g = min(gate x + bias, limit) and u = up x + bias between -limit and limit, the result
        is the sum of weight * ((g * sigmoid(alpha * g) * (u + 1)) down + bias).

        Args:
            x, ids, weights, down, first_expert, has_inputs_first: as in `moe`.
            gate_up: per expert [2 * I, hidden], gate and up of each feature alternating.
            gate_up_bias: per expert [2 * I], alternating like gate_up, with the dtype of x.
            down_bias: per expert [hidden].
            alpha, limit: the same for all experts; constants of a recipe.
        """
        return _call(
            *(x, ids, weights, gate_up, down),
            w12_bias=list(gate_up_bias),
            w3_bias=list(down_bias),
            alpha=alpha,
            limit=limit,
            **_options(first_expert, len(down), has_inputs_first),
        )

    def fp8_moe(
        self,
        numbers: Tensor,
        scale: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor],
        down: Sequence[Tensor],
        down_scales: Sequence[Tensor],
        first_expert: int = 0,
    ) -> Tensor:
        """Run a mixture of experts with FP8 inputs and weights, each with a scale. Runs where `moe`
        can run.

        The inputs of the second matmul are rounded to FP8 with their own scales.

        Args:
            numbers: [tokens, hidden] float8_e4m3fn, the quantized inputs.
            scale: [tokens, 1] float32, scale of each token.
            ids: [tokens, k] int32 or int64.
            weights: [tokens, k] bfloat16.
            gate_up: per expert [2 * I, hidden] float8_e4m3fn, gate then up.
            gate_up_scales: per expert [2 * I] float32.
            down: per expert [hidden, I] float8_e4m3fn.
            down_scales: per expert [hidden] float32.
            first_expert: index of the first expert of this rank, as in `moe`.

        Returns:
            [tokens, hidden] bfloat16
        """
        return _call(
            *(numbers, ids, weights, gate_up, down),
            d_scale_hidden_states=scale,
            d_scale_w12=list(gate_up_scales),
            d_scale_w3=list(down_scales),
            activation="silu",
            **_options(first_expert, len(down)),
        )

    def mxfp4_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor],
        down: Sequence[Tensor],
        down_scales: Sequence[Tensor],
        first_expert: int = 0,
    ) -> Tensor:
        """Compute the result of `moe` with MXFP4 weights. Runs where `moe` can run.

        Args:
            x: [tokens, hidden] bfloat16.
            ids, weights, first_expert: as in `moe`.
            gate_up: per expert [2 * I, hidden / 2] uint8, gate then up: two E2M1 elements in a
                byte, the first in the lower four bits.
            gate_up_scales: per expert [2 * I, hidden / 32] uint8, E8M0.
            down: per expert [hidden, I / 2] uint8.
            down_scales: per expert [hidden, I / 32] uint8.

        Returns:
            [tokens, hidden] bfloat16
        """
        lists = (gate_up, down, gate_up_scales, down_scales)
        return _call_mxfp4(
            _MXFP4, (x, ids, weights), lists, activation="silu", **_options(first_expert, len(down))
        )

    def bias_mxfp4_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor],
        down: Sequence[Tensor],
        down_scales: Sequence[Tensor],
        gate_up_bias: Sequence[Tensor],
        down_bias: Sequence[Tensor],
        alpha: float,
        limit: float,
        first_expert: int = 0,
    ) -> Tensor:
        """Compute the result of `bias_moe` with MXFP4 weights in the form of `mxfp4_moe`; gate and
        up of each feature alternate.
        """
        lists = (gate_up, down, gate_up_bias, down_bias, gate_up_scales, down_scales)
        return _call_mxfp4(
            *(_BIAS_MXFP4, (x, ids, weights), lists),
            alpha=alpha,
            limit=limit,
            **_options(first_expert, len(down)),
        )


def _first(found: Found, name: str) -> Any:
    return found[name][0] if name in found else None


def _call_mxfp4(
    overload: str,
    routed: tuple[Tensor, Tensor, Tensor],
    lists: Sequence[Sequence[Tensor]],
    **options: Any,
) -> Tensor:
    """Run an MXFP4 overload. Its tensors are passed by position, as in the vendor's tests."""
    operator: Any = getattr(getattr(torch.ops.hpu, _NAME), overload)
    out: Tensor = operator(
        *routed,
        *(list(tensors) for tensors in lists),
        block_size=_MXFP4_BLOCK,
        is_fp4=True,
        **options,
    )
    return out


def _call(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    **more: Any,
) -> Tensor:
    """Run the overload that has these arguments."""
    operator: Any = getattr(torch.ops.hpu, _NAME)
    out: Tensor = operator(
        hidden_states=x,
        expert_routing_table=ids,
        router_weights=weights,
        w12=list(gate_up),
        w3=list(down),
        **more,
    )
    return out


def _options(first_expert: int, num_experts: int, has_inputs_first: bool = False) -> dict[str, Any]:
    return {
        "permuted_weights": not has_inputs_first,
        "experts_min": first_expert,
        "experts_max": first_expert + num_experts - 1,
    }
