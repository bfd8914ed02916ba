"""Call the fused kernels of the bridge, in the same way for a card and for a simulated one.

All arguments of `FusedSDPA` and `FusedRMSNorm` are passed by position. Signatures of
`torch.ops.hpu` follow the bridge's documentation (`cast_to_fp8_v2`, `cast_from_fp8`,
`fp8_gemm_v2`, `convert_from_uint4`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.platforms.habana.experts import FusedExperts
from vllm.platforms.habana.parts import PARTS, Found
from vllm.platforms.habana.trials import TRIALS, Runner

logger = init_logger(__name__)

_NO_WINDOW = (-1, -1)


class BridgeKernels(FusedExperts):
    """`FusedKernels` with the parts that a bridge has."""

    window_left = 1
    window_multiple = 1

    def __init__(
        self, found: Found, device: torch.device, card: Callable[[], str], *, is_lazy: bool
    ) -> None:
        """Set up the kernels.

        Args:
            found: parts of the bridge that exist.
            device: the card, for trials.
            card: returns the name of the card.
            is_lazy: whether operators are recorded; otherwise trials run in compiled code.
        """
        self._found, self._card = found, card
        self._runner = Runner(device, is_lazy=is_lazy)
        self._tried: dict[str, str | None] = {}
        self._sdpa: Any = _first(found, "FusedSDPA")
        self._fp8_sdpa: Any = _first(found, "fp8_fused_sdpa")
        self._rms_norm: Any = _first(found, "FusedRMSNorm")
        self._apply_rotary, self._rotary_mode = found.get("apply_rotary_pos_emb", (None, None))

    def has(self, name: str) -> bool:
        """Return whether an optional kernel can be used."""
        return self.why_unused(name) is None

    def why_unused(self, name: str) -> str | None:
        """Return why an optional kernel cannot be used; None if it can."""
        if name not in self._found:
            return "this build of the bridge lacks it"
        cards = PARTS[name].cards
        if cards and self._card().upper() not in cards:
            return f"only {' and '.join(cards)} have it"
        if name not in TRIALS:
            return None
        if name not in self._tried:
            self._tried[name] = TRIALS[name](self, self._runner)
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
        """Run FusedSDPA. For the arguments see `FusedKernels.sdpa`."""
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
        """Run FusedRMSNorm. For the arguments see `FusedKernels.rms_norm`."""
        out: Tensor = self._rms_norm.apply(x, weight, eps)
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """Apply rotary positions. For the arguments see `FusedKernels.rotary`."""
        mode = self._rotary_mode.PAIRWISE if interleaved else self._rotary_mode.BLOCKWISE
        out: Tensor = self._apply_rotary(x, cos, sin, None, 0, mode)
        return out

    def block_softmax(
        self, scores: Tensor, bias: Tensor, groups: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the softmax of each block. For the arguments see `FusedKernels.block_softmax`."""
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
        """Compute the factors of blocks. For the arguments see
        `FusedKernels.block_softmax_adjustment`.
        """
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.block_softmax_adjustment(maxima, sums, groups, num_groups, shape)
        return out

    def cast_to_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.cast_to_fp8_v2(x, scale, False, False, dtype)[0]
        return out

    def cast_from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.cast_from_fp8(x, scale, dtype)
        return out

    def fp8_gemm(
        self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.fp8_gemm_v2(
            x, False, weight, True, None, dtype, x_scale, weight_scale, None, False
        )
        return out

    def from_uint4(
        self, words: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype
    ) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.convert_from_uint4(words, scales, zeros, dtype)
        return out


def _first(found: Found, name: str) -> Any:
    return found[name][0] if name in found else None
