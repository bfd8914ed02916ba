"""Applies the sampled tokens of a step to its requests. A request may get one token, several or
none."""

from dataclasses import dataclass, field, replace

import numpy as np

from vllm.core.kv_cache_manager import KVCacheManager
from vllm.core.running_batch import RunningBatch
from vllm.core.step import Step
from vllm.messages import Finished, FinishReason, IntArray, LogprobRows, ModelRunnerOutput
from vllm.utils.ragged import positions_within


@dataclass(slots=True)
class StepResult:
    """The tokens that were appended to the requests of a step, and which requests they ended."""

    request_ids: list[str]
    token_ids: list[int]
    """Request by request."""
    num_tokens: list[int] | None
    """Tokens of each request, at least 1; None: one each."""
    finished: dict[str, Finished]
    """Requests that have ended, by id; they still have rows and blocks."""
    shortened: dict[int, int] = field(default_factory=dict)
    """row -> number of blocks that are left, for rows whose blocks for wrong drafts were freed."""

    def logprobs(self, step: Step, output: ModelRunnerOutput) -> dict[str, LogprobRows]:
        """Log-probabilities of the tokens, by request id."""
        if not output.logprobs:
            return {}
        counts = self.num_tokens or [1] * len(self.request_ids)
        count_of = dict(zip(self.request_ids, counts, strict=True))
        return {
            name: output.logprobs[row].first(count_of[name])
            for row, name in zip(step.rows.tolist(), step.request_ids, strict=True)
            if row in output.logprobs and name in count_of
        }


def apply_tokens(
    step: Step,
    token_ids: IntArray,
    counts: IntArray | None,
    running: RunningBatch,
    cache: KVCacheManager,
) -> StepResult:
    """Append tokens to their requests. Tokens after one that ends its request are dropped.

    Args:
        step: n rows, which belong to the requests that it ran.
        token_ids: of these rows, row by row.
        counts: [n] tokens of each; None: one each, and none had drafts.
        running: has the requests.
        cache: has their blocks.
    """
    if counts is None:
        tokens = token_ids.tolist()
        finished = _append(step, tokens, token_ids, running)
        return StepResult(step.request_ids.copy(), tokens, None, finished)
    shortened = _undo_drafts(step, counts, running, cache)
    # Column by column: the first token of each row, then the second token of rows with two ...
    starts = np.cumsum(counts) - counts
    num_before = step.num_tokens - 1
    if step.num_drafts is not None:
        num_before = num_before - step.num_drafts
    taken, finished = counts.copy(), {}
    for column in range(int(counts.max(initial=0))):
        places = np.flatnonzero(taken > column)
        part = replace(step.select(places.tolist()), num_tokens=num_before[places] + column + 1)
        newest = token_ids[starts[places] + column]
        ended = _append(part, newest.tolist(), newest, running)
        has_ended = [request_id in ended for request_id in part.request_ids]
        taken[places[has_ended]] = column + 1
        finished.update(ended)
    some = np.flatnonzero(taken)
    return StepResult(
        request_ids=[step.request_ids[i] for i in some.tolist()],
        token_ids=token_ids[positions_within(counts) < np.repeat(taken, counts)].tolist(),
        num_tokens=None if (taken[some] == 1).all() else taken[some].tolist(),
        finished=finished,
        shortened=shortened,
    )


def _append(
    step: Step, tokens: list[int], token_ids: IntArray, running: RunningBatch
) -> dict[str, Finished]:
    """Append a token to each request. Returns the requests that end with it, by id."""
    for request, token_id in zip(step.requests, tokens, strict=True):
        request.token_ids.append(token_id)
    rows = step.rows
    is_eos = token_ids == running.eos[rows]
    is_limit = step.num_tokens >= running.limit[rows]
    is_suspect = is_eos | is_limit
    if running.num_with_stop_tokens:
        is_suspect |= running.has_stop_tokens[rows]
    finished: dict[str, Finished] = {}
    for index in is_suspect.nonzero()[0].tolist():
        request, token_id = step.requests[index], tokens[index]
        if is_eos[index]:
            finished[request.request_id] = Finished(FinishReason.STOP)
        elif token_id in request.spec.stop_token_ids:
            finished[request.request_id] = Finished(FinishReason.STOP, token_id)
        elif is_limit[index]:
            finished[request.request_id] = Finished(FinishReason.LENGTH)
    return finished


def _undo_drafts(
    step: Step, counts: IntArray, running: RunningBatch, cache: KVCacheManager
) -> dict[int, int]:
    """Undo the computed tokens and the blocks of wrong drafts. Returns row -> number of blocks that
    are left, where some were freed."""
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
