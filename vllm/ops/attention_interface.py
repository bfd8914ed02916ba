"""The contract of the attention operators: rotary embedding, the KV cache, and attention to it.

Letters used in shapes: T tokens of one forward pass, B requests, H query heads, G key/value heads
(H is a multiple of G), D head size, N blocks of the cache, S block size. Float tensors of one call
have one dtype unless a line says otherwise. Tokens may be strided (a slice of a packed QKV tensor):
only the dimensions after the first have to be dense.

A position, slot, length or block id out of range raises IndexError if the host can see it (on the
CPU); on a device its effect is undefined.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.ops.attention_options import NO_TENSORS, AttentionOptions, AttentionTensors

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that a KV cache may have in addition to the dtype of the model."""


class AttentionOps(ABC):
    """The attention operators of `Ops`."""

    @abstractmethod
    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Rotate the first rot_dim elements of every head by its token's position.

        May write over query and key (they are usually slices of a packed QKV tensor that is not
        read again); the caller uses only what is returned.

        Args:
            positions: [T], int64, each below the number of angles N. With sections [P, T]; P of 1
                means that all positions of a token are the same.
            query: [T, H, D].
            key: [T, G, D]; None: rotate only queries.
            cos_sin_cache: [N, rot_dim], float32: rot_dim / 2 cosines, then as many sines. They
                are rounded to the dtype of query before use, as Hugging Face models do.
            is_neox: True pairs element i with i + rot_dim / 2 (Llama, NeoX); False pairs
                2 i with 2 i + 1 (GPT-J).
            sections: [rot_dim / 2] int32, which of its positions rotates each pair of a token;
                None: tokens have one position.

        Returns:
            (query, key) with the same shapes and dtypes. Elements from rot_dim on are not changed.

        Raises:
            ValueError: rot_dim is odd or above D, or the numbers of tokens differ.
        """

    @abstractmethod
    def rotary_angles(
        self,
        positions: Tensor,
        cos_sin_cache: Tensor,
        dtype: torch.dtype,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Look up the rotation angles of tokens, for `rotate`; layers with the same table share
        them.

        Args:
            positions: positions; see `rotary_embedding`.
            cos_sin_cache: table of cosines and sines; see `rotary_embedding`.
            dtype: data type of the queries.
            is_neox: layout of the rotated elements; see `rotary_embedding`.
            sections: sections; see `rotary_embedding`.
        """

    @abstractmethod
    def rotate(
        self, query: Tensor, key: Tensor | None, angles: tuple[Tensor, Tensor], is_neox: bool
    ) -> tuple[Tensor, Any]:
        """Rotate like `rotary_embedding`, with angles from `rotary_angles`."""

    @abstractmethod
    def reshape_and_cache(
        self,
        key: Tensor,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor | None,
        slot_mapping: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """Store the keys and values of new tokens in the cache, in place.

        Args:
            key: [T, G, D].
            value: [T, G, D]; None, like value_cache, if values are a part of the keys.
            key_cache: [N, S, G, D], dense. Written. Of the dtype of key, or of a dtype in
                FP8_DTYPES: then it holds key / key_scales, rounded to nearest; values that are too
                large become the largest value, and NaN is kept.
            value_cache: [N, S, G, D], dense, of the dtype of key_cache. Written.
            slot_mapping: [T], int64: block id * S + offset. A negative slot is not written
                (padding). No slot may occur twice.
            key_scales: [G] float32 on the host, dense, one above 0 for each head; None: 1. Has no
                effect on a cache of the dtype of key.
            value_scales: [G], the scales of value_cache.

        Raises:
            ValueError: the shapes or dtypes do not fit each other.
        """

    @abstractmethod
    def paged_attention_decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        options: AttentionOptions,
        tensors: AttentionTensors = NO_TENSORS,
    ) -> Tensor:
        """Compute the attention of one new token per request to all tokens of its request.

        The key and value of the new token are already in the cache; its position is seq_len - 1,
        and it attends to itself. The host never reads a value of a device tensor, so a graph can
        capture this.

        Args:
            query: [B, H, D].
            key_cache: [N, S, G, D], dense, of the dtype of query or of one in FP8_DTYPES.
            value_cache: [N, S, G, V] of the dtype and strides of key_cache, V at most D: a separate
                tensor with V = D, or the first V elements of each key (latent attention).
            block_tables: [B, max_blocks], int32. Entries after the last block of a request are
                never used as content but must be valid block ids (NULL_BLOCK_ID).
            seq_lens: [B], int32, the new token included. 0 marks padding.
            options: options of the layer.
            tensors: tensors of the layer.

        Returns:
            [B, H, V], new and dense, zero for padding. The unused part of a block has no effect,
            even if it contains NaN.

        Raises:
            ValueError: H is not a multiple of G, or shapes or dtypes are wrong.
        """

    @abstractmethod
    def paged_attention_prefill(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        options: AttentionOptions,
        tensors: AttentionTensors = NO_TENSORS,
        last_keys: np.ndarray | None = None,
    ) -> Tensor:
        """Compute the causal attention of several new tokens per request, without padding.

        Request b has the entries query_start_loc[b] to query_start_loc[b + 1] of query. They are
        the LAST tokens of its seq_lens[b] tokens; the ones before them (an earlier chunk, a prefix
        hit) are only in the cache. Keys and values of the new tokens are already in the cache as
        well.

        Args:
            query: [T, H, D].
            key_cache: [N, S, G, D], see `paged_attention_decode`.
            value_cache: [N, S, G, V], see `paged_attention_decode`.
            block_tables: [B, max_blocks], int32.
            query_start_loc: [B + 1], on the host: 0, then the running sum of query lengths.
            seq_lens: [B], on the host: tokens of the context plus new tokens.
            options: options of the layer.
            tensors: tensors of the layer.
            last_keys: [T] int32, on the host: the last key that each query attends to, as an index
                in its request: its own or a later one. A sliding window is counted back from its
                own key in any case. None: its own.

        Returns:
            [T, H, V], new and dense. Entries from query_start_loc[B] on (padding) are zero.

        Raises:
            ValueError: H is not a multiple of G, a request has more new tokens than tokens, a
                table is too short, or a last key is before the own one or not in its request.
        """

    @abstractmethod
    def full_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Compute attention in both directions without a cache, for images or encoders of text.

        Args:
            query: [B, H, N, D].
            key: [B, H, K, D].
            value: [B, H, K, D].
            mask: bool, broadcasts to [B, H, N, K]: which keys a query sees. Every query sees at
                least one. None: all keys.
            scale: multiplies query @ key; None: 1 / sqrt(D).

        Returns:
            [B, H, N, D], dtype of query.
        """
