"""Builders, a model of the runner that checks what it reads, and a loop that drives both.

`FakeRunner` knows no scheduler: it follows `SchedulerOutput`s as a worker does. Its KV cache holds
for each slot a hash of everything that decides the content there (salt, extra keys, all tokens up
to the position), and it asserts on every read that the right hash is found. Its tokens are a
function of that hash alone, so what a request gets must not depend on how it is scheduled.
"""

import copy
import random
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tests.core.cache_follower import CacheFollower
from vllm.config import SchedulerConfig
from vllm.core.cache_events import CacheEventLog
from vllm.core.drafts import DraftSource
from vllm.core.kv_cache_manager import KVCacheManager
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
    ModelRunnerOutput,
    SchedulerOutput,
)
from vllm.request import Request, RequestStatus
from vllm.sampling_params import SamplingParams

VOCAB_SIZE = 7
FAILED = "sampling failed"


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
    **sampling: Any,
) -> EngineRequest:
    """A request; a number for a prompt means that many tokens nobody else has."""
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
        cache_extra_keys=tuple(CacheKey(*key) for key in extra_keys),
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_caching: bool = True,
    windows: Sequence[int | None] = (None,),
    draft_source: DraftSource | None = None,
    **limits: Any,
) -> Scheduler:
    """A scheduler; `num_blocks` counts the usable ones, `windows` are those of
    the groups of layers, `limits` are of SchedulerConfig."""
    defaults = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    config = SchedulerConfig(**{**defaults, **limits})
    events = CacheEventLog(block_size)
    groups = [KVCacheGroup(window) for window in windows]
    cache = KVCacheManager(num_blocks + 1, block_size, enable_caching, events, groups)
    return Scheduler(config, cache, draft_source)


def num_scheduled(scheduler: Scheduler, step: SchedulerOutput) -> dict[str, int]:
    """Tokens of each request in a step that was just scheduled."""
    names = [request.request_id for request in scheduler.running.at(step.rows)]
    return dict(zip(names, step.num_scheduled_tokens.tolist(), strict=True))


# ---- what a request must get ----------------------------------------------------------------


def root_content(spec: EngineRequest) -> int:
    """What the cache content of a request depends on besides its tokens."""
    return zlib.crc32((spec.cache_salt or "").encode())


def next_content(content: int, token_id: int, keys: tuple[str, ...] = ()) -> int:
    """The content of a slot that follows one with `content`; `keys` begin there."""
    return hash((content, token_id, *map(_stable, keys)))


def _stable(key: str) -> int:
    return zlib.crc32(key.encode())


def keys_at(spec: EngineRequest, position: int) -> tuple[str, ...]:
    """The extra keys of a request that begin at a position."""
    return tuple(key.key for key in spec.cache_extra_keys if key.start == position)


def next_token(spec: EngineRequest, content: int, num_output: int) -> int:
    """The token sampled at a position, end tokens masked up to the least length."""
    token_id = (content >> 7) % VOCAB_SIZE
    if num_output < spec.sampling_params.min_tokens:
        while token_id == spec.eos_token_id or token_id in spec.stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_result(spec: EngineRequest, fails_at: int | None = None) -> tuple[list[int], Finished]:
    """Output tokens and end of a request, without a scheduler."""
    content = root_content(spec)
    for position, token_id in enumerate(spec.prompt_token_ids):
        content = next_content(content, token_id, keys_at(spec, position))
    output: list[int] = []
    while True:
        if len(output) == fails_at:
            return output, Finished(FinishReason.ERROR, error=FAILED)
        token_id = next_token(spec, content, len(output))
        position = len(spec.prompt_token_ids) + len(output)
        output.append(token_id)
        content = next_content(content, token_id, keys_at(spec, position))
        if token_id == spec.eos_token_id:
            return output, Finished(FinishReason.STOP)
        if token_id in spec.stop_token_ids:
            return output, Finished(FinishReason.STOP, token_id)
        if len(spec.prompt_token_ids) + len(output) >= spec.max_total_tokens:
            return output, Finished(FinishReason.LENGTH)


def next_tokens(spec: EngineRequest, token_ids: list[int], count: int) -> list[int]:
    """What a request that has these tokens samples next, as if nothing ended it."""
    content = root_content(spec)
    for token_id in token_ids:
        content = next_content(content, token_id)
    found: list[int] = []
    for num_output in range(len(token_ids) - len(spec.prompt_token_ids), 10**9):
        if len(found) == count:
            break
        found.append(next_token(spec, content, num_output))
        content = next_content(content, found[-1])
    return found


class GuessSource:
    """Guesses that are right, right up to some token, wrong, or none; they do not care where the
    output ends."""

    def __init__(self, rng: random.Random, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.num_proposed = 0
        self._rng = rng

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: Request) -> list[int]:
        count = self._rng.choice([0, self.max_drafts, self._rng.randint(1, self.max_drafts)])
        guess = next_tokens(request.spec, request.token_ids, count)
        first_wrong = self._rng.choice([count, count, 0, self._rng.randint(0, count)])
        for index in range(first_wrong, count):
            guess[index] = (guess[index] + 1) % VOCAB_SIZE
        self.num_proposed += count
        return guess


# ---- the runner -----------------------------------------------------------------------------


@dataclass
class FakeRow:
    """One request as the runner knows it."""

    spec: EngineRequest
    token_ids: list[int]
    block_ids: list[int]
    """Its table for the first group of layers."""
    more_block_ids: list[list[int]] = field(default_factory=list)
    """Its tables for the other groups."""
    num_computed: int | None = None
    """None until it runs for the first time."""
    contents: list[int] = field(default_factory=list)
    """Right content of each position whose token is known."""

    @property
    def tables(self) -> list[list[int]]:
        return [self.block_ids, *self.more_block_ids]

    def content(self, position: int) -> int:
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else root_content(self.spec)
            last = len(self.contents)
            keys = keys_at(self.spec, last)
            self.contents.append(next_content(before, self.token_ids[last], keys))
        return self.contents[position]

    def take_back(self, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens count as computed."""
        del self.contents[num_tokens:]
        self.num_computed = num_tokens


class FakeRunner:
    """Executes steps against a model of the KV cache.

    Args:
        block_size: tokens per block.
        is_split: one launch for the decodes, then one per prefill, as on a device with static
            shapes; False: everything in one launch, which writes before it reads.
        fails_at: request id -> number of output tokens after which its sampling fails.
        windows: of the groups of layers.
        stalls_every: of so many rows with drafts one gets no token; 0: none.
    """

    def __init__(
        self,
        block_size: int,
        is_split: bool = True,
        fails_at: dict[str, int] | None = None,
        windows: Sequence[int | None] = (None,),
        stalls_every: int = 0,
    ) -> None:
        self.stalls_every = stalls_every
        self.num_verified = 0
        self.block_size = block_size
        self.windows = windows
        self.is_split = is_split
        self.fails_at = fails_at or {}
        self.rows: dict[int, FakeRow] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.last_step_id = -1

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step in the documented order: shorten, free, place, add blocks, run."""
        assert step.step_id > self.last_step_id
        self.last_step_id = step.step_id
        for row, num_blocks in step.shortened_tables:
            assert num_blocks < len(self.rows[row].block_ids)
            for table in self.rows[row].tables:
                del table[num_blocks:]
        for row in step.freed_rows:
            del self.rows[row]
        for new in step.new_requests:
            assert new.row not in self.rows, f"row {new.row} is given twice"
            token_ids = new.request.prompt_token_ids + new.output_token_ids
            first, *more = np.array(new.block_ids).reshape(len(self.windows), -1).tolist()
            self.rows[new.row] = FakeRow(new.request, token_ids, first, more)
        block_ids = step.block_ids.reshape(-1, len(self.windows)).tolist()
        for row, of_row in zip(step.block_rows.tolist(), block_ids, strict=True):
            for table, block_id in zip(self.rows[row].tables, of_row, strict=True):
                table.append(block_id)
        for row, index, count in step.passed_blocks:
            self.rows[row].tables[index][:count] = [NULL_BLOCK_ID] * count
        self._check_tables()
        rows = step.rows.tolist()
        work = list(
            zip(
                rows,
                step.num_computed_tokens.tolist(),
                step.num_scheduled_tokens.tolist(),
                strict=True,
            )
        )
        drafts = self._drafts(step)
        for row, guess in drafts.items():
            self.rows[row].token_ids += guess
        for launch in self._launches(work):
            self._run(launch)
        return self._sample(step, work, drafts)

    @staticmethod
    def _drafts(step: SchedulerOutput) -> dict[int, list[int]]:
        """Row -> its drafts."""
        if step.num_draft_tokens is None:
            assert step.draft_token_ids is None
            return {}
        assert step.draft_token_ids is not None
        parts = np.split(step.draft_token_ids, np.cumsum(step.num_draft_tokens))
        assert not len(parts[-1])
        pairs = zip(step.rows.tolist(), parts[:-1], strict=True)
        return {row: part.tolist() for row, part in pairs if len(part)}

    def _launches(self, work: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
        if not self.is_split:
            return [work]
        decodes = [entry for entry in work if entry[2] == 1]
        return [decodes, *([entry] for entry in work if entry[2] > 1)]

    def _run(self, launch: list[tuple[int, int, int]]) -> None:
        written = set()
        for row_id, start, count in launch:
            row = self.rows[row_id]
            known = start if row.num_computed is None else row.num_computed
            assert start == known, f"{row.spec.request_id}: position {start}, not {known}"
            row.num_computed = start + count
            assert row.num_computed <= len(row.token_ids), "a token that nobody has sampled"
            for index, table in enumerate(row.tables):
                for position in range(start, start + count):
                    slot = self._slot(table, position)
                    assert slot[0] != NULL_BLOCK_ID, "a token without a block"
                    assert slot not in written, f"slot {slot} is written twice in a launch"
                    written.add(slot)
                    self.slots[slot] = index, row.content(position)
        for row_id, start, count in launch:
            self._check_reads(self.rows[row_id], start, start + count)

    def _check_reads(self, row: FakeRow, start: int, end: int) -> None:
        for index, (table, window) in enumerate(zip(row.tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                slot = self._slot(table, position)
                assert self.slots.get(slot) == (index, row.content(position)), (
                    f"{row.spec.request_id}: wrong content at position {position}, slot {slot}"
                )

    def _check_tables(self) -> None:
        for row in self.rows.values():
            assert len({len(table) for table in row.tables}) == 1
            for table, window in zip(row.tables, self.windows, strict=True):
                num_null = table.count(NULL_BLOCK_ID)
                assert table[:num_null] == [NULL_BLOCK_ID] * num_null
                assert num_null == 0 or window is not None
            held = [b for table in row.tables for b in table if b != NULL_BLOCK_ID]
            assert len(set(held)) == len(held), "a block twice in the tables of a row"

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return table[index], offset

    def _sample(
        self,
        step: SchedulerOutput,
        work: list[tuple[int, int, int]],
        drafts: dict[int, list[int]],
    ) -> ModelRunnerOutput:
        token_ids: dict[int, list[int]] = {}
        logprobs: dict[int, LogprobRows] = {}
        prompt_logprobs: dict[int, LogprobRows] = {}
        errors: dict[int, str] = {}
        for row_id, start, count in work:
            row = self.rows[row_id]
            params, num_prompt = row.spec.sampling_params, len(row.spec.prompt_token_ids)
            if params.prompt_logprobs is not None:
                positions = range(start, min(start + count, num_prompt - 1))
                if positions:
                    targets = [row.token_ids[position + 1] for position in positions]
                    prompt_logprobs[row_id] = _logprob_rows(targets, list(positions))
            if start + count < len(row.token_ids):
                continue
            guess = drafts.get(row_id, [])
            num_known = len(row.token_ids) - len(guess)
            num_output = num_known - num_prompt
            tokens = self._verify(row, num_known, guess)
            if not tokens:
                errors[row_id] = FAILED
                tokens = [0]
            elif self._stalls(guess):
                tokens = []
            if params.logprobs is not None and tokens and row_id not in errors:
                positions = range(num_output, num_output + len(tokens))
                logprobs[row_id] = _logprob_rows(tokens, list(positions))
            row.take_back(num_known - 1 + len(tokens))
            row.token_ids[num_known:] = tokens
            token_ids[row_id] = tokens
        counts = [len(tokens) for tokens in token_ids.values()]
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=np.array(list(token_ids), np.int32),
            token_ids=np.array([t for tokens in token_ids.values() for t in tokens], np.int32),
            num_tokens=None if set(counts) <= {1} else np.array(counts, np.int32),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )

    def _verify(self, row: FakeRow, num_known: int, guess: list[int]) -> list[int]:
        """The tokens of a row, up to the first that is not its draft; none when the first fails."""
        num_prompt = len(row.spec.prompt_token_ids)
        tokens: list[int] = []
        for draft in [*guess, None]:
            num_output = num_known + len(tokens) - num_prompt
            if self.fails_at.get(row.spec.request_id) == num_output:
                break
            content = row.content(num_known + len(tokens) - 1)
            tokens.append(next_token(row.spec, content, num_output))
            if tokens[-1] != draft:
                break
        return tokens

    def _stalls(self, guess: list[int]) -> bool:
        """Whether a row gets no token in this step, although nothing is wrong with it."""
        if not guess:
            return False
        self.num_verified += 1
        return bool(self.stalls_every) and self.num_verified % self.stalls_every == 0


def _logprob_rows(token_ids: list[int], positions: list[int]) -> LogprobRows:
    """Rows that carry their positions as values, so that a test can see which they are."""
    return LogprobRows(
        token_ids=np.array(token_ids, np.int32)[:, None],
        logprobs=-np.array(positions, np.float32)[:, None],
        ranks=np.array(positions, np.int32) + 1,
    )


# ---- the loop -------------------------------------------------------------------------------


@dataclass
class Result:
    """What one request has got so far."""

    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    """(position, token id) of each entry."""
    logprobs: list[tuple[int, int]] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)


class Loop:
    """Scheduler and runner, with `depth` steps in flight, every step checked.

    Args:
        depth: results outstanding while the next step is scheduled.
        is_split, fails_at, stalls_every: see FakeRunner.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        depth: int = 0,
        is_split: bool = True,
        fails_at: dict[str, int] | None = None,
        stalls_every: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.depth = depth
        windows = [group.window for group in scheduler.cache._groups]
        self.runner = FakeRunner(
            scheduler.cache.block_size, is_split, fails_at, windows, stalls_every
        )
        self.results: dict[str, Result] = {}
        self.num_steps = 0
        self.follower = CacheFollower()
        self._in_flight: deque[ModelRunnerOutput] = deque()
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
        """Take in what the cache tells about itself; it is all that there is to know."""
        cache = self.scheduler.cache
        assert cache._events is not None
        self.follower.follow(cache._events.drain())
        self.follower.check(cache.pool)

    def step(self) -> dict[str, int]:
        """Schedule and execute one step, take in the oldest; the tokens each request got."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        scheduled = num_scheduled(scheduler, step)
        check_step(scheduler, step)
        self.follow()
        check_scheduler(scheduler)
        self.num_steps += 1
        if len(step.rows):
            self._in_flight.append(self.runner.execute(step))
        else:
            assert not step.freed_rows and not step.new_requests, "lost: nobody runs this step"
            assert self._in_flight or not scheduler.num_unfinished_requests, "stuck"
        while len(self._in_flight) > (self.depth if len(step.rows) else 0):
            self.take_in()
        return scheduled

    def take_in(self) -> None:
        """Update with the oldest result in flight, if there is one."""
        if self._in_flight:
            self._take_in(self._in_flight.popleft())

    def run(self, max_steps: int = 2000) -> dict[str, Result]:
        """Step until nothing is left; then the cache must be all free."""
        end = self.num_steps + max_steps
        while self.scheduler.num_unfinished_requests or self._in_flight:
            assert self.num_steps < end, f"not done after {max_steps} steps"
            self.step()
        pool = self.scheduler.cache.pool
        assert pool.num_free == pool.num_usable_blocks, "blocks leaked"
        for output, copy_at_the_time in self._given:
            assert _plain(output) == _plain(copy_at_the_time), "an output was changed later"
        return self.results

    def _take_in(self, runner_output: ModelRunnerOutput) -> None:
        output = self.scheduler.update(runner_output)
        self.follow()
        check_scheduler(self.scheduler)
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


# ---- invariants -----------------------------------------------------------------------------


def check_step(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """A step keeps the limits and the order that `SchedulerOutput` promises."""
    config, running = scheduler.config, scheduler.running
    rows, counts = step.rows.tolist(), step.num_scheduled_tokens.tolist()
    assert len(set(rows)) == len(rows), "a row twice"
    assert len(rows) <= config.max_num_seqs
    assert step.num_tokens <= config.max_num_batched_tokens
    assert all(count >= 1 for count in counts)
    drafts = [0] * len(rows)
    if step.num_draft_tokens is not None:
        drafts = step.num_draft_tokens.tolist()
    kinds = [0 if count == 1 else 1 if d else 2 for count, d in zip(counts, drafts, strict=True)]
    assert kinds == sorted(kinds), "single tokens, then drafts, then prefills"
    assert all(not d or d == count - 1 for count, d in zip(counts, drafts, strict=True))
    assert {new.row for new in step.new_requests} <= set(rows)
    for array in (step.rows, step.num_computed_tokens, step.num_scheduled_tokens):
        assert array.dtype == np.int32
    for row in running.order.tolist():
        rest = int(running.num_tokens[row] - running.num_computed[row])
        waits = running.awaits_result[row] or running.num_tokens[row] >= running.limit[row]
        if row not in rows and not waits:
            assert rest > 1, "a decode is left out"


def check_scheduler(scheduler: Scheduler) -> None:
    """Requests, rows, arrays and blocks agree with each other."""
    running, size = scheduler.running, scheduler.cache.block_size
    requests, waiting = running.requests, list(scheduler.waiting)
    assert len(requests) == len(running) <= scheduler.config.max_num_seqs
    assert len(waiting) == len(scheduler.waiting)
    names = [request.request_id for request in (*requests, *waiting)]
    assert sorted(names) == sorted(scheduler._requests)
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
    if not scheduler._by_priority and _never_passes_over(scheduler) and requests and waiting:
        assert requests[-1].sort_key < min(r.sort_key for r in waiting), "not first come first"
    check_blocks(scheduler, requests)


def _never_passes_over(scheduler: Scheduler) -> bool:
    config = scheduler.config
    return config.max_long_partial_prefills >= config.max_num_partial_prefills


def check_blocks(scheduler: Scheduler, requests: list[Request]) -> None:
    """Counts, free queue and hashes of the pool agree with the block tables."""
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
    """The free queue holds what nobody holds, once; both hash maps say the same."""
    queue = []
    block_id = pool._next[NULL_BLOCK_ID]
    while block_id != NULL_BLOCK_ID:
        queue.append(block_id)
        assert pool._prev[pool._next[block_id]] == block_id
        block_id = pool._next[block_id]
        assert len(queue) <= pool.num_blocks
    assert pool._prev[pool._next[NULL_BLOCK_ID]] == NULL_BLOCK_ID
    free = [i for i in range(1, pool.num_blocks) if pool.num_refs(i) == 0]
    assert sorted(queue) == free
    assert pool.num_free == len(free)
    assert pool.num_refs(NULL_BLOCK_ID) == 0
    known = {h: i for i, h in enumerate(pool._hash_of) if h is not None}
    assert known == pool._block_of
