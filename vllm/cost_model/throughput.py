"""Predicts the seconds of a forward pass of a model on one or more cards, with a range. No torch.

Times add up: in the published runs matmuls, memory and links overlap little. Batch sizes and
lengths are scalars or numpy arrays that broadcast with each other; "tokens" and "blocks" include
padding.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm.cost_model import constants
from vllm.cost_model.cards import CARDS
from vllm.cost_model.fitted import CONSTANTS, Fitted, Floats, fitted_constants
from vllm.cost_model.links import moving_seconds

_ACTIVATION_BYTES = 2
_ALL_REDUCES = 2
"""All-reduces of one layer."""
_NUM_NEAR = 20
_PHASE_DISTANCE = 4.0
"""Distance between prefills and decodes, where 1 is the distance to twice the batch or length."""
_BAND = (0.05, 0.95)
"""Quantiles of the residuals near a step. The band is to hold 80 % of the data that was held
out."""
_OUTSIDE_FACTOR = 2.0
"""The band is wider by this outside of the published data."""

PARTS = ("matmuls", "weights", "KV cache", "links", "launches")
"""Parts of the time of a step."""
_PART_OF = {
    "prompt_matmuls": "matmuls",
    "decode_matmuls": "matmuls",
    "keys_and_values": "KV cache",
    "weights": "weights",
    "layer_us": "launches",
    "link_bytes": "links",
    "all_reduce_us": "links",
}


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """Sizes of attention layers that are equal."""

    num_layers: int
    query_width: int
    """Elements of the queries of a token in a layer: heads times their size."""
    kv_width: int
    """Elements of the keys and values of a token in a layer."""
    num_kv_heads: int
    """So many cards share the keys and values; any more hold copies."""
    window: int | None = None
    """Most recent tokens that a query sees; None: all."""

    def seen(self, num_tokens: Floats) -> Floats:
        """Return how many of `num_tokens` tokens a query attends to (sliding window)."""
        return num_tokens if self.window is None else np.minimum(num_tokens, self.window)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """Sizes of a model that decide its speed, of all cards together."""

    dense_params: float
    """Parameters of linear layers that every token uses, without the head."""
    expert_params: float = 0
    """Parameters of one expert, all layers together."""
    num_experts: int = 0
    experts_per_token: int = 0
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: tuple[AttentionFigures, ...]
    weight_bytes: float
    """Bytes of a parameter in memory."""
    kv_bytes: float
    """Bytes of an element of a key or a value."""
    is_fp8: bool
    """Whether matmuls run in FP8."""

    @property
    def token_params(self) -> float:
        """Parameters of linear layers that one token uses, without the output head."""
        return self.dense_params + self.experts_per_token * self.expert_params

    @property
    def head_params(self) -> int:
        """Parameters of the output head."""
        return self.hidden_size * self.vocab_size

    def params_read(self, num_tokens: Floats) -> Floats:
        """Return how many parameters a step with this number of tokens reads.

        Experts are assumed to be used evenly.
        """
        used = np.zeros_like(num_tokens)
        if self.num_experts:
            unused = (1 - self.experts_per_token / self.num_experts) ** num_tokens
            used = self.num_experts * (1 - unused)
        return self.dense_params + self.head_params + self.expert_params * used

    def kv_bytes_read(self, batch: Floats, context: Floats, num_cards: int) -> Floats:
        """Return the bytes of keys and values that one card reads.

        Args:
            batch: requests.
            context: tokens of each request.
            num_cards: number of cards that share each layer.
        """
        total = np.zeros(np.broadcast_shapes(batch.shape, context.shape))
        for layers in self.attention:
            elements = layers.num_layers * layers.kv_width / min(num_cards, layers.num_kv_heads)
            total = total + batch * layers.seen(context) * elements * self.kv_bytes
        return total

    def attention_flops(self, num_tokens: Floats, seen: Floats) -> Floats:
        """Return the FLOPs of attention, all cards together.

        Args:
            num_tokens: queries.
            seen: tokens that a query sees on average, for full attention.
        """
        total = np.zeros(np.broadcast_shapes(num_tokens.shape, seen.shape))
        for layers in self.attention:
            width = layers.num_layers * layers.query_width
            total = total + 4 * num_tokens * layers.seen(seen) * width
        return total


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of steps; arrays have the shape of the batch sizes and lengths."""

    parts: Floats
    """[..., 5] seconds of each part, in the order of `PARTS`."""
    low: Floats
    high: Floats
    """The band: it holds 80 % of published runs that are like these steps."""

    @cached_property
    def seconds(self) -> Floats:
        total: Floats = self.parts.sum(-1)
        return total

    def part(self, name: str) -> Floats:
        """Return the seconds of one of `PARTS`."""
        seconds: Floats = self.parts[..., PARTS.index(name)]
        return seconds

    @property
    def bound_by(self) -> NDArray[np.str_]:
        """Name of the part that takes most of the time."""
        longest: NDArray[np.str_] = np.array(PARTS)[self.parts.argmax(-1)]
        return longest


class ServingCost:
    """Predicts the times of steps of a model on cards of one machine.

    Attributes:
        card: a key of `cards.CARDS`.
        num_cards: number of cards that share each layer (tensor parallel).
        figures: sizes of the model.
        fitted: constants of the card.
    """

    def __init__(
        self,
        card: str,
        num_cards: int,
        figures: ModelFigures,
        *,
        block_size: int = 128,
        fitted: Fitted | None = None,
    ) -> None:
        self.card = card
        self.num_cards = num_cards
        self.figures = figures
        self.fitted = fitted or fitted_constants(card)
        self._block_size = block_size
        self._spec = CARDS[card]
        self._flops = self._spec.fp8_flops if figures.is_fp8 else self._spec.bf16_flops

    def prefill_seconds(
        self, batch: ArrayLike, query_len: ArrayLike, context_blocks: ArrayLike = 0
    ) -> StepTime:
        """Predict the time of prefills.

        Args:
            batch: requests.
            query_len: new tokens of each request.
            context_blocks: blocks of each request whose keys and values are in the cache already.
        """
        batch, query_len, context_blocks = _floats(batch, query_len, context_blocks)
        attention, terms = self.prefill_terms(batch, query_len, context_blocks)
        at = self._coordinates(1.0, batch, query_len + self._block_size * context_blocks)
        is_longer = query_len > self.fitted.longest_prompt
        return self._step_time(terms, at, is_longer | (context_blocks > 0), attention)

    def decode_seconds(
        self, batch: ArrayLike, context_tokens: ArrayLike, query_len: ArrayLike = 1
    ) -> StepTime:
        """Predict the time of decodes.

        Args:
            batch: requests.
            context_tokens: tokens of all requests together whose keys and values are read.
            query_len: new tokens of each request, more than one with drafts.
        """
        batch, context_tokens, query_len = _floats(batch, context_tokens, query_len)
        terms = self.decode_terms(batch, context_tokens, query_len)
        at = self._coordinates(0.0, batch, context_tokens / batch)
        return self._step_time(terms, at, query_len > 1)

    def outside_of_data(self, prompt_len: int = 0) -> tuple[str, ...]:
        """Return why published runs do not cover these steps; empty if they do.

        Args:
            prompt_len: length of the longest prompt.
        """
        reasons = []
        if self.num_cards not in self.fitted.numbers_of_cards:
            reasons.append("number of cards")
        if not (self.figures.is_fp8 and self.figures.weight_bytes == self.figures.kv_bytes == 1):
            reasons.append("dtype")
        if self.figures.num_experts:
            reasons.append("experts")
        if prompt_len > self.fitted.longest_prompt:
            reasons.append(f"prompt over {self.fitted.longest_prompt:,}")
        return tuple(reasons)

    def prefill_terms(
        self, batch: Floats, query_len: Floats, context_blocks: Floats
    ) -> tuple[Floats, Floats]:
        """Return the seconds of attention, and the terms [..., 7] that the constants multiply."""
        figures, num_tokens = self.figures, batch * query_len
        context = self._block_size * context_blocks
        attention = figures.attention_flops(num_tokens, context + query_len / 2) / self.num_cards
        flops = 2 * (figures.token_params * num_tokens + figures.head_params * batch)
        terms = self._terms(num_tokens, batch, context)
        terms[..., _COLUMN["prompt_matmuls"]] = flops / self.num_cards / self._flops
        return attention / (constants.SDPA_SHARE * self._spec.bf16_flops), terms

    def decode_terms(self, batch: Floats, context_tokens: Floats, query_len: Floats) -> Floats:
        """Return the terms [..., 7] that the constants multiply."""
        num_tokens = batch * query_len
        terms = self._terms(num_tokens, batch, context_tokens / batch)
        flops = 2 * (self.figures.token_params + self.figures.head_params) * num_tokens
        terms[..., _COLUMN["decode_matmuls"]] = flops / self.num_cards / self._flops
        return terms

    def _terms(self, num_tokens: Floats, batch: Floats, context: Floats) -> Floats:
        """Return the terms of both phases, without matmuls."""
        figures, spec, num_cards = self.figures, self._spec, self.num_cards
        num_tokens, batch, context = np.broadcast_arrays(num_tokens, batch, context)
        terms = np.zeros((*num_tokens.shape, len(CONSTANTS)))
        kv_bytes = figures.kv_bytes_read(batch, context, num_cards)
        weight_bytes = figures.params_read(num_tokens) * figures.weight_bytes / num_cards
        terms[..., _COLUMN["keys_and_values"]] = kv_bytes / spec.hbm_bytes_per_s
        terms[..., _COLUMN["weights"]] = weight_bytes / spec.hbm_bytes_per_s
        terms[..., _COLUMN["layer_us"]] = 1e-6 * figures.num_layers
        if num_cards > 1:
            num_reduces = _ALL_REDUCES * figures.num_layers
            num_bytes = num_tokens * figures.hidden_size * _ACTIVATION_BYTES
            moving_s = moving_seconds(spec, num_bytes, num_cards)
            terms[..., _COLUMN["link_bytes"]] = num_reduces * moving_s
            terms[..., _COLUMN["all_reduce_us"]] = 1e-6 * num_reduces
        return terms

    def _coordinates(self, prompt_share: float, batch: Floats, length: Floats) -> Floats:
        return coordinates(prompt_share, batch, length, self.figures.token_params / self.num_cards)

    def _step_time(
        self, terms: Floats, at: Floats, outside: NDArray[np.bool_], attention: ArrayLike = 0.0
    ) -> StepTime:
        by_constant = terms * self.fitted.values
        parts = np.stack([by_constant[..., _COLUMNS_OF[name]].sum(-1) for name in PARTS], axis=-1)
        parts[..., PARTS.index("matmuls")] += attention
        low, high = band(self.fitted, at)
        outside = outside | bool(self.outside_of_data())
        factor = np.where(outside, _OUTSIDE_FACTOR, 1.0)
        seconds = parts.sum(-1)
        return StepTime(parts, seconds * low / factor, seconds * high * factor)


_COLUMN = {name: column for column, name in enumerate(CONSTANTS)}
_COLUMNS_OF = {
    part: [_COLUMN[name] for name, of in _PART_OF.items() if of == part] for part in PARTS
}


def _floats(*values: ArrayLike) -> tuple[Floats, ...]:
    return tuple(np.broadcast_arrays(*(np.asarray(value, np.float64) for value in values)))


def coordinates(
    prompt_share: ArrayLike, batch: ArrayLike, length: ArrayLike, params: ArrayLike
) -> Floats:
    """Return coordinates of steps or runs; the distance tells how different two of them are.

    Args:
        prompt_share: prompt fraction of the time; 1 for a prefill, 0 for a decode.
        batch: requests.
        length: tokens of one request that are computed or read.
        params: parameters of linear layers, that one token uses on one card.
    """
    sizes = (np.log2(np.maximum(size, 1)) for size in (batch, length, params))
    parts = (_PHASE_DISTANCE * np.asarray(prompt_share, np.float64), *sizes)
    return np.stack(np.broadcast_arrays(*parts), axis=-1)


def band(fitted: Fitted, at: Floats) -> tuple[Floats, Floats]:
    """Return the factors (low, high) between which the errors of nearby published runs are.

    The range includes 1.

    Args:
        fitted: constants with the errors of published runs.
        at: [..., 4] from `coordinates`.
    """
    residuals = fitted.residuals
    distance = ((at[..., None, :] - residuals.coordinates) ** 2).sum(-1)
    nearest = np.argsort(distance, axis=-1, kind="stable")[..., :_NUM_NEAR]
    low, high = np.quantile(residuals.ratios[nearest], _BAND, axis=-1)
    return np.minimum(low, 1.0), np.maximum(high, 1.0)
