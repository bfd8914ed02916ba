"""Choose the waiting requests that a step admits to the running batch."""

from vllm.config import SchedulerConfig
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.media import EncoderCache, MediaPlan
from vllm.core.plan import Plan
from vllm.core.preemption import PreemptionPolicy
from vllm.core.request_queue import RequestQueue
from vllm.core.running_batch import RunningBatch
from vllm.messages import NewRequest
from vllm.request import Request

_MAX_PASSED_OVER = 16
"""Maximum number of waiting requests that a step may skip to find one that can begin: long prompts,
and requests whose adapter has no slot."""


class Admission:
    """Moves requests from the queue to the running batch.

    First come, first served: a request that lacks a batch index, blocks or tokens also holds up the
    requests after it.

    Args:
        config: limits of a step.
        waiting: the queue.
        running: the running requests.
        cache: the KV cache.
        preemption: decides whether a request fits, and which requests are preempted for it.
        num_pipelined_steps: number of steps that run at the same time.
        media: the embeddings of images; None: requests have no images.

    Attributes:
        num_prefix_queries: tokens of all admitted requests, each counted once.
        num_prefix_hits: how many of these tokens were in the prefix cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: RequestQueue,
        running: RunningBatch,
        cache: KVCacheManager,
        preemption: PreemptionPolicy,
        num_pipelined_steps: int,
        media: EncoderCache | None,
    ) -> None:
        self._media = media
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._config = config
        self._waiting = waiting
        self._running = running
        self._cache = cache
        self._preemption = preemption
        self._max_pooled = -(-config.max_num_seqs // num_pipelined_steps)
        """Number of requests of a pooling model that a step admits, its part of the batch."""
        self._lacks_room: Request | None = None
        """The request that could not be admitted because no batch index or too few blocks are free;
        it may preempt others."""

    @property
    def may_admit(self) -> bool:
        """Whether a request waits and a batch index is free for it."""
        return bool(self._waiting) and self._preemption.has_row_for(self._waiting.peek())

    def take_preempted(self) -> list[Request]:
        """Return the running requests to preempt for the waiting request that did not fit in the
        last step.
        """
        request, self._lacks_room = self._lacks_room, None
        return [] if request is None else self._preemption.select_preempted(request)

    def admit(self, plan: Plan) -> None:
        """Admit waiting requests while batch indices, blocks and tokens are available."""
        config, preemption, running, waiting = (
            self._config,
            self._preemption,
            self._running,
            self._waiting,
        )
        chunk_limit = config.prefill_chunk_limit
        num_partial, num_long = self._count_partial(plan, chunk_limit)
        counts: list[int] = []
        passed_over: list[Request] = []
        while waiting and plan.budget:
            request = waiting.peek()
            if not preemption.has_row_for(request):
                break
            if request.spec.pooling_params is not None and len(counts) == self._max_pooled:
                break
            if passed_over and preemption.has_higher_priority(passed_over[0], request):
                break
            if not running.has_adapter_slot(request, passed_over, config.max_loras):
                if len(passed_over) == _MAX_PASSED_OVER:
                    break
                passed_over.append(waiting.pop())
                continue
            shared = self._cache.find_prefix(request)
            want = len(request.token_ids) - self._cache.num_tokens_in(shared)
            start = len(request.token_ids) - want
            most = num_tokens = min(want, plan.budget, chunk_limit)
            if plan.prompt_budget is not None:
                num_tokens = plan.prompt_budget.most(start, most)
            media = MediaPlan()
            if request.spec.media and self._media is not None:
                num_tokens = self._media.with_whole_item(request, start, num_tokens, most)
                num_tokens = self._media.limit(
                    request, start, num_tokens, media, plan.prompt_budget
                )
            if not num_tokens and not media.parts:
                break
            is_partial = num_tokens < want
            is_long = is_partial and len(request.token_ids) > chunk_limit
            if is_partial and not (
                config.enable_chunked_prefill and num_partial < config.max_num_partial_prefills
            ):
                break
            if is_long and num_long >= config.max_long_partial_prefills:
                if len(passed_over) == _MAX_PASSED_OVER:
                    break
                # So that shorter prompts can be admitted before it.
                passed_over.append(waiting.pop())
                continue
            if num_tokens == 1 and not self._cache.are_computed(shared):
                # A single new token would run with the decodes, which run before the launch that
                # computes its shared blocks.
                break
            if running.is_full or preemption.num_lacking(request, shared) > 0:
                self._lacks_room = request if preemption.by_priority else None
                break
            if self._media is not None and media.used:
                self._media.commit(media)
            num_partial += is_partial
            num_long += is_long
            plan.budget -= num_tokens
            if plan.prompt_budget is not None:
                plan.prompt_budget.spend(start, num_tokens, media.num_encoded)
            counts.append(num_tokens)
            self._enter(waiting.pop(), shared, num_tokens, plan)
        for request in passed_over:
            waiting.push(request)
        if counts:
            plan.add_rows([new.row for new in plan.new_requests], counts)

    def _enter(self, request: Request, shared: list[int], num_tokens: int, plan: Plan) -> None:
        """Give an admitted request its batch index and its blocks."""
        start = self._cache.num_tokens_in(shared)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
            plan.first_admitted.append(request)
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += start
        states = self._cache.states
        if states is not None:
            request.state_ends = self._cache.state_ends(request, start)
        self._cache.admit(request, shared)
        self._running.add(request, start, len(request.block_ids) * self._cache.block_size)
        if states is not None and start:
            number = states.use(self._cache.prefix_hash(request, start))
            plan.restored_states.append((request.row, number))
        # Cache the blocks now, before they are computed: the launch writes all keys and values
        # before it reads any, so the next request in the queue can already share them.
        self._cache.cache_blocks(request, start + num_tokens)
        plan.new_requests.append(
            NewRequest(
                row=request.row,
                request=request.spec,
                output_token_ids=request.output_token_ids,
                block_ids=self._cache.tables(request),
            )
        )

    def _count_partial(self, plan: Plan, chunk_limit: int) -> tuple[int, int]:
        """Count the running prompts that this step does not complete, and how many of them are
        long.

        Returns:
            (partial prompts, partial prompts of more than `chunk_limit` tokens).
        """
        num_tokens = self._running.num_tokens[plan.rows]
        rest = num_tokens - self._running.num_computed[plan.rows]
        is_partial = (rest > 1) & (rest > plan.num_tokens)
        return int(is_partial.sum()), int((is_partial & (num_tokens > chunk_limit)).sum())
