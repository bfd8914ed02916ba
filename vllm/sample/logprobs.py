"""Compute log-probabilities of the model's own distribution, before any sampling parameter is
applied.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.messages import IntArray, LogprobRows
from vllm.sample.block_reductions import as_whole_blocks, block_max, split_blocks, top_tokens
from vllm.sample.buffers import Buffers
from vllm.sample.filters import likelihoods
from vllm.sample.metadata import LogprobPlan

_PASS_ELEMENTS = 2**20
"""Number of logits in one pass: temporaries then fit into the cache of a CPU."""


class LogprobTensors(NamedTuple):
    """Log-probabilities of n requests, on the device of the logits; see `LogprobRows`."""

    token_ids: Tensor
    """[n, 1 + k] int32: the given token, then the most likely ones, most likely first."""
    logprobs: Tensor
    """[n, 1 + k] float32"""
    ranks: Tensor
    """[n] int32: rank of the given token; 1 is the most likely."""


def gather_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: int,
    *,
    pass_elements: int | None = _PASS_ELEMENTS,
    buffers: Buffers | None = None,
) -> LogprobTensors:
    """Return log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [n, V] any float dtype, unchanged from the model.
        token_ids: [n] int32 or int64.
        num_logprobs: number k of most likely tokens; at most V are returned.
        pass_elements: number of logits to process at a time; None: all, for a device with static
            shapes.
        buffers: buffers for temporaries, on a CPU; None: new memory.

    Returns:
        Tensors for n requests. The rank is 1 + the number of tokens with a larger logit, so tokens
        that tie have the same rank.
    """
    num_rows, vocab_size = logits.shape
    size = num_rows if pass_elements is None else max(1, pass_elements // vocab_size)
    if num_rows <= size:
        return _gather(logits, token_ids, num_logprobs, buffers)
    parts = [
        _gather(logits[i : i + size], token_ids[i : i + size], num_logprobs, buffers)
        for i in range(0, num_rows, size)
    ]
    return LogprobTensors(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _gather(
    logits: Tensor, token_ids: Tensor, num_logprobs: int, buffers: Buffers | None
) -> LogprobTensors:
    vocab_size = logits.shape[-1]
    x = as_whole_blocks(logits, buffers)
    maxima = block_max(x)
    top = maxima.amax(-1, keepdim=True)
    scratch = None if buffers is None else buffers.get_like("weights", x)
    weights = likelihoods(x, top, None, out=scratch)
    # log(sum(exp(x))) = top + log(sum(exp(x - top)))
    log_total = top + split_blocks(weights).sum(-1).sum(-1, keepdim=True).log()
    given = token_ids[:, None]
    given_logits = x.gather(-1, given.long())
    # Gaudi's compiler does not support `out` here: its comparisons always return bool.
    if scratch is None:
        del weights  # frees memory for the comparison
        is_above = x > given_logits
    else:
        is_above = torch.gt(x, given_logits, out=scratch)
    ranks = split_blocks(is_above).sum(-1, dtype=torch.float32).sum(-1).int() + 1
    if num_logprobs:
        values, indices = top_tokens(x, maxima, min(num_logprobs, vocab_size))
        given = torch.cat([given.int(), indices], -1)
        given_logits = torch.cat([given_logits, values], -1)
    return LogprobTensors(given.int(), given_logits - log_total, ranks)


def split_rows(found: LogprobTensors, rows: IntArray, plan: LogprobPlan) -> dict[int, LogprobRows]:
    """Return the log-probabilities of each request that asked for them, one position for each time
    that it is in the batch.

    Args:
        found: log-probabilities of the requests of `plan`, in this order, or of all. Waits for the
            device.
        rows: [n] batch indices; equal ones are consecutive.
        plan: plan of the batch.
    """
    token_ids, logprobs, ranks = (values.cpu().numpy() for values in found)
    indices = plan.indices if plan.rows is None else np.arange(len(plan.indices))
    wanted = zip(
        rows[plan.indices].tolist(), indices.tolist(), plan.num_logprobs.tolist(), strict=True
    )
    ranges: dict[int, tuple[int, int, int]] = {}
    for row, index, k in wanted:
        first = ranges[row][0] if row in ranges else index
        ranges[row] = first, index + 1, k
    return {
        row: LogprobRows(
            token_ids=token_ids[first:end, : 1 + k],
            logprobs=logprobs[first:end, : 1 + k],
            ranks=ranks[first:end],
        )
        for row, (first, end, k) in ranges.items()
    }
