"""Store the running requests as arrays over the batch index, so that a step over all of them takes
a few numpy calls.

A request gets its batch index (row) at admission, and gives it back when it finishes or is
preempted. The model runner uses the same indices for its own arrays.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from vllm.messages import NO_TOKEN, EngineRequest, IntArray
from vllm.request import Request, RequestStatus

_sort_key = attrgetter("sort_key")


class RunningBatch:
    """Stores the running requests by batch index ("row"), with the values that scheduling needs.

    Attributes:
        num_tokens: per row, known tokens plus the tokens that a step in flight will sample.
        num_computed: per row, tokens whose KV is computed by the steps scheduled so far.
        num_settled: per row, computed tokens that its recurrent state includes: all, or those
            before the last step if it had drafts. Unused without a source of drafts.
        capacity: per row, tokens that its blocks can hold.
        limit: per row, number of tokens at which the request ends.
        eos: per row, the token that ends the request, or NO_TOKEN.
        has_stop_tokens: per row, whether tokens other than `eos` also end it.
        num_prompt: per row, tokens of the prompt.
        num_passed: per row, blocks of its tables that sliding windows have passed.
        adapters: key of each adapter in use, and how many requests use it.
        takes_drafts: per row, whether the request may have drafts.
        awaits_result: per row, whether the request must wait for the result of the step in flight.
        media_end: per row, index after the last token that may have to wait for an image; 0: none.
        num_with_media: running requests with images.
        num_prompt_logprobs: running requests that want log-probabilities of their prompt.
        num_with_stop_tokens: running requests with stop tokens other than `eos`.
        num_with_one_decode: running requests that can run only one decode per step.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.num_settled = np.zeros(max_num_seqs, np.int32)
        self.capacity = np.zeros(max_num_seqs, np.int32)
        self.limit = np.zeros(max_num_seqs, np.int32)
        self.eos = np.full(max_num_seqs, NO_TOKEN, np.int32)
        self.has_stop_tokens = np.zeros(max_num_seqs, np.bool_)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.num_passed = np.zeros(max_num_seqs, np.int32)
        self.adapters: Counter[str] = Counter()
        self.takes_drafts = np.zeros(max_num_seqs, np.bool_)
        self.awaits_result = np.zeros(max_num_seqs, np.bool_)
        self.media_end = np.zeros(max_num_seqs, np.int32)
        self.num_with_media = 0
        self.num_prompt_logprobs = 0
        self.num_with_stop_tokens = 0
        self.num_with_one_decode = 0
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._sorted: list[Request] = []
        self._order: IntArray | None = None
        self._full_batch: tuple[IntArray, list[Request], list[str]] = (self.order, [], [])

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def is_full(self) -> bool:
        """Whether no batch index is free."""
        return not self._free_rows

    @property
    def last(self) -> Request:
        """The running request that is preempted first."""
        return self._sorted[-1]

    @property
    def requests(self) -> list[Request]:
        """The running requests, smallest sort_key first (a copy)."""
        return self._sorted.copy()

    @property
    def order(self) -> IntArray:
        """[n] batch indices of the running requests, smallest sort_key first.

        The same array is returned until a request enters or leaves; read-only.
        """
        if self._order is None:
            rows = (request.row for request in self._sorted)
            self._order = np.fromiter(rows, np.int32, len(self._sorted))
        return self._order

    @property
    def some_await_results(self) -> bool:
        """Whether a running request must wait for the result of a step in flight."""
        return bool(self.awaits_result[self.order].any())

    @property
    def all_await_results(self) -> bool:
        """Whether all running requests must wait for the result of a step in flight."""
        return bool(self.awaits_result[self.order].all())

    def at(self, rows: IntArray) -> list[Request]:
        """Return the requests at these batch indices."""
        requests = self._requests
        return [requests[row] for row in rows.tolist()]

    def named(self, rows: IntArray) -> tuple[list[Request], list[str]]:
        """Return the requests at these batch indices, and their ids. The result is cached while the
        same whole batch decodes.
        """
        known_rows, requests, ids = self._full_batch
        if rows is not known_rows:
            requests = self.at(rows)
            ids = [request.request_id for request in requests]
            if rows is self.order:
                self._full_batch = (rows, requests, ids)
        return requests, ids

    def prompt_chunks(
        self, rows: IntArray, num_computed: IntArray
    ) -> dict[int, tuple[Request, int]]:
        """Return the prompt chunks of which log-probabilities are wanted: batch index -> (request,
        first position).
        """
        if not self.num_prompt_logprobs:
            return {}
        in_prompt = num_computed < self.num_prompt[rows]
        requests = self.at(rows[in_prompt])
        return {
            request.row: (request, start)
            for request, start in zip(requests, num_computed[in_prompt].tolist(), strict=True)
            if request.wants_prompt_logprobs
        }

    def has_adapter_slot(
        self, request: Request, passed_over: Sequence[Request], max_loras: int
    ) -> bool:
        """Return whether a waiting request may run now with its LoRA adapter, if it has one.

        While a request waits for a free adapter slot, later requests with adapters also wait, and
        only requests without an adapter overtake it. So it does not wait forever.

        Args:
            request: waiting request.
            passed_over: earlier requests that keep waiting.
            max_loras: number of different adapters that may be in use.
        """
        adapter = request.spec.adapter
        if adapter is None:
            return True
        if any(other.spec.adapter is not None for other in passed_over):
            return False
        return adapter.key in self.adapters or len(self.adapters) < max_loras

    def num_decodes(self, rows: IntArray, most: int) -> int:
        """Return how many decodes of a batch can run one after another before the host is needed: 1
        to `most`.

        Args:
            rows: batch indices of all running requests, each with one token to run.
            most: maximum number, at least 1.
        """
        if most == 1 or self.num_with_one_decode or not len(rows):
            return 1
        num_tokens, num_computed = self.num_tokens[rows], self.num_computed[rows]
        is_decode = (num_tokens - num_computed == 1) & (num_computed >= self.num_prompt[rows])
        if self.awaits_result[rows].any() or not is_decode.all():
            return 1
        # If a request finishes with its next token, the step has a single decode.
        return max(1, min(most, int((self.limit[rows] - num_tokens).min())))

    def add(self, request: Request, num_computed: int, capacity: int) -> None:
        """Give a request a batch index. The caller has checked that one is free."""
        row = self._free_rows.pop()
        request.row = row
        request.status = RequestStatus.RUNNING
        self._requests[row] = request
        spec = request.spec
        self.num_tokens[row] = len(request.token_ids)
        self.num_computed[row] = num_computed
        self.num_settled[row] = num_computed
        self.capacity[row] = capacity
        self.limit[row] = spec.max_total_tokens
        self.eos[row] = NO_TOKEN if spec.eos_token_id is None else spec.eos_token_id
        self.has_stop_tokens[row] = bool(spec.stop_token_ids)
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_passed[row] = 0
        self.takes_drafts[row] = request.takes_drafts
        self.awaits_result[row] = False
        if spec.adapter is not None:
            self.adapters[spec.adapter.key] += 1
        self.media_end[row] = _media_end(spec, num_computed)
        self.num_with_media += bool(spec.media)
        self.num_prompt_logprobs += request.wants_prompt_logprobs
        self.num_with_stop_tokens += bool(spec.stop_token_ids)
        self.num_with_one_decode += not spec.allows_several_decodes
        insort(self._sorted, request, key=_sort_key)
        self._order = None

    def remove(self, requests: Iterable[Request]) -> None:
        """Free the batch indices of requests. The caller sets their status."""
        for request in requests:
            del self._sorted[bisect_left(self._sorted, request.sort_key, key=_sort_key)]
            self._requests[request.row] = None
            self._free_rows.append(request.row)
            if (adapter := request.spec.adapter) is not None:
                self.adapters[adapter.key] -= 1
                self.adapters += Counter()  # removes entries with a count of 0
            self.num_with_media -= bool(request.spec.media)
            self.num_prompt_logprobs -= request.wants_prompt_logprobs
            self.num_with_stop_tokens -= bool(request.spec.stop_token_ids)
            self.num_with_one_decode -= not request.spec.allows_several_decodes
            request.row = -1
        self._order = None


def _media_end(spec: EngineRequest, num_computed: int) -> int:
    """Return the index after the last token that may have to wait for an image; 0 if there is none.

    This is the last token whose embedding comes from an image. Items of cross-attention exist
    before any token of the request runs, so only the first one waits.
    """
    ends = (num_computed + 1 if item.num_states else item.end for item in spec.media)
    return max(ends, default=0)
