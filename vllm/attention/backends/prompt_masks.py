"""Masks of a padded prefill, for all queries or for a slice of them.

Letters: B rows, Q new tokens of a row, K keys of a row: the padded slots of its context, then the
new tokens. H query heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.sdpa import SDPAKernel
from vllm.ops.attention_options import AttentionOptions


@dataclass(frozen=True)
class Sight:
    """Positions of queries and keys, of which masks are derived on the device."""

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
    ) -> "Sight":
        """Return the sight of a launch.

        Args:
            query_positions: [B, Q]
            key_positions: [B, K]
            later_keys: [B, Q] the last key that a query sees where it is after its own; [0, Q]: no
                query sees a later key.
            ids: as above.
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
        """Return what queries see of keys. A query has the age 0 to itself, so that every query
        sees something.

        Args:
            options: of layers; which keys a query sees is used.
            alibi_slopes: [H] float32; None without ALiBi.
            dtype: of an ALiBi mask: the dtype of the queries, as torch wants it.
            queries: which of the Q; None: all. Defaults are no objects here: torch 2.6 cannot trace
                such a default of a method, if its instance is made in what it traces.
            keys: which of the K; None: all.

        Returns:
            [B, 1, Q, K] bool; with ALiBi [B, H, Q, K] to be added.
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
    """The mask of a long prefill. It is derived for one slice of the queries after the other, in
    each layer, so that there is never more of it than [B, 1 or H, slice, K]."""

    sight: Sight
    num_queries: int
    """Of a slice; the last one may have fewer."""
    options: AttentionOptions
    """Of the layers."""
    alibi_slopes: Tensor | None

    def attend(
        self,
        kernel: SDPAKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        valid_lens: Tensor | None,
    ) -> Tensor:
        """Attend as `SDPAKernel`, with a kernel that gets a slice of the queries at a time, and
        only the keys that they may see. The mask and lengths that are given are not used."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        parts = []
        for start in range(0, num_queries, self.num_queries):
            end = min(start + self.num_queries, num_queries)
            queries, keys = slice(start, end), self._keys(start, end, num_keys, num_queries)
            mask = self.sight.mask(self.options, self.alibi_slopes, queries=queries, keys=keys)
            given = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
            parts.append(kernel(*given, mask, scale, None))
        return torch.cat(parts, dim=2)

    def _keys(self, start: int, end: int, num_keys: int, num_queries: int) -> slice:
        """Return the keys that the new tokens from `start` to `end` may see: none after them,
        unless tokens see later ones, and where they see only a number of recent tokens, none before
        these.
        Any of several prompts in a row may see its context, which comes before the tokens of all of
        them."""
        reach, num_context = self.options.reach, num_keys - num_queries
        first = start + 1 - (end if reach is None else reach)
        sees_all = first <= 0 or (self.sight.ids is not None and num_context > 0)
        stop = num_context + end if self.sight.last_keys is None else num_keys
        return slice(0 if sees_all else num_context + first, stop)
