"""The scheduler: decides which requests run in the next step, and processes its result.

A request is described by the tokens computed so far and the tokens wanted. Prefill, chunked
prefill, prefix hits, decode and the return after preemption are all "schedule n more tokens of this
request".

The next step may be scheduled while a step is in flight. Scheduling therefore counts the tokens of
a step as computed, and the token that it will sample as present, before their values are known.
Drafts are counted as if all were accepted; the result subtracts the rejected ones. Until then, a
request with drafts waits, and so does a request that gets drafts as soon as its tokens are known.
In the same way, a step counts several decodes of a steady batch as done, and its requests wait for
the result, which may have fewer.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from vllm.config import SchedulerConfig
from vllm.core.admission import Admission
from vllm.core.compaction import compact_blocks
from vllm.core.drafting.draft_control import DraftControl
from vllm.core.drafts import DraftPlanner, DraftSource
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.media import EncodeMode, EncoderCache, MediaPlan
from vllm.core.pacing.step_bound import PromptBudget, StepBound, num_pairs
from vllm.core.pacing.step_time import ONLY_DECODES, StepWork
from vllm.core.plan import Plan, share_budget, share_of_step
from vllm.core.preemption import PreemptionPolicy
from vllm.core.request_queue import RequestQueue
from vllm.core.results import apply_tokens
from vllm.core.running_batch import RunningBatch
from vllm.core.state_keeper import StateKeeper
from vllm.core.step import RowTokens, Step, select_tokens
from vllm.core.windows import free_out_of_window_blocks
from vllm.errors import CapacityError, RequestError
from vllm.logger import init_logger
from vllm.messages import (
    DraftStats,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    IntArray,
    MediaStats,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from vllm.request import Request, RequestStatus

logger = init_logger(__name__)

_PREEMPTIONS_PER_WARNING = 50
_NO_ROWS: IntArray = np.empty(0, np.int32)


class Scheduler:
    """Schedules requests: continuous batching, chunked prefill, prefix caching, priorities,
    preemption.

    Running requests go first, so that new prompts never starve a running request. If no block is
    free, the running request with the largest sort key is preempted: its blocks are freed, and it
    is computed again later.

    Args:
        config: limits of a step.
        cache: the KV cache, owned by this scheduler.
        draft_source: guesses next tokens; None: one token per request and step.
        draft_control: limits the drafts of each request; None: only the source limits them.
        num_stages: number of pipeline stages. With several, a request waits for its token, because
            only the last stage has it before the result.
        num_pipelined_steps: number of steps that the stages run at the same time, each with a part
            of the requests.
        media: the embeddings of images; None: requests have none.
        step_bound: limits the time of steps for which running requests wait; None: only the token
            budget limits a step.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        draft_source: DraftSource | None = None,
        draft_control: DraftControl | None = None,
        num_stages: int = 1,
        num_pipelined_steps: int = 1,
        media: EncoderCache | None = None,
        step_bound: StepBound | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.cache = cache
        self.media = media
        self.waiting = RequestQueue()
        self.running = RunningBatch(config.max_num_seqs)
        self.num_preemptions = 0
        self._num_stages, self._num_pipelined_steps = num_stages, num_pipelined_steps
        self._max_decodes = config.num_scheduler_steps
        if draft_source is not None or num_stages > 1:
            self._max_decodes = 1
        self._keeps_together = draft_source is not None and num_stages == 1
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._step_bound, self._clock = step_bound, clock
        self._last_result = 0.0
        """When the newest result came, by the clock."""
        self._in_flight: deque[Step] = deque()
        self._freed_rows: list[int] = []
        self._drafts: DraftPlanner | None = None
        if draft_source is not None:
            self._drafts = DraftPlanner(draft_source, self.running, cache, draft_control)
        self._state_keeper: StateKeeper | None = None
        if cache.states is not None:
            self._state_keeper = StateKeeper(cache.states, cache, self.running)
        self._shortened: dict[int, int] = {}
        """Rows whose block tables have become shorter since the last step, and their new
        lengths."""
        self._preemption = PreemptionPolicy(
            config.scheduling_policy == "priority", self.running, cache
        )
        self._admission = Admission(
            config, self.waiting, self.running, cache, self._preemption, num_pipelined_steps, media
        )

    # ---- requests come and go -------------------------------------------------------------

    def check_request(self, spec: EngineRequest) -> None:
        """Refuse a request that could never run.

        Raises:
            RequestError: its id is in use, or its length is not allowed.
            CapacityError: it would not fit even into an empty KV cache.
        """
        num_prompt, limit = len(spec.prompt_token_ids), spec.max_total_tokens
        if spec.request_id in self._requests:
            raise RequestError(f"request {spec.request_id!r} is already being processed")
        if spec.pooling_params is not None:
            limit -= 1  # the last token is never an input of the model, so it needs no slot
        if not 0 < num_prompt < spec.max_total_tokens or limit > self.config.max_model_len:
            raise RequestError(
                f"the request has {num_prompt} prompt tokens and a limit of {limit} tokens for "
                f"prompt and output: the prompt needs at least 1 token, and the limit must be "
                f"above {num_prompt} and at most max_model_len ({self.config.max_model_len})"
            )
        need = self.cache.num_blocks_for(limit)
        if need > self.cache.pool.num_usable_blocks:
            raise CapacityError(
                f"the request may need {limit} tokens ({need} blocks), but the KV cache has only "
                f"{self.cache.pool.num_usable_blocks} blocks of {self.cache.block_size} tokens. "
                f"Shorten the prompt or lower max_tokens"
            )
        if spec.media and self.media is not None:
            self.media.check(spec)

    def add_request(self, spec: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError, CapacityError: the request can never run; see `check_request`.
        """
        self.check_request(spec)
        arrival, by_priority = next(self._arrivals), self._preemption.by_priority
        key = (spec.priority, spec.arrival_time, arrival) if by_priority else (arrival,)
        request = Request(spec, key)
        request.takes_drafts = self._drafts is not None and spec.may_have_drafts
        self._requests[spec.request_id] = request
        self.waiting.push(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort waiting or running requests; unknown ids are ignored."""
        running = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            if self._drafts is not None:
                self._drafts.leave(request)
            if request.status is RequestStatus.WAITING:
                self.waiting.discard(request)
            else:
                running.append(request)
        if running:
            self._leave(running, RequestStatus.FINISHED)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests)

    # ---- one step -------------------------------------------------------------------------

    @property
    def may_schedule(self) -> bool:
        """Whether a step should be scheduled now; cheap to ask.

        False if `schedule` would find nothing to run: there are no requests, or all wait for a step
        in flight. Also False if a step now would run only the requests that do not wait for their
        drafts, and so would split the batch from then on.
        """
        if self._in_flight and self._keeps_together and self.running.some_await_results:
            return False
        if not self._in_flight or self.waiting:
            return bool(self._requests)
        return not self.running.all_await_results

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        The output has empty `rows` if nothing can run: there are no requests, or the running ones
        wait for a step in flight. An empty step is neither executed nor updated.
        """
        for victim in self._admission.take_preempted():
            self._preempt(victim)
        if self.media is not None:
            self.media.begin_step(self.running.num_computed)
        plan = self._plan_running()
        self.cache.begin_step()
        self._remember_prefills(plan)
        if self.cache.has_windows:
            rows = plan.rows[plan.num_tokens > 0]
            plan.passed_blocks = free_out_of_window_blocks(self.running, self.cache, rows)
        if self._drafts is not None:
            self._drafts.add(plan, self._preemption.num_reserved)
        if self._admission.may_admit:
            if plan.prompt_budget is None:
                plan.prompt_budget = self._prompt_budget()
            self._admission.admit(plan)
        rows, num_scheduled, num_drafts = plan.decodes_first()
        num_computed = self.running.num_computed[rows]
        step_id = next(self._step_ids)
        freed_rows: list[int] = []
        shortened: list[tuple[int, int]] = []
        moves = kept_states = None
        encoded: list[tuple[int, int, int, int]] = []
        dropped: list[str] = []
        num_encoded = 0
        tokens = RowTokens(num_computed, num_scheduled, num_drafts)
        if len(rows):
            if self.media is not None:
                num_encoded = self.media.num_encoded
                encoded, dropped = self.media.take_step()
            if self._drafts is not None:
                tokens = self._drafts.update_settled(rows, tokens)
            if self._state_keeper is not None and plan.num_decodes == 1:
                kept_states = self._state_keeper.keep(rows, tokens)
            has_freed = bool(self._freed_rows or self._shortened)
            moves = compact_blocks(plan, self.running, self.cache, has_freed)
            work = self._work_of(tokens, plan, num_encoded)
            self._launch(step_id, rows, tokens, plan, work)
            freed_rows, self._freed_rows = self._freed_rows, []
            if self._shortened:
                shortened, self._shortened = list(self._shortened.items()), {}
        return SchedulerOutput(
            step_id=step_id,
            freed_rows=freed_rows,
            new_requests=plan.new_requests,
            rows=rows,
            num_computed_tokens=num_computed,
            num_scheduled_tokens=num_scheduled,
            block_rows=plan.block_rows,
            block_ids=np.array(plan.block_ids, np.int32) if plan.block_ids else _NO_ROWS,
            passed_blocks=plan.passed_blocks,
            num_draft_tokens=num_drafts,
            draft_token_ids=plan.drafts_of(rows),
            shortened_tables=shortened,
            block_moves=moves,
            restored_states=_int_array(plan.restored_states),
            kept_states=kept_states,
            dropped_media=dropped,
            encoded_media=encoded,
            num_replayed_tokens=tokens.num_replayed,
            num_decodes=plan.num_decodes,
        )

    def update(self, output: ModelRunnerOutput) -> EngineOutput:
        """Process the result of the oldest step in flight, and return the outputs of its
        requests.
        """
        step = self._in_flight.popleft()
        assert step.step_id == output.step_id, f"step {output.step_id} is out of order"
        now = self._clock()
        # A step that was scheduled ahead begins only when the step before it has ended.
        seconds = now - max(step.begun_at, self._last_result)
        self._last_result = now
        if self._step_bound is not None and step.work is not None:
            self._step_bound.record(step.work, seconds / step.num_decodes)
        if output.pooled:
            return self._finish_pooled(step, output)
        num_cached_tokens = step.num_cached_tokens()
        prompt_logprobs = step.unsent_prompt_logprobs(output)
        finished: dict[str, Finished] = {}
        token_ids, counts = output.token_ids, output.num_tokens
        if counts is None and step.num_expected is not None:
            counts = np.ones(len(step.rows), np.int32)
        if step.removed_rows or output.errors:
            finished = self._finish_failed(step, output.errors)
            step, kept = step.without({*step.removed_rows, *output.errors})
            token_ids, counts = select_tokens(token_ids, counts, kept)
        self.running.awaits_result[step.rows] = False
        if self._drafts is not None:
            self._drafts.record(step, counts, seconds)
        for later in self._in_flight:
            self._mark_waiting(later)
        result = apply_tokens(step, token_ids, counts, self.running, self.cache)
        if result.finished:
            self.abort_requests(result.finished)
            finished.update(result.finished)
        if result.shortened:
            self._shortened.update(result.shortened)
        return EngineOutput(
            request_ids=result.request_ids,
            token_ids=result.token_ids,
            num_tokens=result.num_tokens,
            finished=finished,
            logprobs=result.logprobs(step, output),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
            scheduled_times=dict.fromkeys(num_cached_tokens, step.started_at),
        )

    def stats(self) -> SchedulerStats:
        """Return the numbers of requests, the use of the KV cache, and counters of the
        scheduler.
        """
        pool = self.cache.pool
        num_running = len(self.running)
        return SchedulerStats(
            num_running=num_running,
            num_waiting=len(self._requests) - num_running,
            kv_cache_usage=1 - pool.num_free / pool.num_usable_blocks,
            num_kv_blocks=pool.num_usable_blocks,
            num_prefix_queries=self._admission.num_prefix_queries,
            num_prefix_hits=self._admission.num_prefix_hits,
            num_preemptions=self.num_preemptions,
            drafts=DraftStats() if self._drafts is None else self._drafts.control.stats(),
            media=MediaStats() if self.media is None else self.media.stats(),
        )

    # ---- planning: running requests ----------------------------------------------------------

    def _plan_running(self) -> Plan:
        """Plan tokens for the running requests. Preempts requests until the blocks suffice, but not
        to run several decodes in one step.
        """
        running, size = self.running, self.cache.block_size
        budget = self.config.max_num_batched_tokens
        max_decodes = 1 if self._admission.may_admit else self._max_decodes
        while True:
            rows = running.order
            num_tokens, computed = running.num_tokens[rows], running.num_computed[rows]
            want = num_tokens - computed
            if self._in_flight:
                # A request whose last token is in flight has nothing left to compute.
                want[num_tokens >= running.limit[rows]] = 0
                want[running.awaits_result[rows]] = 0
            want = share_of_step(want, self._num_pipelined_steps)
            only_decodes = len(rows) <= budget and int(want.max(initial=0)) <= 1
            num_tokens, prompt_budget = want, None
            if not only_decodes:
                want = np.minimum(want, self.config.prefill_chunk_limit)
                num_tokens = share_budget(want, budget)
                prompt_budget = self._prompt_budget()
            media = MediaPlan()
            if self.media is not None and (running.num_with_media or self._admission.may_admit):
                self._set_mode(self.media, rows, num_tokens)
            if prompt_budget is not None or running.num_with_media:
                num_tokens = self._limit_prompts(
                    rows, computed, want, num_tokens, prompt_budget, media
                )
                only_decodes = only_decodes and num_tokens is want
            num_decodes = running.num_decodes(rows, max_decodes) if only_decodes else 1
            lack = computed + num_tokens + (num_decodes - 1) - running.capacity[rows]
            short = (lack > 0).nonzero()[0]
            counts = -(-lack[short] // size)
            if not len(short) or counts.sum() * self.cache.num_groups <= self.cache.pool.num_free:
                break
            if num_decodes > 1:
                max_decodes = 1
                continue
            self._warn_of_preemption(running.last)
            self._preempt(running.last)
        if self.media is not None and media.used:
            self.media.commit(media)
        block_rows, block_ids = _NO_ROWS, []
        if len(short):
            running.capacity[rows[short]] += counts * size
            block_rows = np.repeat(rows[short], counts)
            block_ids = self.cache.extend(running.at(block_rows))
        return Plan(
            rows=rows,
            num_tokens=num_tokens,
            budget=budget - int(num_tokens.sum()),
            block_rows=block_rows,
            block_ids=block_ids,
            only_decodes=only_decodes,
            has_idle=bool(self._in_flight) or not only_decodes or self._num_pipelined_steps > 1,
            prompt_budget=prompt_budget,
            num_decodes=num_decodes,
        )

    def _prompt_budget(self) -> PromptBudget | None:
        """Return the time budget for the prompt tokens of this step; None if no running request
        waits for its next token.
        """
        running, rows = self.running, self.running.order
        if (
            self._step_bound is None
            or not (running.num_computed[rows] >= running.num_prompt[rows]).any()
        ):
            return None
        return self._step_bound.budget()

    def _set_mode(self, media: EncoderCache, rows: IntArray, num_tokens: IntArray) -> None:
        """Let this step encode parts of images if running requests wait for their next tokens.

        Args:
            media: decides what this step encodes.
            rows: batch indices of the running requests.
            num_tokens: tokens of each that this step runs if no image prevents it.
        """
        running = self.running
        waits = running.num_computed[rows] >= running.num_prompt[rows]
        waits &= running.num_tokens[rows] < running.limit[rows]
        if not self.config.enable_chunked_prefill or not waits.any():
            media.mode = EncodeMode.WHOLE
        elif num_tokens[waits].any():
            media.mode = EncodeMode.PARTS
        else:
            # Without a step in flight nothing else would run.
            media.mode = EncodeMode.NOTHING if self._in_flight else EncodeMode.WHOLE

    def _limit_prompts(
        self,
        rows: IntArray,
        computed: IntArray,
        want: IntArray,
        num_tokens: IntArray,
        budget: PromptBudget | None,
        plan: MediaPlan,
    ) -> IntArray:
        """Limit the tokens of each request by the time budget of prompts and by images that must be
        encoded first. The requests after it may run what one does not.

        Returns:
            Number of tokens of each request; the same array if nothing is limited.
        """
        has_media = self.running.media_end[rows] > computed
        is_timed = want > 1 if budget is not None else np.zeros_like(has_media)
        found, num_left = num_tokens, 0
        for index in np.flatnonzero(has_media | is_timed | (num_tokens < want)).tolist():
            start, own = int(computed[index]), int(num_tokens[index])
            most = min(own + num_left, int(want[index]))
            count, num_encoded = most, 0
            if budget is not None and is_timed[index]:
                count = budget.most(start, most)
            if has_media[index]:
                assert self.media is not None
                request = self.running.at(rows[index : index + 1])[0]
                count = self.media.with_whole_item(request, start, count, most)
                before = plan.num_encoded
                count = self.media.limit(request, start, count, plan, budget)
                num_encoded = plan.num_encoded - before
            # A prompt that waits for its image leaves the time to the prompts after it.
            if budget is not None and ((is_timed[index] and count) or num_encoded):
                budget.spend(start, count, num_encoded)
            if count != own:
                found = found.copy() if found is num_tokens else found
                found[index] = count
                num_left += own - count
        return found

    def _work_of(self, tokens: RowTokens, plan: Plan, num_encoded: int) -> StepWork | None:
        """Return the work of a step, to which its time is assigned; None if no time is
        measured.
        """
        if self._step_bound is None:
            return None
        if plan.only_decodes and not num_encoded:
            return ONLY_DECODES
        counts = tokens.num_scheduled
        num_new = counts if tokens.num_drafts is None else counts - tokens.num_drafts
        is_prompt = num_new > 1
        prompts = zip(
            tokens.num_computed[is_prompt].tolist(), counts[is_prompt].tolist(), strict=True
        )
        return StepWork(
            num_prompt_tokens=int(counts[is_prompt].sum()),
            num_pairs=sum(num_pairs(start, count) for start, count in prompts),
            has_decodes=not is_prompt.all(),
            num_encoded=num_encoded,
        )

    def _remember_prefills(self, plan: Plan) -> None:
        """Add the blocks that running prompts fill in this step to the prefix cache."""
        if plan.only_decodes or not (several := plan.num_tokens > 1).any():
            return
        rows = plan.rows[several]
        after = self.running.num_computed[rows] + plan.num_tokens[several]
        for request, num_tokens in zip(self.running.at(rows), after.tolist(), strict=True):
            self.cache.cache_blocks(request, num_tokens)

    # ---- booking --------------------------------------------------------------------------

    def _launch(
        self, step_id: int, rows: IntArray, tokens: RowTokens, plan: Plan, work: StepWork | None
    ) -> None:
        """Record a started step: count its tokens as computed, and the tokens that it will sample
        as present.
        """
        running, num_drafts = self.running, tokens.num_drafts
        prompt_chunks = running.prompt_chunks(rows, tokens.num_computed)
        after = tokens.num_computed + tokens.num_scheduled
        if plan.num_decodes > 1:
            after += plan.num_decodes - 1
        running.num_computed[rows] = after
        if not plan.only_decodes:
            samples = after >= running.num_tokens[rows]
            if not samples.all():
                rows, after = rows[samples], after[samples]
                num_drafts = None if num_drafts is None else num_drafts[samples]
        num_tokens = after + 1  # all known tokens are computed, and one more was sampled
        running.num_tokens[rows] = num_tokens
        if self._drafts is not None:
            self._drafts.begin(step_id, tokens, plan)
        requests, request_ids = running.named(rows)
        step = Step(
            step_id=step_id,
            rows=rows,
            requests=requests,
            request_ids=request_ids,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            num_decodes=plan.num_decodes,
            admitted=plan.first_admitted,
            started_at=time.time() if plan.first_admitted else 0.0,
            prompt_chunks=prompt_chunks,
            begun_at=self._clock(),
            work=work,
        )
        self._mark_waiting(step)
        self._in_flight.append(step)

    def _mark_waiting(self, step: Step) -> None:
        """Mark the requests that must wait for the result of a step, because it decides how many
        tokens they get, or the host needs the token itself.
        """
        rows, num_drafts = step.rows, step.num_drafts
        if step.removed_rows:
            stays = ~np.isin(rows, list(step.removed_rows))
            rows = rows[stays]
            num_drafts = None if num_drafts is None else num_drafts[stays]
        if self._num_stages > 1 or step.num_decodes > 1:
            self.running.awaits_result[rows] = True
        elif self._drafts is not None:
            has_drafts = num_drafts is not None
            self.running.awaits_result[rows] = self._drafts.waits(rows, has_drafts=has_drafts)

    # ---- results --------------------------------------------------------------------------

    def _finish_pooled(self, step: Step, output: ModelRunnerOutput) -> EngineOutput:
        """Finish the requests of a pooling model whose prompts are computed."""
        num_cached_tokens = step.num_cached_tokens()
        finished = self._finish_failed(step, output.errors)
        step, _ = step.without({*step.removed_rows, *output.errors})
        names = zip(step.rows.tolist(), step.request_ids, strict=True)
        pooled = {name: output.pooled[row] for row, name in names}
        self.abort_requests(pooled)
        finished.update(dict.fromkeys(pooled, Finished(FinishReason.STOP)))
        return EngineOutput(
            finished=finished,
            num_cached_tokens=num_cached_tokens,
            scheduled_times=dict.fromkeys(num_cached_tokens, step.started_at),
            pooled=pooled,
        )

    def _finish_failed(self, step: Step, errors: dict[int, str]) -> dict[str, Finished]:
        """Finish the requests that failed, and remove their blocks from the prefix cache.

        A request may fail in a step in flight after it was preempted. It is computed again, and
        then fails again, after all of its tokens were sent. But if its own image may have caused
        the failure, it is finished now: requests that share this image would preempt each other for
        ever.
        """
        rows = [row for row in errors if row not in step.removed_rows]
        failed = {request.row: request for request in self.running.at(np.array(rows, np.int32))}
        for row in errors:
            preempted = step.removed_rows.get(row)
            if preempted is not None and preempted.spec.media and not step.has_unsent(preempted):
                failed[row] = preempted
        finished = {
            request.request_id: Finished(FinishReason.ERROR, error=errors[row])
            for row, request in failed.items()
            if request.status is not RequestStatus.FINISHED
        }
        self.abort_requests(finished)
        for request in failed.values():
            for other in self._sharing_images(request):
                step.removed_rows.setdefault(other.row, other)
                self._preempt(other)
                self.cache.uncache_blocks(other)
            self.cache.uncache_blocks(request)
            if self.media is not None:
                self.media.drop(request)
        return finished

    def _sharing_images(self, failed: Request) -> list[Request]:
        """Return the running requests that may share blocks computed from the images of a failed
        request.
        """
        if not failed.spec.media:
            return []
        first = failed.spec.media[0].start // self.cache.block_size
        wrong = set(failed.block_hashes[first:])
        running = self.running.at(self.running.order)
        return [each for each in running if not wrong.isdisjoint(each.block_hashes)]

    # ---- leaving the batch ----------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Preempt a running request: free its row and blocks, and queue it again."""
        self._leave([request], RequestStatus.WAITING)
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.waiting.push(request)

    def _leave(self, requests: list[Request], status: RequestStatus) -> None:
        """Free the batch indices and blocks of running requests. Results of steps in flight are
        ignored for them.
        """
        rows = [request.row for request in requests]
        for request, num_computed in zip(
            requests, self.running.num_computed[rows].tolist(), strict=True
        ):
            # Cache the blocks of the output when the request ends: hashing them all at once is
            # several times cheaper than one by one while decoding fills them.
            num_known = min(num_computed, len(request.token_ids))
            self.cache.cache_blocks(request, num_known)
            if self._state_keeper is not None:
                self._state_keeper.leave(request, num_known)
            if self.media is not None:
                self.media.release(request)
        self._freed_rows += rows
        for step in self._in_flight:
            for request in requests:
                step.removed_rows.setdefault(request.row, request)
        self.running.remove(requests)
        for request in requests:
            request.status = status
            self.cache.free(request)

    def _warn_of_preemption(self, request: Request) -> None:
        if self.num_preemptions % _PREEMPTIONS_PER_WARNING == 0:
            logger.warning(
                "Sequence group %s is preempted by PreemptionMode.RECOMPUTE mode because there is "
                "not enough KV cache space. This can affect the end-to-end performance. Increase "
                "gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory. "
                "total_num_cumulative_preemption=%d",
                request.request_id,
                self.num_preemptions + 1,
            )


def _int_array(numbers: list[tuple[int, int]]) -> IntArray | None:
    return np.array(numbers, np.int32) if numbers else None
