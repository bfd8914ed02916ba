"""What the tokens of a step do to their requests: each may get one, several or none."""

from dataclasses import dataclass, field, replace

import numpy as np

from vllm.core.kv_cache_manager import KVCacheManager
from vllm.core.running_batch import RunningBatch
from vllm.core.step import SampledTokens, Step
from vllm.messages import Finished, FinishReason, IntArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What has become of the requests of a step."""

    tokens: SampledTokens
    """Those that were appended to the requests."""
    finished: dict[str, Finished]
    """Requests whose tokens end them, by id; they still have rows and blocks."""
    shortened: dict[int, int] = field(default_factory=dict)
    """row -> blocks that are left, where blocks of wrong drafts were taken back."""


def take_in(
    step: Step, tokens: SampledTokens, running: RunningBatch, cache: KVCacheManager
) -> StepResult:
    """Append tokens to their requests. What follows a token that ends its request is dropped.

    Args:
        step: its rows belong to the requests that it ran.
        tokens: of these rows.
        running: has the requests.
        cache: has their blocks.
    """
    counts = step.counts(tokens)
    if counts is None:
        return StepResult(tokens, _append(step, tokens.token_ids, running))
    shortened = _take_back(step, counts, running, cache)
    # A column after the other: the first token of each row, the second of those that have two ...
    starts = np.cumsum(counts) - counts
    num_before = step.num_tokens - 1
    if step.num_drafts is not None:
        num_before = num_before - step.num_drafts
    taken = counts.copy()
    finished: dict[str, Finished] = {}
    for column in range(int(counts.max(initial=0))):
        places = np.flatnonzero(taken > column)
        part = replace(step.select(places.tolist()), num_tokens=num_before[places] + column + 1)
        ended = _append(part, tokens.token_ids[starts[places] + column], running)
        has_ended = [request_id in ended for request_id in part.request_ids]
        taken[places[has_ended]] = column + 1
        finished.update(ended)
    kept = SampledTokens(tokens.token_ids, counts).first(taken)
    return StepResult(kept, finished, shortened)


def _append(step: Step, token_ids: IntArray, running: RunningBatch) -> dict[str, Finished]:
    """Append a token to each request; the requests that it ends, by id."""
    for request, token_id in zip(step.requests, token_ids.tolist(), strict=True):
        request.token_ids.append(token_id)
    rows = step.rows
    is_eos = token_ids == running.eos[rows]
    is_limit = step.num_tokens >= running.limit[rows]
    is_suspect = is_eos | is_limit
    if running.num_with_stop_tokens:
        is_suspect |= running.has_stop_tokens[rows]
    finished: dict[str, Finished] = {}
    for index in is_suspect.nonzero()[0].tolist():
        request, token_id = step.requests[index], int(token_ids[index])
        if is_eos[index]:
            finished[request.request_id] = Finished(FinishReason.STOP)
        elif token_id in request.spec.stop_token_ids:
            finished[request.request_id] = Finished(FinishReason.STOP, token_id)
        elif is_limit[index]:
            finished[request.request_id] = Finished(FinishReason.LENGTH)
    return finished


def _take_back(
    step: Step, counts: IntArray, running: RunningBatch, cache: KVCacheManager
) -> dict[int, int]:
    """Undo what was booked for drafts that were wrong, computed tokens and blocks; row -> blocks
    that are left, where some were taken."""
    if step.num_drafts is None:
        assert (counts == 1).all(), "a row without drafts has one token"
        return {}
    rows = step.rows
    rejected = 1 + step.num_drafts - counts
    running.num_tokens[rows] -= rejected
    running.num_computed[rows] -= rejected
    shortened = {}
    for place in np.flatnonzero(rejected).tolist():
        row = int(rows[place])
        num_blocks = cache.shorten(step.requests[place], int(running.num_tokens[row]))
        if num_blocks is not None:
            running.capacity[row] = num_blocks * cache.block_size
            shortened[row] = num_blocks
    return shortened
