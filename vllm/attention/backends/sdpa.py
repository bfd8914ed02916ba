"""Provide kernels for padded prompt attention, with one signature.

All of them take tensors in the layout of kernels. The caller chooses a kernel for its device.

Letters: B requests (rows), Q new tokens of a request, K keys of a request, H query heads, G
key/value heads (H a multiple of G), D head size.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.backends.cache_scales import PromptScales
from vllm.config.hpu import UNSLICED, PromptSlicing
from vllm.errors import ConfigError
from vllm.ops.attention_options import PLAIN_ATTENTION, AttentionOptions
from vllm.platforms.habana.kernels import FusedKernels


class PromptInputs(NamedTuple):
    """The arguments of a kernel for prompt attention."""

    query: Tensor
    """[B, H, Q, D]"""
    key: Tensor
    """[B, G, K, D]"""
    value: Tensor
    """[B, G, K, D]"""
    mask: Tensor | None
    """[B, 1 or H, Q, K]: bool, True if a query sees a key, or a float that is added to the scores.
    It must include causality, and every query must see a key. None: causal, with Q = K."""
    scale: float
    """Multiplies query @ key."""
    valid_lens: Tensor | None = None
    """[B] int32, only without a mask: tokens before the padding on the right. A kernel may use it
    to skip work; results after these tokens are finite and not used."""


SDPAKernel = Callable[[PromptInputs], Tensor]
"""Scaled dot product attention, with the interface of a fused kernel. Returns [B, H, Q, D]."""


def torch_sdpa(inputs: PromptInputs) -> Tensor:
    """Compute attention with the kernel of torch."""
    query, key, value, mask, scale, _ = inputs
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def naive_sdpa(
    inputs: PromptInputs, options: AttentionOptions = PLAIN_ATTENTION, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention by matmul, float32 softmax and matmul: the reference for the other kernels.

    Args:
        inputs: the inputs of the kernel.
        options: options of the layer, which define how scaled scores are changed before the mask.
        sinks: [H] float32, score of one additional key per head, whose value is zero; None without.
    """
    query, key, value, mask, scale, _ = inputs
    num_kv_heads, query_len, key_len = key.shape[1], query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(query_len, key_len, dtype=torch.bool, device=query.device).tril()
        mask = mask[None, None]
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [B, G, H / G, Q, D]
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).float().flatten(1, 2) * scale
    scores = options.adjusted(scores)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., :key_len].to(value.dtype).unflatten(1, (num_kv_heads, -1))
    return (weights @ value[:, :, None]).flatten(1, 2)


@dataclass(frozen=True)
class FusedSDPA:
    """The fused kernel of a Gaudi card, as an `SDPAKernel`.

    16-bit types use its fast softmax, with an approximate exponential; float32, windows and sinks
    use the exact one.
    """

    kernels: FusedKernels
    window_multiple: int | None = None
    """The kernel accepts windows if the number of new tokens is a multiple of this; None: it
    accepts no windows."""
    has_sinks: bool = False
    """Whether the kernel accepts sinks."""
    has_fp8: bool = False
    """Layers with measured scales attend in fp8."""
    slicing: PromptSlicing = UNSLICED
    """Prompts that attend in slices of their queries."""

    def fitted(self, *, has_windows: bool, has_sinks: bool) -> "FusedSDPA":
        """Return the kernel for a model, with the features that the model needs and the card
        supports.
        """
        multiple = None
        if has_windows and self.kernels.has("FusedSDPA window_size"):
            multiple = self.kernels.window_multiple
        has_sinks = has_sinks and self.kernels.has("FusedSDPA sink")
        return replace(self, window_multiple=multiple, has_sinks=has_sinks)

    def __call__(
        self, inputs: PromptInputs, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention.

        Args:
            inputs: the inputs of the kernel.
            window: number of tokens that a query sees, itself included; only without a mask and
                with as many keys as queries. None: all tokens before it, or as the mask says.
            sinks: [H], score of one additional key per head, whose value is zero; None without.
        """
        kernels, dtype = self.kernels, inputs.query.dtype
        if window is not None or sinks is not None:
            query, key, value, mask, scale, _ = inputs
            sinks = None if sinks is None else sinks.to(dtype)
            # Padding is on the right, so no real token attends to it and lengths are not needed.
            return kernels.sdpa(
                *(query, key, value, mask),
                is_causal=mask is None,
                scale=scale,
                window=window,
                sinks=sinks,
            )
        return _attend(kernels.sdpa, inputs, "None" if dtype == torch.float32 else "fast")


def _attend(kernel: Callable[..., Tensor], inputs: PromptInputs, softmax_mode: str) -> Tensor:
    """Call a kernel of the card that accepts a mask, or lengths, or neither, and make its padding
    finite.
    """
    *qkv, mask, scale, valid_lens = inputs
    if mask is not None or valid_lens is None:
        return kernel(*qkv, mask, is_causal=mask is None, scale=scale, softmax_mode=softmax_mode)
    out = kernel(
        *qkv, is_causal=True, scale=scale, softmax_mode=softmax_mode, valid_seq_len=valid_lens
    )
    # Beyond the lengths the kernel's output is undefined. Clear it: NaN would survive a later
    # factor of 0.
    token = torch.arange(out.shape[2], dtype=valid_lens.dtype, device=valid_lens.device)
    return out.masked_fill(token[:, None] >= valid_lens.view(-1, 1, 1, 1), 0.0)


@dataclass(frozen=True)
class Fp8SDPA:
    """The fused FP8 kernel of a card, as an `SDPAKernel`, for a layer whose scales were
    measured.
    """

    kernels: FusedKernels
    scales: PromptScales

    def __call__(self, inputs: PromptInputs) -> Tensor:
        """Compute attention of float8_e4m3fn inputs; the result is bfloat16."""
        cache, weights = self.scales.cache, self.scales.weights
        factors = (self.scales.query.scale, cache.key.scale, cache.value.scale)
        kernel = partial(self.kernels.fp8_sdpa, factors, (weights.inverse, weights.scale))
        return _attend(kernel, inputs, "fast")

    def round_inputs(self, attend: SDPAKernel, inputs: PromptInputs) -> Tensor:
        """Round query, key and value to FP8, and compute attention with the kernel `attend`."""
        scales, dtype = self.scales, torch.float8_e4m3fn
        query, key, value, mask, scale, lens = inputs
        query = scales.query.store(query, dtype)
        key, value = scales.cache.key.store(key, dtype), scales.cache.value.store(value, dtype)
        rounded = PromptInputs(query, key, value, mask, scale, lens)
        return attend(rounded).to(inputs.query.dtype)


def bridge_sdpa(
    kernels: FusedKernels, slicing: PromptSlicing = UNSLICED, *, wants_fp8: bool = False
) -> SDPAKernel:
    """Return the fused kernel of a card; plain torch operators if the bridge does not have it."""
    if not kernels.has("FusedSDPA"):
        return naive_sdpa
    has_fp8 = wants_fp8 and kernels.has("fp8_fused_sdpa")
    return FusedSDPA(kernels, has_fp8=has_fp8, slicing=slicing)


def flex_sdpa(inputs: PromptInputs) -> Tensor:
    """Compute attention with `flex_attention` of torch; check `require_flex` first.

    Only for compiled models: otherwise torch warns once and computes all scores. The mask changes
    scores instead of being a block mask, which would need a sort on the device.
    """
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value, mask, scale, _ = inputs
    return flex_attention(
        query,
        key,
        value,
        score_mod=_causal_score if mask is None else _masked_score(mask),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, row, head, query, key), all of no dimension -> score."""


def _causal_score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.where(query >= key, score, float("-inf"))


def _masked_score(mask: Tensor) -> _ScoreMod:
    is_per_head, is_bool = mask.shape[1] > 1, mask.dtype == torch.bool
    if not is_per_head:
        mask = mask[:, 0]  # outside `masked`: an integer constant as an index fails in torch 2.6

    def masked(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = mask[row, head, query, key] if is_per_head else mask[row, query, key]
        return torch.where(seen, score, float("-inf")) if is_bool else score + seen

    return masked


def require_flex(device: torch.device) -> None:
    """Check that `flex_sdpa` runs on the device, with one token.

    Raises:
        ConfigError: it does not run, or this torch version does not have it.
    """
    token = torch.zeros(1, 1, 1, 16, device=device)
    try:
        with warnings.catch_warnings():
            # Torch warns that flex attention is not compiled, which does not matter here.
            warnings.simplefilter("ignore")
            flex_sdpa(PromptInputs(token, token, token, None, 1.0))
    except (ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"flex_attention of torch {torch.__version__} does not run on device {device.type!r}; "
            "unset VLLM_PROMPT_USE_FLEX_ATTENTION. Without it, VLLM_PROMPT_USE_FUSEDSDPA=1 uses "
            "the fused kernel, and 0 uses plain matmuls"
        ) from error
