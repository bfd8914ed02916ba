"""Options of attention layers: properties of their models, such as scale and window.

The torch formulas are here, for all implementations in torch; kernels get the fields.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that a KV cache may have in addition to the dtype of the model."""


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention layer, which never change.

    Raises:
        ValueError: a window, a chunk or a soft cap is not positive.
    """

    scale: float | None = None
    """Multiplies query @ key; None: 1 / sqrt(D)."""
    sliding_window: int | None = None
    """W: a query sees the W most recent keys, its own included; None: all."""
    logits_soft_cap: float | None = None
    """C > 0 replaces each score s by C * tanh(s / C); None does not."""
    chunk_size: int | None = None
    """C: a query at position p sees keys from p // C * C on; None: all."""

    def __post_init__(self) -> None:
        for name in ("sliding_window", "chunk_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1, or None")
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(
                f"logits_soft_cap is {self.logits_soft_cap}; it must be positive, or None"
            )

    def scale_of(self, head_size: int) -> float:
        """Return the factor on query @ key, for heads of this size."""
        return head_size**-0.5 if self.scale is None else self.scale

    @property
    def adjusts_scores(self) -> bool:
        """Whether `adjusted` changes scores (soft cap)."""
        return self.logits_soft_cap is not None

    def adjusted(self, scores: Tensor) -> Tensor:
        """Return scaled scores with the soft cap, before ALiBi and masks are applied."""
        cap = self.logits_soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    @property
    def mask_kind(self) -> tuple[int | None, ...]:
        """The options that decide which keys are visible; layers with equal values can
        share masks.
        """
        return self.sliding_window, self.chunk_size

    @property
    def sees_all(self) -> bool:
        """Whether a query attends to every earlier key."""
        return self.reach is None

    @property
    def reach(self) -> int | None:
        """Largest number of keys that a query may attend to, its own included; None: no limit."""
        window, chunk = self.sliding_window, self.chunk_size
        if window is None or chunk is None:
            return chunk if window is None else window
        return min(window, chunk)

    @property
    def lone_window(self) -> int | None:
        """The sliding window, if no chunks hide earlier keys as well; else None."""
        return self.sliding_window if self.chunk_size is None else None

    @property
    def needs_indices(self) -> bool:
        """Whether `sees` needs the indices of the queries."""
        return self.chunk_size is not None

    def sees(self, age: Tensor, indices: Tensor | None = None) -> Tensor | None:
        """Return which keys a query attends to, of the keys that are not after it.

        Args:
            age: how many tokens a key is before the query, any shape.
            indices: indices of the queries in their requests, broadcast to age; with
                `needs_indices`.

        Returns:
            bool like age; the values for keys after the query have no meaning. None: all keys.
        """
        seen = None if self.sliding_window is None else age < self.sliding_window
        if self.chunk_size is not None:
            assert indices is not None
            in_chunk = age <= indices.remainder(self.chunk_size)
            seen = in_chunk if seen is None else seen & in_chunk
        return seen


PLAIN_ATTENTION = AttentionOptions()
"""The options of most layers."""


class AttentionTensors(NamedTuple):
    """Tensors of a layer that attention operators read, in addition to its KV cache."""

    alibi_slopes: Tensor | None = None
    """[H] float32, dense: each score gets minus the slope of its head times the distance of the key
    (after the soft cap); None without ALiBi."""
    sinks: Tensor | None = None
    """[H] float32, dense: the score of one more key of each head, whose value is zero (after soft
    cap and ALiBi); None without (Xiao et al. 2023, arXiv 2309.17453)."""
    key_scales: Tensor | None = None
    """[G] float32 on the host, dense: multiplies what an fp8 cache holds of each head; None: 1. No
    effect on another cache."""
    value_scales: Tensor | None = None
    """Scales of values, like `key_scales`."""


NO_TENSORS = AttentionTensors()
