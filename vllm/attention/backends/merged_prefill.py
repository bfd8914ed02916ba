"""Build the metadata of a merged prefill: the prompts of a batch are concatenated into one padded
sequence.

This module handles block tables, lengths and masks. Padded sizes are given, and attention is
computed elsewhere. Only the end of one sequence is padded, instead of the end of every prompt. In
return, each query is compared with the keys of all prompts.

    prompts    5 new tokens after 4 cached ones      2 new tokens           (block size 4)
    sequence   0  0  0  0  0                         1  1                   -1 ...
    position   4  5  6  7  8                         0  1                    0 ...
    context    block 7, of 0, positions 0 to 3                              -1 ...

Letters: P prompts, Q new tokens of all of them, C blocks of context of all of them, S block size, K
= C * S + Q keys. All sizes are padded.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.attention.backends.hpu_metadata import (
    PADDING_GROUP,
    check_tables,
    padding_slots,
    to_tensors,
)
from vllm.attention.backends.packed_fields import Array, packed
from vllm.attention.backends.prompt_masks import MaskPositions
from vllm.messages import NULL_BLOCK_ID, IntArray


@dataclass(frozen=True)
class MergedPrefillMetadata(Generic[Array]):
    """Metadata of P prompts in one sequence. All arrays are int32."""

    sequence_ids: Array = packed("Q")
    """[Q] which prompt each token belongs to; PADDING_GROUP for padding."""
    positions: Array = packed("Q")
    """[Q] position of the token in its prompt, context included; 0 for padding."""
    slot_mapping: Array = packed("Q")
    """[Q] where new keys and values go; slots of padding are in the null block."""
    last_token_indices: Array = packed("P")
    """[P] where in the row each prompt's last new token is; 0 for a padded prompt."""
    context_blocks: Array = packed("C")
    """[C] cached blocks of all prompts, one after another; NULL_BLOCK_ID for padding."""
    context_groups: Array = packed("C")
    """[C] the prompt that each block belongs to; PADDING_GROUP for padding."""
    context_starts: Array = packed("C")
    """[C] position of the first slot of the block in its prompt; 0 for padding."""
    context_usage: Array = packed("C")
    """[C] tokens of the context in the block; 0 for padding."""
    last_keys: Array = packed("F Q")
    """[1, Q] as in `HPUPrefillMetadata`."""

    def to(self, device: torch.device | str) -> "MergedPrefillMetadata[Tensor]":
        """Copy the arrays from the host to the device."""
        return MergedPrefillMetadata(**to_tensors(self, device))


def build_merged_prefill_metadata(
    block_tables: npt.ArrayLike,
    context_lens: npt.ArrayLike,
    query_lens: npt.ArrayLike,
    padded_prompts: int,
    padded_tokens: int,
    padded_context_blocks: int,
    block_size: int,
    last_keys: IntArray | None = None,
) -> MergedPrefillMetadata[IntArray]:
    """Concatenate the prompts of a prefill.

    Args:
        block_tables: [n, max_blocks]; what is after the last block of a prompt is not read.
        context_lens: [n] tokens of each prompt that are in the cache; need not fill whole blocks.
        query_lens: [n] new tokens after them, at least 1.
        padded_prompts: P >= n.
        padded_tokens: Q, at least the sum of `query_lens`.
        padded_context_blocks: C, at least the blocks with context of all prompts.
        block_size: S.
        last_keys: `last_keys` of `HPUPrefillMetadata`; None: F is 0.

    Raises:
        ValueError: a prompt has no new token, or the prompts do not fit the padded sizes or their
            tables.
    """
    tables, contexts, queries = (
        np.asarray(x, np.int32) for x in (block_tables, context_lens, query_lens)
    )
    num_prompts, used = len(queries), -(-contexts // block_size)
    num_tokens, num_context = int(queries.sum()), int(used.sum())
    if (
        num_prompts > padded_prompts
        or num_tokens > padded_tokens
        or num_context > padded_context_blocks
    ):
        raise ValueError(
            f"{num_prompts} prompts with {num_tokens} new tokens and {num_context} context blocks "
            f"do not fit a bucket of {padded_prompts} prompts, {padded_tokens} tokens and "
            f"{padded_context_blocks} context blocks"
        )
    if queries.min(initial=1) < 1:
        raise ValueError("each prompt of a merged prefill needs at least one new token")
    check_tables(tables, contexts + queries, block_size)

    sequence, token = _enumerate(queries)
    position = contexts[sequence] + token
    slots = padding_slots(padded_tokens, block_size)
    slots[:num_tokens] = tables[sequence, position // block_size] * block_size
    slots[:num_tokens] += position % block_size
    group, index = _enumerate(used)
    start = index * np.int32(block_size)
    return MergedPrefillMetadata(
        sequence_ids=_fill(padded_tokens, PADDING_GROUP, sequence),
        positions=_fill(padded_tokens, 0, position),
        slot_mapping=slots,
        last_token_indices=_fill(padded_prompts, 0, np.cumsum(queries, dtype=np.int32) - 1),
        context_blocks=_fill(padded_context_blocks, NULL_BLOCK_ID, tables[group, index]),
        context_groups=_fill(padded_context_blocks, PADDING_GROUP, group),
        context_starts=_fill(padded_context_blocks, 0, start),
        context_usage=_fill(
            padded_context_blocks, 0, np.minimum(contexts[group] - start, block_size)
        ),
        last_keys=np.empty((0, padded_tokens), np.int32) if last_keys is None else last_keys,
    )


def derive_merged_positions(
    metadata: MergedPrefillMetadata[Tensor], block_size: int
) -> MaskPositions:
    """Return the positions from which the masks of a merged prefill are computed.

    The keys are the slots of the context blocks, then the new tokens. Padding only sees padding.
    """
    ids, positions = metadata.sequence_ids, metadata.positions
    key_ids, key_positions = ids, positions
    if metadata.context_blocks.shape[0]:
        is_hidden = is_context_hidden(metadata, block_size)
        context_ids = metadata.context_groups[:, None].masked_fill(is_hidden, PADDING_GROUP)
        slot = torch.arange(block_size, dtype=torch.int32, device=ids.device)
        context_positions = metadata.context_starts[:, None] + slot
        key_ids = torch.cat((context_ids.flatten(), ids))
        key_positions = torch.cat((context_positions.flatten(), positions))
    return MaskPositions.of(
        positions[None], key_positions[None], metadata.last_keys, (ids[None], key_ids[None])
    )


def is_context_hidden(metadata: MergedPrefillMetadata[Tensor], block_size: int) -> Tensor:
    """Return a mask [C, S] of the slots in the context blocks that contain no token of the
    context.
    """
    slot = torch.arange(block_size, dtype=torch.int32, device=metadata.context_usage.device)
    return slot >= metadata.context_usage[:, None]


def _enumerate(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return (owner, index within the owner) of all items, where owner i has `counts[i]` items."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts, dtype=np.int32) - counts
    return owner, np.arange(len(owner), dtype=np.int32) - first[owner]


def _fill(size: int, padding: int, values: IntArray) -> IntArray:
    out = np.full(size, padding, np.int32)
    out[: len(values)] = values
    return out
