"""Apply the sampled tokens of a step to its requests. A request may get one token, several or
none.
"""

from dataclasses import dataclass, field

import numpy as np

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.running_batch import RunningBatch
from vllm.core.step import Step
from vllm.messages import Finished, FinishReason, IntArray, LogprobRows, ModelRunnerOutput
from vllm.utils.ragged import positions_within


@dataclass(slots=True)
class StepResult:
    """Tokens that were appended to the requests of a step, and the requests that these tokens
    finished.
    """

    request_ids: list[str]
    token_ids: list[int]
    """Sampled tokens, one request after the other."""
    num_tokens: list[int] | None
    """Tokens of each request, at least 1; None: one each."""
    finished: dict[str, Finished]
    """Requests that have ended, by id; they still have rows and blocks."""
    shortened: dict[int, int] = field(default_factory=dict)
    """row -> number of blocks that are left, for rows whose blocks for tokens that have not come
    were freed."""

    def logprobs(self, step: Step, output: ModelRunnerOutput) -> dict[str, LogprobRows]:
        """Return the log-probabilities of the new tokens, by request id."""
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
    """Append sampled tokens to their requests. Tokens after one that finishes a request are
    dropped.

    Args:
        step: step with n requests.
        token_ids: new tokens of these requests, one request after another.
        counts: [n] number of tokens of each request; None: one each, as expected.
        running: the running requests.
        cache: the KV cache with their blocks.
    """
    if counts is None:
        tokens = token_ids.tolist()
        for request, token_id in zip(step.requests, tokens, strict=True):
            request.token_ids.append(token_id)
        ends = _ends(step, None, tokens, token_ids, step.num_tokens, running)
        finished = {step.request_ids[token_index]: end for token_index, end in ends}
        return StepResult(step.request_ids.copy(), tokens, None, finished)
    num_expected = step.num_expected
    if num_expected is None:
        num_expected = np.ones_like(counts)
    num_missing = num_expected - counts
    shortened = _take_back(step, num_missing, running, cache)
    within = positions_within(counts)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    num_tokens = (step.num_tokens - num_expected)[owner] + within + 1
    tokens = token_ids.tolist()
    ends = _ends(step, owner, tokens, token_ids, num_tokens, running)
    taken, finished = counts.copy(), {}
    # Reversed, so that the first end of each request overwrites later ones.
    for token_index, end in reversed(ends):
        index = owner[token_index]
        taken[index] = within[token_index] + 1
        finished[step.request_ids[index]] = end
    starts = np.cumsum(counts) - counts
    for request, start, count in zip(step.requests, starts.tolist(), taken.tolist(), strict=True):
        request.token_ids += tokens[start : start + count]
    some = np.flatnonzero(taken)
    if finished:
        tokens = token_ids[within < taken[owner]].tolist()
    return StepResult(
        request_ids=[step.request_ids[i] for i in some.tolist()],
        token_ids=tokens,
        num_tokens=None if (taken[some] == 1).all() else taken[some].tolist(),
        finished=finished,
        shortened=shortened,
    )


def _ends(
    step: Step,
    owner: IntArray | None,
    tokens: list[int],
    token_ids: IntArray,
    num_tokens: IntArray,
    running: RunningBatch,
) -> list[tuple[int, Finished]]:
    """Return the index and the finish reason of each of t tokens that finishes its request, in
    order.

    Args:
        step: step that sampled the tokens.
        owner: [t] index of the request of each token; None: one token per request.
        tokens, token_ids: [t] the tokens, as a list and as an array.
        num_tokens: [t] number of tokens of the request up to and including this one.
        running: has the limits of the requests.
    """
    rows = step.rows if owner is None else step.rows[owner]
    is_eos = token_ids == running.eos[rows]
    is_limit = num_tokens >= running.limit[rows]
    is_suspect = is_eos | is_limit
    if running.num_with_stop_tokens:
        is_suspect |= running.has_stop_tokens[rows]
    ends = []
    for token_index in is_suspect.nonzero()[0].tolist():
        token_id = tokens[token_index]
        request = step.requests[token_index if owner is None else owner[token_index]]
        if is_eos[token_index]:
            ends.append((token_index, Finished(FinishReason.STOP)))
        elif token_id in request.spec.stop_token_ids:
            ends.append((token_index, Finished(FinishReason.STOP, token_id)))
        elif is_limit[token_index]:
            ends.append((token_index, Finished(FinishReason.LENGTH)))
    return ends


def _take_back(
    step: Step, num_missing: IntArray, running: RunningBatch, cache: KVCacheManager
) -> dict[int, int]:
    """Undo the scheduling of tokens that were expected and not sampled: their count and their
    blocks.

    Returns:
        Batch index -> number of blocks that are left, for requests whose blocks were freed.
    """
    rows = step.rows
    running.num_tokens[rows] -= num_missing
    running.num_computed[rows] -= num_missing
    shortened = {}
    for index in np.flatnonzero(num_missing).tolist():
        row = int(rows[index])
        num_blocks = cache.shorten(step.requests[index], int(running.num_tokens[row]))
        if num_blocks is not None:
            running.capacity[row] = num_blocks * cache.block_size
            shortened[row] = num_blocks
    return shortened
