"""Add draft tokens to a step: proposed next tokens of requests, which one step verifies together.

A step samples a token after each draft. The sampled tokens are the output, up to the first one that
differs from its draft. So a wrong draft costs time and never changes an output.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from vllm.core.drafting.draft_control import DraftControl
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.plan import Plan
from vllm.core.running_batch import RunningBatch
from vllm.core.step import RowTokens, Step
from vllm.messages import BoolArray, IntArray
from vllm.request import Request

_FEW, _PERIOD = 8, 8
"""If there were no drafts in so many steps, they are looked for in one step of so many. In texts
without repetitions, looking for the drafts of a large batch takes a few per cent of a step."""


class DraftSource(Protocol):
    """Guesses the next tokens of requests, for example from their own tokens or with a smaller
    model.
    """

    max_drafts: int
    """Maximum number of drafts per request, at least 1."""

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Propose drafts for each request, in the order of `requests`. A list may be empty.

        Args:
            requests: requests with known tokens. If the worker computes the drafts, tokens in
                flight may be unknown. Only `draft_evidence` may be changed.
        """
        ...

    def leave(self, request: Request) -> None:
        """Drop the data of a request that has finished or was aborted."""
        ...


class DraftPlanner:
    """Asks a source for drafts, and fits them into the budget and the blocks of a step.

    Args:
        source: proposes the drafts.
        running: the running requests.
        cache: provides blocks for the drafts.
        control: limits the drafts of each request; None: only the source limits them.
    """

    def __init__(
        self,
        source: DraftSource,
        running: RunningBatch,
        cache: KVCacheManager,
        control: DraftControl | None = None,
    ) -> None:
        self.control = control or DraftControl(source.max_drafts, adaptive=False)
        self._source = source
        self._running = running
        self._cache = cache
        self._num_fruitless = 0
        """Steps in a row for which nobody had drafts, or nobody was asked."""
        self._is_declined = False
        """The step that is planned has no drafts because they would not pay."""
        self._were_declined = False
        """Whether the last step for which drafts were looked for had none. It also applies to the
        following steps, for which no drafts are looked for."""
        self._started: dict[int, tuple[int, int, bool]] = {}
        """Steps of decodes in flight: step id -> numbers of tokens and rows, and whether some are
        replayed."""

    def add(self, plan: Plan, num_reserved: int) -> None:
        """Add drafts to the decodes of a plan, within the token budget and free blocks that are
        left.

        No request has to wait or is preempted because of drafts.

        Args:
            plan: plan of the running requests; this reduces its budget.
            num_reserved: free blocks that drafts must not use.
        """
        running, rows = self._running, plan.rows
        self._is_declined = self.control.pauses(len(rows))
        if plan.budget <= 0 or self._is_declined:
            return
        num_tokens, num_computed = running.num_tokens[rows], running.num_computed[rows]
        # The last token that a request may have is never an input of the model, so it cannot be a
        # draft.
        room = running.limit[rows] - num_tokens - 1
        is_decode = (num_tokens - num_computed == 1) & (num_computed >= running.num_prompt[rows])
        indices = (
            running.takes_drafts[rows] & is_decode & (plan.num_tokens == 1) & (room > 0)
        ).nonzero()[0]
        if not len(indices):
            return
        self._is_declined = self._were_declined
        if not self._asks():
            return
        known, rooms = num_tokens[indices].tolist(), room[indices].tolist()
        # Requests that have no token in flight.
        free = [
            (request, most)
            for request, count, most in zip(running.at(rows[indices]), known, rooms, strict=True)
            if len(request.token_ids) == count and _is_asked(request)
        ]
        if not free:
            return
        requests = [request for request, _ in free]
        proposed = self._source.propose(requests)
        most_of = [
            min(len(guess), most, self._source.max_drafts)
            for guess, (_, most) in zip(proposed, free, strict=True)
        ]
        self._is_declined = self._were_declined = False
        if not any(most_of):
            return
        limits = self.control.limits(requests, len(rows), most_of)
        self._is_declined = self._were_declined = not any(limits)
        drafts: dict[int, list[int]] = {}
        budget = plan.budget
        for request, guess, limit in zip(requests, proposed, limits, strict=True):
            count = min(limit, budget)
            count = self._take_blocks(request, count, plan, num_reserved)
            if count > 0:
                request.num_undrafted = 0
                drafts[request.row] = list(guess[:count])
                budget -= count
        if drafts:
            self._num_fruitless = 0
        plan.add_drafts(drafts)

    def _asks(self) -> bool:
        """Return whether to look for drafts in this step, and count the step as one without drafts.

        After steps without drafts, the search becomes rarer.
        """
        self._num_fruitless += 1
        return _is_due(self._num_fruitless)

    def waits(self, rows: IntArray, *, has_drafts: bool) -> BoolArray:
        """Return for each request of a step whether it must wait for the result before it runs
        again.

        It must wait if it has drafts, which may be rejected, or if new drafts may follow. While
        there are no drafts, steps may run ahead.

        Args:
            rows: [n] batch indices of the requests.
            has_drafts: whether some of them have drafts in the step.
        """
        if not has_drafts:
            asks_next = _is_due(self._num_fruitless + 1)
            if not asks_next or self.control.pauses(len(self._running)):
                return np.zeros(len(rows), np.bool_)
        waits: BoolArray = self._running.takes_drafts[rows]
        return waits

    def update_settled(self, rows: IntArray, tokens: RowTokens) -> RowTokens:
        """Record which tokens the recurrent states have taken in after a step.

        Args:
            rows: [n] batch indices of the requests in the step.
            tokens: tokens of each request.

        Returns:
            `tokens`, with the number of replayed tokens if there are any.
        """
        settled = self._running.num_settled
        replayed: IntArray = tokens.num_computed - settled[rows]
        _, settled[rows] = tokens.settled()
        return replace(tokens, num_replayed=replayed) if replayed.any() else tokens

    def begin(self, step_id: int, tokens: RowTokens, plan: Plan) -> None:
        """Note the numbers of tokens and requests of a step that starts, to measure its time.

        Args:
            step_id: id of the step.
            tokens: tokens of each request of the step.
            plan: plan of the step.
        """
        num_rows, total = len(tokens.num_scheduled), int(tokens.num_scheduled.sum())
        if total == num_rows + sum(map(len, plan.drafts.values())):
            has_replays = tokens.num_replayed is not None
            self._started[step_id] = total, num_rows, has_replays
            self.control.num_declined_steps += self._is_declined

    def record(self, step: Step, counts: IntArray | None, seconds: float) -> None:
        """Record the accepted drafts of a finished step and its time.

        Args:
            step: finished step with n requests.
            counts: [n] new tokens of each request; None: one each, and no request had drafts.
            seconds: time that the step took.
        """
        num_tokens, num_rows, has_replays = self._started.pop(step.step_id, (0, 0, False))
        if num_tokens:
            self.control.record_time(num_tokens, num_rows, seconds, has_replays=has_replays)
        if counts is not None and step.num_drafts is not None:
            self.control.record(step.requests, step.num_drafts, counts)

    def leave(self, request: Request) -> None:
        """Tell the source of drafts that a request has finished."""
        self._source.leave(request)

    def _take_blocks(self, request: Request, count: int, plan: Plan, num_reserved: int) -> int:
        """Extend the block tables of a request for drafts.

        Returns:
            The number of drafts that fit.
        """
        cache, row = self._cache, request.row
        num_known = int(self._running.num_tokens[row])
        num_spare = max(0, cache.pool.num_free - num_reserved) // cache.num_groups
        num_blocks = len(request.block_ids)
        count = min(count, (num_blocks + num_spare) * cache.block_size - num_known)
        if count <= 0:
            return 0
        num_new = -(-(num_known + count) // cache.block_size) - num_blocks
        if num_new > 0:
            plan.add_blocks(row, num_new, cache.extend([request] * num_new))
            self._running.capacity[row] += num_new * cache.block_size
        return count


def _is_asked(request: Request) -> bool:
    """Return whether to look for drafts of this request now. Counts its steps without drafts,
    because the search becomes rarer after failures.
    """
    request.num_undrafted += 1
    return _is_due(request.num_undrafted)


def _is_due(count: int) -> bool:
    return count <= _FEW or count % _PERIOD == 0
