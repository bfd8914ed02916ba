"""Describe a step that is being planned: the requests that run, and the tokens of each, within one
token budget.
"""

import msgspec
import numpy as np

from vllm.core.pacing.step_bound import PromptBudget
from vllm.messages import IntArray, NewRequest
from vllm.request import Request


class Plan(msgspec.Struct):
    """Batch indices and token counts of the requests that run in a step. Admission adds
    requests.
    """

    rows: IntArray
    num_tokens: IntArray
    """Tokens of each row to run; 0 if the budget was used up before the row, or if its image is not
    encoded yet."""
    budget: int
    """Tokens that the step may still run."""
    block_rows: IntArray
    """Running rows that get one more block each, and the blocks. The entries of a row are
    adjacent."""
    block_ids: list[int]
    only_decodes: bool
    """Every row runs one token, the only one that is not computed. Becomes False when a request is
    admitted."""
    has_idle: bool
    """Whether some of `num_tokens` may be 0."""
    prompt_budget: PromptBudget | None = None
    """Prompt tokens that the step may still run within its time; None: as many as `budget`."""
    new_requests: list[NewRequest] = msgspec.field(default_factory=list)
    passed_blocks: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    """Blocks that windows have passed, as in `SchedulerOutput`."""
    first_admitted: list[Request] = msgspec.field(default_factory=list)
    """Admitted requests that were never admitted before."""
    restored_states: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Requests that begin with a kept recurrent state, as in `SchedulerOutput`."""
    num_decodes: int = 1
    """Number of decodes of each request, as in `SchedulerOutput`."""
    drafts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """row -> guesses of the next tokens of its request, which `num_tokens` includes."""
    num_drafts: IntArray | None = None
    """Number of drafts of each request. None: no request has any."""

    def add_blocks(self, row: int, count: int, block_ids: list[int]) -> None:
        """Append `count` new blocks per group to a running request, after the blocks that the plan
        already gives it.
        """
        size = len(block_ids) // count
        own = np.flatnonzero(self.block_rows == row)
        end = int(own[-1]) + 1 if len(own) else len(self.block_rows)
        new_rows = np.full(count, row, np.int32)
        self.block_rows = np.concatenate([self.block_rows[:end], new_rows, self.block_rows[end:]])
        self.block_ids = self.block_ids[: end * size] + block_ids + self.block_ids[end * size :]

    def add_drafts(self, drafts: dict[int, list[int]]) -> None:
        """Add drafts to requests that run one token each."""
        if not drafts:
            return
        counts = np.array([len(drafts.get(row, ())) for row in self.rows.tolist()], np.int32)
        self.num_tokens = self.num_tokens + counts
        self.budget -= int(counts.sum())
        self.drafts, self.num_drafts = drafts, counts
        self.only_decodes = False

    def drafts_of(self, rows: IntArray) -> IntArray | None:
        """Return the drafts of the given requests, concatenated; None if no request of the step has
        drafts."""
        if not self.drafts:
            return None
        drafts = [token for row in rows.tolist() for token in self.drafts.get(row, ())]
        return np.array(drafts, np.int32)

    def add_rows(self, rows: list[int], num_tokens: list[int]) -> None:
        """Append requests to the plan. The caller has already subtracted their tokens from the
        budget.
        """
        self.rows = np.concatenate([self.rows, np.array(rows, np.int32)])
        self.num_tokens = np.concatenate([self.num_tokens, np.array(num_tokens, np.int32)])
        if self.num_drafts is not None:
            self.num_drafts = np.concatenate([self.num_drafts, np.zeros(len(rows), np.int32)])
        self.only_decodes = False
        self.has_idle |= 0 in num_tokens

    def decodes_first(self) -> tuple[IntArray, IntArray, IntArray | None]:
        """Return the batch indices of the requests with tokens to run, their token counts, and
        their draft counts if there are any.

        Requests with one token are first, then requests with drafts, then the others.
        """
        rows, num_tokens, num_drafts = self.rows, self.num_tokens, self.num_drafts
        if self.has_idle and not (runs := num_tokens > 0).all():
            rows, num_tokens = rows[runs], num_tokens[runs]
            num_drafts = None if num_drafts is None else num_drafts[runs]
        if self.only_decodes:
            return rows, num_tokens, num_drafts
        if num_drafts is not None and num_drafts.all():
            return rows, num_tokens, num_drafts
        several = num_tokens > 1
        if several.any():
            group = several.astype(np.int8)
            if num_drafts is not None:
                group[several & (num_drafts == 0)] = 2
            order = np.argsort(group, kind="stable")
            rows, num_tokens = rows[order], num_tokens[order]
            num_drafts = None if num_drafts is None else num_drafts[order]
        return rows, num_tokens, num_drafts


def share_budget(want: IntArray, budget: int) -> IntArray:
    """Divide the token budget: requests that want one token first, then the others in order.

    >>> share_budget(np.array([5, 1, 4, 1], np.int32), 8).tolist()
    [5, 1, 1, 1]
    """
    if want.sum() <= budget:
        return want
    order = np.argsort(want > 1, kind="stable")
    ordered = want[order]
    before = np.cumsum(ordered) - ordered
    num_tokens = np.empty_like(want)
    num_tokens[order] = np.clip(budget - before, 0, ordered)
    return num_tokens


def share_of_step(want: IntArray, num_steps: int) -> IntArray:
    """Return the token counts of one pipeline step. Each step gets an equal part of the decodes.

    Several steps run in the stages of the pipeline at the same time; equal parts keep all stages
    busy.

    >>> share_of_step(np.array([1, 0, 9, 1, 1], np.int32), 2).tolist()
    [1, 0, 9, 1, 1]
    >>> share_of_step(np.array([1, 1, 1, 1], np.int32), 2).tolist()
    [1, 1, 0, 0]
    """
    if num_steps == 1:
        return want
    most = -(-len(want) // num_steps)
    excess = np.flatnonzero(want == 1)[most:]
    if len(excess):
        want = want.copy()
        want[excess] = 0
    return want
