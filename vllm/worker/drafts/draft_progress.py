"""Tracks which tokens of the requests have keys and values of the draft model.

The draft model stores its keys and values in the same blocks as the model, in separate tensors. It
computes prompts together with the model, but outputs only for requests that get drafts. So this
module stores, for each block, how many of its tokens the draft model has computed. Then the missing
tokens of a request whose prefix is in shared blocks are known.
"""

from dataclasses import dataclass

import numpy as np

from vllm.messages import BoolArray, IntArray, SchedulerOutput
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class DraftSpans:
    """Known tokens of n requests that the draft model runs before it makes drafts."""

    rows: IntArray
    """[n]"""
    first: IntArray
    """[n] position of the first token to run."""
    count: IntArray
    """[n] tokens to run, at least 1."""
    num_drafts: IntArray
    """[n] number of drafts to make after them; 0 for prompts."""
    num_known: IntArray
    """[n] number of tokens of the request, with the tokens that a step in flight samples."""

    @classmethod
    def of(
        cls, step: SchedulerOutput, chosen: BoolArray, first: IntArray, count: IntArray
    ) -> "DraftSpans":
        """Select some requests of a step, with the spans of tokens to run."""
        num_drafts = _num_drafts(step)
        num_known = step.num_computed_tokens + step.num_scheduled_tokens - num_drafts
        return cls(
            rows=step.rows[chosen],
            first=first,
            count=count,
            num_drafts=num_drafts[chosen],
            num_known=num_known[chosen],
        )


def _num_drafts(step: SchedulerOutput) -> IntArray:
    counts = step.num_draft_tokens
    return np.zeros_like(step.rows) if counts is None else counts


class NewestTokens:
    """Plans the tokens of a speculator without attention: only the newest token of each request."""

    def plan(self, step: SchedulerOutput) -> DraftSpans | None:
        """Return the newest token of each request with drafts; None if no request has drafts."""
        if step.num_draft_tokens is None:
            return None
        has_drafts = step.num_draft_tokens > 0
        first = step.num_computed_tokens[has_drafts] - 1
        return DraftSpans.of(step, has_drafts, first, np.ones_like(first))

    def add_drafts(self, spans: DraftSpans) -> None:
        """Do nothing: a speculator without attention stores no data of drafts."""


class DraftProgress:
    """Tracks which tokens the draft model has computed, over the steps.

    Args:
        batch: the running requests and their block tables.
        block_size: tokens of a block.
        num_blocks: number of blocks of the KV cache.
        max_model_len: tokens that the draft model can process.
        reads_states: whether drafts come from a speculator, which needs with each token the next
            one and a hidden state of the model. So it computes tokens one step after the model, and
            accepted drafts again.
    """

    def __init__(
        self,
        batch: InputBatch,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        *,
        reads_states: bool = False,
    ) -> None:
        self._reads_states = reads_states
        self._batch = batch
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._num_tokens: IntArray = np.zeros(len(batch.num_tokens), np.int32)
        """[rows] leading tokens that the draft model has computed."""
        self._in_block: IntArray = np.zeros(num_blocks, np.int32)
        """[blocks] leading tokens of the block that the draft model has computed."""
        self._had_drafts = np.zeros(len(batch.num_tokens), np.bool_)
        """[rows] whether some of the computed tokens may be drafts that were wrong."""
        self._unknown: set[int] = set()
        """Rows of new requests that have not run yet."""

    def plan(self, step: SchedulerOutput) -> DraftSpans | None:
        """Plan the tokens that the draft model runs in a step; they count as computed from now on.

        These are prompts, together with the model, and missing tokens of requests with drafts.

        Args:
            step: the step; the batch must be updated with it already.

        Returns:
            None: there is nothing to run.
        """
        rows, start = step.rows, step.num_computed_tokens
        self._in_block[step.block_ids] = 0
        if (
            step.num_draft_tokens is None
            and not self._had_drafts[rows].any()
            and (step.num_scheduled_tokens == 1).all()
            and not step.new_requests
            and not self._unknown
        ):
            return None
        num_drafts = _num_drafts(step)
        end = start.copy()
        if not self._reads_states:
            end += step.num_scheduled_tokens - num_drafts
        self._had_drafts[rows] = num_drafts > 0
        # Tokens from `start` on are new, or replace rejected draft tokens.
        self._forget(rows, start, step.num_scheduled_tokens)
        known = np.maximum(start - 1, 0) if self._reads_states else start
        self._num_tokens[rows] = np.minimum(self._num_tokens[rows], known)
        end = np.minimum(end, self._max_model_len)
        runs = (num_drafts > 0) | (step.num_scheduled_tokens - num_drafts > 1)
        is_new = np.zeros(len(rows), np.bool_)
        self._unknown.update(new.row for new in step.new_requests)
        if self._unknown:
            is_new = np.isin(rows, list(self._unknown))
            self._unknown.difference_update(rows.tolist())
        first = self._num_tokens[rows]
        decodes = runs & (num_drafts > 0)
        self._note(rows[decodes], first[decodes], end[decodes])
        # One at a time: a prompt may share blocks that an earlier prompt of this step computes.
        for index in np.flatnonzero((runs & ~decodes) | is_new).tolist():
            if is_new[index]:
                first[index] = self._find(int(rows[index]), int(start[index]))
                # The last cached token was computed with a different next token.
                if self._reads_states:
                    first[index] = max(0, first[index] - 1)
                self._num_tokens[rows[index]] = first[index]
            if runs[index]:
                one = slice(index, index + 1)
                self._note(rows[one], first[one], end[one])
        runs &= end > first
        if not runs.any():
            return None
        return DraftSpans.of(step, runs, first[runs], (end - first)[runs])

    def add_drafts(self, spans: DraftSpans) -> None:
        """Note that drafts were computed; the last draft of each request was sampled, but
        not run.
        """
        has = spans.num_drafts > 1
        first = (spans.first + spans.count)[has]
        self._note(spans.rows[has], first, first + spans.num_drafts[has] - 1)

    def _find(self, row: int, num_tokens: int) -> int:
        """Count how many leading tokens of a new request the draft model has computed.

        Only the first `num_tokens` tokens, whose blocks are shared, are counted.
        """
        size = self._block_size
        computed = self._in_block[self._batch.block_table[row, : -(-num_tokens // size)]]
        lacking = np.flatnonzero(computed < size)
        if not len(lacking):
            return min(num_tokens, self._max_model_len)
        found = int(lacking[0]) * size + int(computed[lacking[0]])
        return min(found, num_tokens)

    def _forget(self, rows: IntArray, start: IntArray, count: IntArray) -> None:
        """Mark these slots as not computed, because the model writes other tokens to them."""
        blocks, offsets = self._slots(rows, start, count)
        np.minimum.at(self._in_block, blocks, offsets)

    def _note(self, rows: IntArray, first: IntArray, end: IntArray) -> None:
        """Mark the tokens from `first` up to `end` of each request as computed by the
        draft model.
        """
        blocks, offsets = self._slots(rows, first, np.maximum(end - first, 0))
        self._in_block[blocks] = offsets + 1
        self._num_tokens[rows] = np.maximum(first, end)

    def _slots(self, rows: IntArray, first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
        """Return block and offset of each token, request by request."""
        positions = np.repeat(first, count) + positions_within(count)
        blocks = self._batch.block_table[np.repeat(rows, count), positions // self._block_size]
        return blocks, positions % self._block_size
