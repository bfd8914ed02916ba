"""Verification of drafts: counts which of the sampled tokens are output."""

import numpy as np

from vllm.messages import IntArray
from vllm.utils.ragged import positions_within


def count_accepted(host_ids: IntArray, draft_ids: IntArray, num_drafts: IntArray) -> IntArray:
    """Count the output tokens of each request: its accepted drafts plus one sampled token.

    Args:
        host_ids: sampled tokens, 1 + d for a request with d drafts: the token after its newest
            token, after its first draft, and so on; -1 if none could be sampled.
        draft_ids: drafts, d for each request.
        num_drafts: [m] d of each request.

    Returns:
        [m] number of output tokens, at least 1. If a later token cannot be sampled, the output ends
        before it, and the request fails when it runs again.
    """
    sizes = num_drafts + 1
    within = positions_within(sizes)
    has_draft = within < np.repeat(num_drafts, sizes)
    is_end = np.ones(len(host_ids), np.bool_)
    is_end[has_draft] = host_ids[has_draft] != draft_ids
    starts = np.cumsum(sizes) - sizes
    ends = np.minimum.reduceat(np.where(is_end, within, len(host_ids)), starts)
    is_cut = (ends > 0) & (host_ids[starts + ends] < 0)
    return (ends + 1 - is_cut).astype(np.int32)
