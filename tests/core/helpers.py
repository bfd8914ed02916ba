"""Builders, a loop that runs a scheduler with a runner, and checks of their state after each
step.
"""

import copy
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tests.core.cache_follower import CacheFollower
from tests.core.fake_runner import FakeRunner
from tests.core.reference import root_content
from tests.reach import (
    check_hash_maps,
    free_queue_of,
    held_media_of,
    num_stages_of,
    request_ids_of,
    scheduled_steps_of,
)
from vllm.config import SchedulerConfig
from vllm.core.drafting.draft_control import DraftControl
from vllm.core.drafts import DraftSource
from vllm.core.kv.cache_events import CacheEventLog
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.kv.state_cache import StateCache
from vllm.core.media import EncoderCache
from vllm.core.pacing.step_bound import StepBound
from vllm.core.scheduler import Scheduler
from vllm.kv_cache_spec import KVCacheGroup
from vllm.messages import (
    NULL_BLOCK_ID,
    CacheKey,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    LogprobRows,
    MediaItem,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vllm.request import Request, RequestStatus
from vllm.sampling_params import SamplingParams


def make_request(
    request_id: str = "a",
    prompt: int | list[int] = 8,
    max_tokens: int = 4,
    *,
    eos: int | None = None,
    stop: Iterable[int] = (),
    priority: int = 0,
    arrival_time: float = 0.0,
    salt: str | None = None,
    extra_keys: Iterable[tuple[int, str]] = (),
    media: Iterable[tuple[int, int, str] | tuple[int, int, str, int]] = (),
    seen: Iterable[tuple[int, int, int, str] | tuple[int, int, int, str, int]] = (),
    **sampling: Any,
) -> EngineRequest:
    """Make a request.

    A number as `prompt` makes a prompt of this many tokens that no other request has. `media` are
    images as (index of the first token, tokens, key). `seen` are items of cross-attention as (first
    token that sees the item, index after the last one, hidden states, key). The number of parts of
    an item may follow its key.
    """
    media, seen = tuple(media), tuple(seen)
    if isinstance(prompt, int):
        first = zlib.crc32(request_id.encode()) % 2**30
        prompt = [first + i for i in range(prompt)]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
        seed=0,
        eos_token_id=eos,
        stop_token_ids=frozenset(stop),
        max_total_tokens=len(prompt) + max_tokens,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=salt,
        cache_extra_keys=(
            *(CacheKey(*key) for key in extra_keys),
            *(CacheKey(start, key) for start, _, key, *_ in media),
            *(CacheKey(start, key) for start, _, _, key, *_ in seen),
        ),
        media=(
            *(
                MediaItem(
                    modality="image",
                    key=key,
                    runs=((start, count),),
                    num_parts=sum(parts) or 1,
                    tensors=(),
                )
                for start, count, key, *parts in media
            ),
            *(
                MediaItem(
                    modality="image",
                    key=key,
                    num_states=count,
                    seen_by=(start, end),
                    num_parts=sum(parts) or 1,
                    tensors=(),
                )
                for start, end, count, key, *parts in seen
            ),
        ),
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_caching: bool = True,
    windows: Sequence[int | None] = (None,),
    draft_source: DraftSource | None = None,
    draft_control: DraftControl | None = None,
    num_stages: int = 1,
    num_pipelined_steps: int | None = None,
    is_dense: bool = False,
    num_kept_states: int | None = None,
    media: EncoderCache | None = None,
    step_bound: StepBound | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **limits: Any,
) -> Scheduler:
    """Make a scheduler.

    `num_blocks` counts the usable blocks, `windows` are the windows of the groups of layers,
    `num_kept_states` is None for a model without recurrent state, and `limits` are fields of
    SchedulerConfig. By default, as many steps run at the same time as there are pipeline stages.
    """
    defaults = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    config = SchedulerConfig(**{**defaults, **limits})
    events = CacheEventLog(block_size)
    groups = [KVCacheGroup(window) for window in windows]
    states = None
    if num_kept_states is not None and enable_caching:
        states = StateCache(config.max_num_seqs, num_kept_states)
    num_blocks += 1  # the null block
    cache = KVCacheManager(num_blocks, block_size, enable_caching, events, groups, is_dense, states)
    num_steps = num_stages if num_pipelined_steps is None else num_pipelined_steps
    return Scheduler(
        config,
        cache,
        draft_source,
        draft_control,
        num_stages,
        num_steps,
        media,
        step_bound,
        clock,
    )


def num_scheduled(scheduler: Scheduler, step: SchedulerOutput) -> dict[str, int]:
    """Return the number of tokens that a new step schedules for each request."""
    names = [request.request_id for request in scheduler.running.at(step.rows)]
    return dict(zip(names, step.num_scheduled_tokens.tolist(), strict=True))


# ---- run the scheduler ---------------------------------------------------------------------------


@dataclass
class Result:
    """Outputs that one request has received so far."""

    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    """(position, token id) of each entry."""
    logprobs: list[tuple[int, int]] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)


class Loop:
    """Runs a scheduler and a runner with `depth` steps in flight, and checks every step.

    Args:
        depth: results outstanding while the next step is scheduled.
        is_split, fails_at, stalls_every, reads_tokens, guesses, fails_to_encode: see FakeRunner.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        depth: int = 0,
        is_split: bool = True,
        fails_at: dict[str, int] | None = None,
        stalls_every: int = 0,
        reads_tokens: bool = True,
        guesses: random.Random | None = None,
        fails_to_encode: Callable[[str], bool] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.depth = depth
        windows = [group.window for group in scheduler.cache.groups]
        self.runner = FakeRunner(
            scheduler.cache.block_size,
            is_split,
            fails_at,
            windows,
            stalls_every,
            reads_tokens,
            guesses,
            has_states=scheduler.cache.states is not None,
            max_embeddings=0 if scheduler.media is None else scheduler.media.capacity,
            max_encoded=0 if scheduler.media is None else scheduler.media.budget,
            divides=scheduler.config.enable_chunked_prefill,
            fails_to_encode=fails_to_encode,
        )
        self.results: dict[str, Result] = {}
        self.num_steps = 0
        self.num_discarded_errors = 0
        """Errors that ended no request, because it was preempted or cancelled meanwhile."""
        self.follower = CacheFollower()
        self.in_flight: deque[ModelRunnerOutput] = deque()
        self._given: list[tuple[EngineOutput, EngineOutput]] = []

    def add(self, *specs: EngineRequest) -> None:
        for spec in specs:
            self.scheduler.add_request(spec)
            self.results[spec.request_id] = Result()

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort_requests(request_ids)
        for request_id in request_ids:
            result = self.results.get(request_id)
            if result is not None and result.finished is None:
                result.finished = Finished(FinishReason.ABORT)
        self.follow()
        check_scheduler(self.scheduler)

    def follow(self) -> None:
        """Apply the events of the prefix cache, and check the followed blocks against the pool."""
        cache = self.scheduler.cache
        assert cache.events is not None
        self.follower.follow(cache.events.drain())
        self.follower.check(cache.pool)

    def step(self) -> dict[str, int]:
        """Schedule and execute one step, and use the oldest result. Return the tokens that each
        request got.
        """
        scheduler = self.scheduler
        step = scheduler.schedule()
        scheduled = num_scheduled(scheduler, step)
        check_step(scheduler, step)
        self.follow()
        check_scheduler(scheduler)
        self.num_steps += 1
        if len(step.rows):
            self.in_flight.append(self.runner.execute(step))
        else:
            assert not step.freed_rows and not step.new_requests, "lost: nobody runs this step"
            assert self.in_flight or not scheduler.num_unfinished_requests, "stuck"
        while len(self.in_flight) > (self.depth if len(step.rows) else 0):
            self.take_in()
        return scheduled

    def take_in(self) -> None:
        """Update the scheduler with the oldest result in flight, if there is one."""
        if self.in_flight:
            self._take_in(self.in_flight.popleft())

    def run(self, max_steps: int = 2000) -> dict[str, Result]:
        """Run steps until no request is left, and check that all blocks of the cache are free
        then.
        """
        end = self.num_steps + max_steps
        while self.scheduler.num_unfinished_requests or self.in_flight:
            assert self.num_steps < end, f"not done after {max_steps} steps"
            self.step()
        pool = self.scheduler.cache.pool
        assert pool.num_free == pool.num_usable_blocks, "blocks leaked"
        assert not self.runner.begun, "parts of images are left"
        media = self.scheduler.media
        assert media is None or not held_media_of(self.scheduler), "images are still held"
        for output, copy_at_the_time in self._given:
            assert _plain(output) == _plain(copy_at_the_time), "an output was changed later"
        return self.results

    def _take_in(self, runner_output: ModelRunnerOutput) -> None:
        output = self.scheduler.update(runner_output)
        self.follow()
        check_scheduler(self.scheduler)
        ended = sum(each.reason is FinishReason.ERROR for each in output.finished.values())
        self.num_discarded_errors += len(runner_output.errors) - ended
        self._given.append((output, copy.deepcopy(output)))
        assert len(set(output.request_ids)) == len(output.request_ids)
        for name, count in output.num_cached_tokens.items():
            self._open(name).num_cached_tokens.append(count)
        for name, rows in output.prompt_logprobs.items():
            self._open(name).prompt_logprobs += _entries(rows)
        counts = output.num_tokens or [1] * len(output.request_ids)
        assert all(counts) and sum(counts) == len(output.token_ids)
        tokens = iter(output.token_ids)
        for name, count in zip(output.request_ids, counts, strict=True):
            self._open(name).token_ids += islice(tokens, count)
        for name, rows in output.logprobs.items():
            self._open(name).logprobs += _entries(rows)
        for name, finished in output.finished.items():
            self._open(name).finished = finished

    def _open(self, request_id: str) -> Result:
        result = self.results[request_id]
        assert result.finished is None, f"{request_id} gets something after its end"
        return result


def _entries(rows: LogprobRows) -> list[tuple[int, int]]:
    return list(zip((rows.ranks - 1).tolist(), rows.token_ids[:, 0].tolist(), strict=True))


def _plain(output: EngineOutput) -> tuple[Any, ...]:
    return (
        output.request_ids,
        output.token_ids,
        output.num_tokens,
        output.finished,
        output.num_cached_tokens,
    )


# ---- invariants ----------------------------------------------------------------------------------


def check_step(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """Check that a step keeps the limits and the order that `SchedulerOutput` promises."""
    config, running = scheduler.config, scheduler.running
    rows, counts = step.rows.tolist(), step.num_scheduled_tokens.tolist()
    assert len(set(rows)) == len(rows), "a row twice"
    assert len(rows) <= config.max_num_seqs
    assert sum(counts) <= config.max_num_batched_tokens
    assert 1 <= step.num_decodes <= config.num_scheduler_steps
    assert all(count >= 1 for count in counts)
    drafts = [0] * len(rows)
    if step.num_draft_tokens is not None:
        drafts = step.num_draft_tokens.tolist()
    kinds = [0 if count == 1 else 1 if d else 2 for count, d in zip(counts, drafts, strict=True)]
    assert kinds == sorted(kinds), "single tokens, then drafts, then prefills"
    assert all(not d or d == count - 1 for count, d in zip(counts, drafts, strict=True))
    encoding = {row for row, *_ in step.encoded_media}
    assert {new.row for new in step.new_requests} <= {*rows, *encoding}
    for array in (step.rows, step.num_computed_tokens, step.num_scheduled_tokens):
        assert array.dtype == np.int32
    samples = scheduled_steps_of(scheduler)[-1].rows.tolist() if rows else []
    has_prompt, runs_prompt = False, bool(step.encoded_media)
    for row in running.order.tolist():
        num_computed = int(running.num_computed[row])
        rest = int(running.num_tokens[row]) - num_computed
        waits = running.awaits_result[row] or running.num_tokens[row] >= running.limit[row]
        waits = waits or running.media_end[row] > num_computed
        if row not in rows and not waits and num_stages_of(scheduler) == 1:
            assert rest > 1, "a decode is left out"
            has_prompt |= sum(counts) < config.max_num_batched_tokens
        elif row in rows:
            runs_prompt |= counts[rows.index(row)] > 1 or row not in samples
    assert runs_prompt or not has_prompt, "no prompt advances"
    if scheduler.cache.is_dense and rows:
        held = {block_id for request in running.requests for block_id in request.block_ids}
        assert max(held) <= len(held) + len(held) // 32, "a slice reads more than it needs"
    if num_stages_of(scheduler) > 1:
        waiting = [
            row
            for step in scheduled_steps_of(scheduler)
            for row in step.rows.tolist()
            if row not in step.removed_rows
        ]
        assert len(set(waiting)) == len(waiting), "a row runs before its token is known"


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that requests, batch indices, arrays and blocks agree with each other."""
    running, size = scheduler.running, scheduler.cache.block_size
    requests, waiting = running.requests, list(scheduler.waiting)
    assert len(requests) == len(running) <= scheduler.config.max_num_seqs
    assert len(waiting) == len(scheduler.waiting)
    names = [request.request_id for request in (*requests, *waiting)]
    assert sorted(names) == sorted(request_ids_of(scheduler))
    assert [r.sort_key for r in requests] == sorted(r.sort_key for r in requests)
    assert running.order.tolist() == [request.row for request in requests]
    assert len(set(running.order.tolist())) == len(requests)
    for request in waiting:
        assert request.status is RequestStatus.WAITING
        assert request.row == -1 and not request.block_ids and not request.more_block_ids
    for request in requests:
        row = request.row
        assert request.status is RequestStatus.RUNNING
        assert running.at(running.order[running.order == row]) == [request]
        assert running.capacity[row] == len(request.block_ids) * size
        assert running.num_computed[row] <= running.num_tokens[row]
        assert running.num_computed[row] <= running.capacity[row]
        assert running.num_tokens[row] >= len(request.token_ids)
        assert running.num_tokens[row] <= running.limit[row]
        assert request.num_cached_blocks <= len(request.block_ids)
    # Requests that share an image whose encoding failed are preempted at any position of the queue:
    # leave them out of the check of the order.
    first = [r.sort_key for r in waiting if not (r.num_preemptions and r.spec.media)]
    if (
        scheduler.config.scheduling_policy != "priority"
        and _never_passes_over(scheduler)
        and requests
        and first
    ):
        assert requests[-1].sort_key < min(first), "not first come first"
    check_blocks(scheduler, requests)


def _never_passes_over(scheduler: Scheduler) -> bool:
    config = scheduler.config
    return config.max_long_partial_prefills >= config.max_num_partial_prefills


def check_blocks(scheduler: Scheduler, requests: list[Request]) -> None:
    """Check that counts, free queue and hashes of the pool agree with the block tables."""
    pool, size = scheduler.cache.pool, scheduler.cache.block_size
    holders: dict[int, list[tuple[Request, int, int]]] = {}
    for request in requests:
        for group, table in enumerate((request.block_ids, *request.more_block_ids)):
            for index, block_id in enumerate(table):
                if block_id != NULL_BLOCK_ID or not scheduler.cache.has_windows:
                    holders.setdefault(block_id, []).append((request, index, group))
    assert NULL_BLOCK_ID not in holders
    for block_id in range(pool.num_blocks):
        assert pool.num_refs(block_id) == len(holders.get(block_id, ())), "wrong count"
    for users in holders.values():
        contents = {
            (i, g, root_content(r.spec), tuple(r.token_ids[: (i + 1) * size])) for r, i, g in users
        }
        assert len(contents) == 1, "shared by different content"
        assert len(users) == 1 or len(next(iter(contents))[3]) % size == 0, "shared but not full"
    check_pool(pool)


def check_pool(pool: Any) -> None:
    """Check that the free queue contains each free block once, and that both hash maps agree."""
    queue = free_queue_of(pool)
    free = [i for i in range(1, pool.num_blocks) if pool.num_refs(i) == 0]
    assert sorted(queue) == free
    assert pool.num_free == len(free)
    assert pool.num_refs(NULL_BLOCK_ID) == 0
    check_hash_maps(pool)
