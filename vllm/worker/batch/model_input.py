"""Builds the tensors of a forward pass from its requests."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm.attention import (
    LaunchContext,
    LaunchParts,
    RaggedMetadata,
    RaggedStates,
    StateCopies,
    StateLaunch,
)
from vllm.messages import IntArray
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch, LaunchInput

NO_PARTS: LaunchParts = {}
"""Inputs of the parts of a forward pass that has none."""


@dataclass(frozen=True, slots=True)
class ModelInput(LaunchInput):
    """Inputs of an unpadded (ragged) forward pass: T tokens of n requests, one after another."""

    input_ids: Tensor
    """[T] int64."""
    context: LaunchContext
    """The launch as the layers see it."""
    logits_indices: Tensor | None
    """int64: indices of the tokens whose logits are sampled from: the newest token of a row and its
    drafts. None: all T."""
    token_type_ids: Tensor | None = None
    """[T] int64; None: all 0."""


def build_ragged_input(
    batch: InputBatch,
    launch: Launch,
    block_size: int,
    device: torch.device,
    parts: LaunchParts = NO_PARTS,
    *,
    has_states: bool = False,
    last_keys: IntArray | None = None,
) -> ModelInput:
    """Build the inputs of a ragged forward pass: the scheduled tokens, request by request.

    Args:
        batch: the running requests.
        launch: the requests of this forward pass.
        block_size: tokens of a block.
        device: device for the tensors.
        parts: what else requests bring, such as adapters or images.
        has_states: whether layers of the model keep recurrent state.
        last_keys: [T] the last key that each token sees; None: its own.
    """
    rows, start, count = launch.rows, launch.num_computed_tokens, launch.num_scheduled_tokens
    seq_lens = start + count
    num_decodes = int((count == 1).sum())
    only_decodes = num_decodes == len(rows)
    if only_decodes:
        token_rows, indices = rows, start
        query_start_loc = np.arange(len(rows) + 1, dtype=np.int32)
    else:
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(count, out=query_start_loc[1:])
        token_rows = np.repeat(rows, count)
        indices = np.repeat(start, count) + positions_within(count)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    groups = []
    for table in batch.block_tables:
        blocks = table[token_rows, indices // block_size].astype(np.int64)
        slots = blocks * block_size + indices % block_size
        of_rows = torch.from_numpy(table[rows, :max_blocks])
        groups.append((torch.from_numpy(slots).to(device), of_rows.to(device)))
    metadata = RaggedMetadata(
        num_decodes=num_decodes,
        slot_mapping=groups[0][0],
        block_tables=groups[0][1],
        seq_lens=torch.from_numpy(seq_lens).to(device),
        query_start_loc=query_start_loc,
        host_seq_lens=seq_lens,
        last_keys=last_keys,
        more_groups=tuple(groups[1:]),
    )
    states = None
    if has_states:
        copies = StateCopies.of_rows(rows, launch.restored_states, launch.kept_states)
        state_launch = StateLaunch(
            rows,
            start,
            query_start_loc,
            num_decodes,
            launch.num_drafts,
            launch.num_replayed_tokens,
            copies,
        )
        states = RaggedStates.build(state_launch, device)
    sampled = np.flatnonzero(seq_lens >= batch.num_tokens[rows]).astype(np.int32)
    all_tokens = only_decodes and len(sampled) == len(rows)
    logits_indices = query_start_loc[1:][sampled].astype(np.int64) - 1
    num_drafts = None if launch.num_drafts is None else launch.num_drafts[sampled]
    if num_drafts is not None:
        sizes = num_drafts + 1
        logits_indices = np.repeat(logits_indices - num_drafts, sizes) + positions_within(sizes)
    positions = torch.from_numpy(indices.astype(np.int64)).to(device)[None]
    context = LaunchContext(attention=metadata, positions=positions, states=states)
    input_ids = batch.token_ids[token_rows, indices].astype(np.int64)
    return ModelInput(
        launch,
        sampled,
        input_ids=torch.from_numpy(input_ids).to(device),
        context=replace(context, **parts) if parts else context,
        logits_indices=None if all_tokens else torch.from_numpy(logits_indices).to(device),
    )
