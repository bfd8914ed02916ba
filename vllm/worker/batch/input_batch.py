"""The running requests as the runner sees them: arrays by batch index, updated in each step.

The scheduler assigns the batch indices ("rows"). An unused row keeps its old content.
"""

from dataclasses import dataclass

import numpy as np

from vllm.messages import (
    MAX_END_TOKENS,
    NO_TOKEN,
    NULL_BLOCK_ID,
    IntArray,
    NewRequest,
    SchedulerOutput,
)
from vllm.utils.ragged import positions_within


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """The next tokens of m requests, whose values are not known yet.

    Each request has one token, plus up to one for each draft.
    """

    rows: IntArray
    """[m] no row twice."""
    positions: IntArray
    """[m] of the first token of each, if all drafts before it are right."""
    owners: IntArray
    """[m] which request of the row they belong to: the row may have another request when they
    arrive."""
    num_drafts: IntArray | None = None
    """[m] number of drafts of each; None if no row has drafts."""
    draft_ids: IntArray | None = None
    """[sum of `num_drafts`] the drafts, row by row."""


class InputBatch:
    """Tokens and block tables of every request in the batch.

    A row is the batch index of a request.

    Attributes:
        token_ids: [rows, max_model_len] prompt and output tokens.
        num_tokens: [rows] number of known tokens, including tokens that a step in flight samples.
        num_recorded: [rows] number of tokens whose values are known.
        num_prompt_tokens: [rows] number of prompt tokens.
        block_table: [rows, max_blocks] blocks in order of the tokens.
        block_tables: [groups, rows, max_blocks] one table for each group of layers; the first of
            them is `block_table`.
        num_blocks: [rows] number of blocks in the table, the same in every group.
        end_tokens: [rows, MAX_END_TOKENS] tokens that end the request, and NO_TOKEN after them. If
            a request has more, only the first of them.
    """

    # Tokens that a step in flight will sample already count as known, although their values arrive
    # later. Draft tokens count as accepted until `record` subtracts the rejected ones.

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_blocks: int, num_groups: int = 1
    ) -> None:
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_recorded: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.block_tables: IntArray = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self.block_table: IntArray = self.block_tables[0]
        self.num_blocks: IntArray = np.zeros(max_num_seqs, np.int32)
        self.end_tokens: IntArray = np.full((max_num_seqs, MAX_END_TOKENS), NO_TOKEN, np.int32)
        self._owner: IntArray = np.zeros(max_num_seqs, np.int32)
        """Number of requests that each row has had."""

    def update(self, step: SchedulerOutput) -> None:
        """Apply the decisions of the scheduler to the batch.

        Renames moved blocks, adds new requests, shortens and extends block tables, and writes
        drafts after the known tokens.
        """
        if step.block_moves is not None:
            self._rename_blocks(step.block_moves.renamed)
        for row, num_blocks in step.shortened_tables:
            self.num_blocks[row] = num_blocks
        for new in step.new_requests:
            self._place(new)
        if len(step.block_rows):
            self._append_blocks(step.block_rows, step.block_ids)
        for row, group, num_passed in step.passed_blocks:
            self.block_tables[group, row, :num_passed] = NULL_BLOCK_ID
        if step.draft_token_ids is not None:
            self.write_drafts(step, step.draft_token_ids)

    def write_drafts(self, step: SchedulerOutput, token_ids: IntArray) -> None:
        """Write the drafts of a step, [sum of `num_draft_tokens`].

        Must be called before `expect`.
        """
        self.token_ids[self._draft_positions(step)] = token_ids

    def drafts_of(self, step: SchedulerOutput) -> IntArray:
        """Return the drafts of a step, [sum of `num_draft_tokens`].

        Must be called before `expect`.
        """
        return self.token_ids[self._draft_positions(step)]

    def _draft_positions(self, step: SchedulerOutput) -> tuple[IntArray, IntArray]:
        """Return batch index and position of each draft of a step."""
        assert step.num_draft_tokens is not None, "the step has no drafts"
        rows = np.repeat(step.rows, step.num_draft_tokens)
        return rows, self.num_tokens[rows] + positions_within(step.num_draft_tokens)

    def drafts(self, rows: IntArray, num_drafts: IntArray) -> dict[int, list[int]]:
        """Return batch index -> drafts after the known tokens. Must be called before `expect`."""
        starts = self.num_tokens[rows].tolist()
        return {
            row: self.token_ids[row, start : start + count].tolist()
            for row, start, count in zip(rows.tolist(), starts, num_drafts.tolist(), strict=True)
        }

    def expect(self, rows: IntArray, num_drafts: IntArray | None = None) -> ExpectedTokens:
        """Append a token, and one per draft, to requests; `record` fills in the values later.

        Args:
            rows: [m] batch indices of the requests that sample, distinct.
            num_drafts: [m] number of drafts of each; None if no request has drafts.
        """
        first = self.num_tokens[rows]
        self.num_tokens[rows] += 1
        if num_drafts is None:
            return ExpectedTokens(rows, first, self._owner[rows])
        self.num_tokens[rows] += num_drafts
        positions = np.repeat(first, num_drafts) + positions_within(num_drafts)
        drafts = self.token_ids[np.repeat(rows, num_drafts), positions]
        return ExpectedTokens(rows, first, self._owner[rows], num_drafts, drafts)

    def record(
        self, expected: ExpectedTokens, token_ids: IntArray, counts: IntArray | None = None
    ) -> tuple[IntArray, IntArray]:
        """Fill in the values of expected tokens, once they are sampled.

        Args:
            expected: tokens of m requests.
            token_ids: token ids, request by request.
            counts: [m] tokens of each request; None: one each, and none had drafts.

        Returns:
            The batch index of each token, and the tokens; without batch indices that belong to
            another request by now.
        """
        rows = expected.rows
        is_same = self._owner[rows] == expected.owners
        positions = self.num_recorded[rows]
        if counts is None:
            self.num_recorded[rows[is_same]] += 1
        else:
            num_expected = 1 if expected.num_drafts is None else 1 + expected.num_drafts
            self.num_tokens[rows[is_same]] -= (num_expected - counts)[is_same]
            self.num_recorded[rows[is_same]] += counts[is_same]
            rows, is_same = np.repeat(rows, counts), np.repeat(is_same, counts)
            positions = np.repeat(positions, counts) + positions_within(counts)
        if not is_same.all():
            rows, positions, token_ids = rows[is_same], positions[is_same], token_ids[is_same]
        self.token_ids[rows, positions] = token_ids
        return rows, token_ids

    def note_values(self, rows: IntArray) -> None:
        """Mark all known tokens of these requests as recorded: another call wrote tokens and
        values.
        """
        self.num_recorded[rows] = self.num_tokens[rows]

    def ends(self, rows: IntArray, token_ids: IntArray) -> bool:
        """Return whether one of these tokens, one for each request, ends its request."""
        return bool((self.end_tokens[rows] == token_ids[:, None]).any())

    def retract(self, expected: ExpectedTokens, indices: IntArray) -> None:
        """Remove a token of some requests, and the tokens after it.

        Args:
            expected: one token each of m requests, without drafts before them.
            indices: indices into `expected` of the requests.
        """
        rows = expected.rows[indices]
        is_same = self._owner[rows] == expected.owners[indices]
        self.num_tokens[rows[is_same]] = expected.positions[indices][is_same]
        self.num_recorded[rows[is_same]] = expected.positions[indices][is_same]

    def _place(self, new: NewRequest) -> None:
        row, prompt, output = new.row, new.request.prompt_token_ids, new.output_token_ids
        num_prompt, num_tokens = len(prompt), len(prompt) + len(output)
        self.token_ids[row, :num_prompt] = prompt
        self.token_ids[row, num_prompt:num_tokens] = output
        self.num_prompt_tokens[row] = num_prompt
        self.num_tokens[row] = self.num_recorded[row] = num_tokens
        ends = new.request.end_token_ids[:MAX_END_TOKENS]
        self.end_tokens[row] = NO_TOKEN
        self.end_tokens[row, : len(ends)] = ends
        self._owner[row] += 1
        num_groups = len(self.block_tables)
        num_blocks = len(new.block_ids) // num_groups
        tables = np.array(new.block_ids, np.int32).reshape(num_groups, num_blocks)
        self.block_tables[:, row, :num_blocks] = tables
        self.num_blocks[row] = num_blocks

    def _rename_blocks(self, renamed: IntArray) -> None:
        """Replace block ids in the block table of a model with one group: [n, 2] (old, new)."""
        table = self.block_table
        numbers = np.arange(max(int(table.max()), int(renamed.max())) + 1, dtype=np.int32)
        numbers[renamed[:, 0]] = renamed[:, 1]
        np.take(numbers, table, out=table)

    def _append_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """Append blocks to block tables. Entries of the same row must be adjacent and in order."""
        first = np.concatenate(([True], rows[1:] != rows[:-1]))
        starts = np.flatnonzero(first)
        run = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
        of_groups = block_ids.reshape(len(rows), -1).T
        self.block_tables[:, rows, self.num_blocks[rows] + run] = of_groups
        np.add.at(self.num_blocks, rows, 1)
