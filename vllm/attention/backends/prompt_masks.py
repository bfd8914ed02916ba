"""Compute masks of a padded prefill, for all queries or for a slice of them.

Letters: B requests (rows), Q new tokens of a request, K keys of a request: the padded slots of its
context, then the new tokens. H query heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.sdpa import PromptInputs, SDPAKernel
from vllm.ops.attention_options import AttentionOptions


@dataclass(frozen=True)
class MaskPositions:
    """Positions of queries and keys, from which masks are computed on the device."""

    query_positions: Tensor
    """[B, Q] int32"""
    key_positions: Tensor
    """[B, K] int32; of a key that no query sees, after all queries."""
    ids: tuple[Tensor, Tensor] | None = None
    """[B, Q] and [B, K] int32: the prompt that each query and key belongs to; None: a row is one
    prompt."""
    last_keys: Tensor | None = None
    """[B, Q] int32: position of the last key that each query sees; None: its own."""

    @classmethod
    def of(
        cls,
        query_positions: Tensor,
        key_positions: Tensor,
        later_keys: Tensor,
        ids: tuple[Tensor, Tensor] | None = None,
    ) -> "MaskPositions":
        """Create the positions of a batch.

        Args:
            query_positions: [B, Q]
            key_positions: [B, K]
            later_keys: [B, Q] position of the last key that a query sees, if it is after the query;
                [0, Q]: no query sees a later key.
            ids: prompts of the queries and of the keys, if a row has several.
        """
        last_keys = None
        if later_keys.shape[0]:
            last_keys = torch.where(later_keys > query_positions, later_keys, query_positions)
        return cls(query_positions, key_positions, ids, last_keys)

    def mask(
        self,
        options: AttentionOptions,
        alibi_slopes: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        queries: slice | None = None,
        keys: slice | None = None,
    ) -> Tensor:
        """Return the mask of the keys that queries see. Every query sees at least itself.

        Args:
            options: options of the layers, which define the keys that a query sees.
            alibi_slopes: [H] float32; None without ALiBi.
            dtype: dtype of an ALiBi mask; torch requires the dtype of the queries.
            queries: which of the Q queries; None: all. The default is None, because torch 2.6
                cannot trace an object as the default of a method, if its instance is created in
                traced code.
            keys: which of the K keys; None: all.

        Returns:
            [B, 1, Q, K] bool; with ALiBi [B, H, Q, K] values to add.
        """
        queries = slice(None) if queries is None else queries
        keys = slice(None) if keys is None else keys
        positions = self.query_positions[:, queries, None]
        age = (positions - self.key_positions[:, None, keys])[:, None]  # [B, 1, Q, K]
        mask = age >= 0
        if self.last_keys is not None:
            last_keys = self.last_keys[:, queries, None]
            mask = (self.key_positions[:, None, keys] <= last_keys)[:, None]
        if self.ids is not None:
            query_ids, key_ids = self.ids
            mask = mask & (query_ids[:, queries, None] == key_ids[:, None, keys])[:, None]
        seen = options.sees(age, positions[:, None])
        if seen is not None:
            mask = mask & seen
        if alibi_slopes is None:
            return mask
        bias = -age.float() * alibi_slopes[:, None, None]
        return bias.masked_fill(~mask, float("-inf")).to(dtype)


@dataclass(frozen=True)
class SlicedMask:
    """The mask of a long prefill, computed in each layer for one slice of the queries after
    another.

    So it never needs more memory than [B, 1 or H, slice, K].
    """

    positions: MaskPositions
    num_queries: int
    """Number of queries in a slice; the last one may have fewer."""
    options: AttentionOptions
    """Options of the attention layers."""
    alibi_slopes: Tensor | None

    def attend(self, kernel: SDPAKernel, inputs: PromptInputs) -> Tensor:
        """Compute attention with a kernel that gets one slice of the queries at a time, and only
        the keys that they may see.

        The mask and the lengths of `inputs` are not used.
        """
        query, key, value, _, scale, _ = inputs
        num_queries, num_keys = query.shape[2], key.shape[2]
        parts = []
        for start in range(0, num_queries, self.num_queries):
            end = min(start + self.num_queries, num_queries)
            queries, keys = slice(start, end), self._keys(start, end, num_keys, num_queries)
            mask = self.positions.mask(self.options, self.alibi_slopes, queries=queries, keys=keys)
            given = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
            parts.append(kernel(PromptInputs(*given, mask, scale)))
        return torch.cat(parts, dim=2)

    def _keys(self, start: int, end: int, num_keys: int, num_queries: int) -> slice:
        """Return the keys that the new tokens from `start` to `end` may see.

        These are no keys after them, unless tokens see later ones. With a sliding window, they are
        no keys before the window. If a row has several prompts, any of them may see its context,
        which comes before all tokens.
        """
        reach, num_context = self.options.reach, num_keys - num_queries
        first = start + 1 - (end if reach is None else reach)
        sees_all = first <= 0 or (self.positions.ids is not None and num_context > 0)
        stop = num_context + end if self.positions.last_keys is None else num_keys
        return slice(0 if sees_all else num_context + first, stop)
