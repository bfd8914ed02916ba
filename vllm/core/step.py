"""Keep the data of a step between its scheduling and its result."""

from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec.structs import replace

from vllm.core.pacing.step_time import StepWork
from vllm.messages import IntArray, LogprobRows, ModelRunnerOutput
from vllm.request import Request, RequestStatus


# A frozen dataclass takes more than ten times as long to make, in every step.
class RowTokens(msgspec.Struct, frozen=True):
    """Token counts of the n requests in a step; fields as in `SchedulerOutput`."""

    num_computed: IntArray
    num_scheduled: IntArray
    num_drafts: IntArray | None = None
    num_replayed: IntArray | None = None

    def settled(self) -> tuple[IntArray, IntArray]:
        """Return the begin and the end [n] of the tokens that each request adds to its recurrent
        state.

        A request with drafts adds no token of this step, because a state cannot return to an
        earlier token. Its next step replays the accepted tokens.
        """
        begins, ends = self.num_computed, self.num_computed + self.num_scheduled
        if self.num_replayed is not None:
            begins = begins - self.num_replayed
        if self.num_drafts is not None:
            ends = np.where(self.num_drafts, self.num_computed, ends)
        return begins, ends


class Step(msgspec.Struct, frozen=True):
    """A step in flight. Its lists and arrays have one entry per request that samples a token."""

    step_id: int
    rows: IntArray
    requests: list[Request]
    request_ids: list[str]
    num_tokens: IntArray
    """Tokens of each request, including the sampled tokens of all decodes, and all drafts as if
    they were accepted."""
    num_drafts: IntArray | None
    """Number of drafts of each request; None if no request has drafts."""
    num_decodes: int
    """Number of decodes of each request, as in `SchedulerOutput`."""
    admitted: list[Request]
    """Requests that are admitted for the first time in this step."""
    started_at: float
    """Time when the step was scheduled, in seconds of `time.time()`; 0 without `admitted`."""
    prompt_chunks: dict[int, tuple[Request, int]]
    """row -> request and first position, where a prompt's log-probabilities are wanted."""
    begun_at: float
    """Time when the step was scheduled, by the scheduler's clock."""
    work: StepWork | None
    """Work of the step; None: nobody measures it."""
    removed_rows: dict[int, Request] = msgspec.field(default_factory=dict)
    """Rows whose request has left since, and the request; a row may belong to another request by
    now."""

    @property
    def num_expected(self) -> IntArray | None:
        """Number of tokens of each request that scheduling counted as sampled by this step; None:
        one each.
        """
        if self.num_drafts is not None:
            found: IntArray = self.num_drafts + np.int32(1)
            return found
        if self.num_decodes > 1:
            return np.full(len(self.rows), self.num_decodes, np.int32)
        return None

    def without(self, rows: Iterable[int]) -> tuple["Step", list[int]]:
        """Return the step without the requests at these batch indices, and the indices of the
        remaining entries.
        """
        drop = set(rows)
        keep = [i for i, row in enumerate(self.rows.tolist()) if row not in drop]
        return self.select(keep), keep

    def select(self, indices: list[int]) -> "Step":
        """Return the step with only the entries at these indices."""
        return replace(
            self,
            rows=self.rows[indices],
            requests=[self.requests[i] for i in indices],
            request_ids=[self.request_ids[i] for i in indices],
            num_tokens=self.num_tokens[indices],
            num_drafts=None if self.num_drafts is None else self.num_drafts[indices],
        )

    def has_unsent(self, preempted: Request) -> bool:
        """Tell whether the request sampled tokens before this step that were not sent, because it
        was preempted before their results came.
        """
        if preempted not in self.requests:
            return False  # the step runs a chunk of its prompt, and samples nothing
        index = self.requests.index(preempted)
        expected = self.num_expected
        num_sampled = 1 if expected is None else int(expected[index])
        return int(self.num_tokens[index]) - num_sampled > len(preempted.token_ids)

    def num_cached_tokens(self) -> dict[str, int]:
        """Return the prefix-cache hits of the requests that were admitted in this step and have not
        finished since."""
        return {
            request.request_id: request.num_cached_tokens
            for request in self.admitted
            if request.status is not RequestStatus.FINISHED
        }

    def unsent_prompt_logprobs(self, output: ModelRunnerOutput) -> dict[str, LogprobRows]:
        """Return the prompt log-probabilities that were not sent before. A preempted prompt is
        computed twice.
        """
        unsent = {}
        for row, chunk in output.prompt_logprobs.items():
            request, start = self.prompt_chunks[row]
            sent, end = request.num_prompt_logprobs, start + len(chunk.ranks)
            if row in self.removed_rows or end <= sent:
                continue
            new = slice(sent - start, None)
            request.num_prompt_logprobs = end
            unsent[request.request_id] = LogprobRows(
                token_ids=chunk.token_ids[new], logprobs=chunk.logprobs[new], ranks=chunk.ranks[new]
            )
        return unsent


def select_tokens(
    token_ids: IntArray, counts: IntArray | None, indices: list[int]
) -> tuple[IntArray, IntArray | None]:
    """Select the tokens of some requests of a step.

    Args:
        token_ids: tokens of all requests, one request after another.
        counts: number of tokens of each request; None: one each.
        indices: indices of the wanted requests, ascending.
    """
    if counts is None:
        return token_ids[indices], None
    is_kept = np.zeros(len(counts), np.bool_)
    is_kept[indices] = True
    return token_ids[np.repeat(is_kept, counts)], counts[indices]
