"""Replays requests with the scheduler and planner of an engine, using predicted times."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.bucketing import Bucket, Phase
from vllm.bucketing.catalog.bucket_plan import BucketPlan
from vllm.bucketing.catalog.catalog import Cost
from vllm.bucketing.traffic import TrafficTable
from vllm.config import VllmConfig
from vllm.core.drafts import DraftSource
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.scheduler import Scheduler
from vllm.messages import EngineRequest, Finished, IntArray, ModelRunnerOutput, SchedulerOutput
from vllm.planning.request_lengths import RequestLengths
from vllm.sampling_params import SamplingParams
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import ExpectedTokens, InputBatch
from vllm.worker.batch.verification import count_accepted
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.planner import HPULaunchPlanner, PaddedLaunch

_TOKEN = 7
"""The token of every output. It ends no request."""
_PARAMS = SamplingParams(temperature=0.0)

Run = Callable[[SchedulerOutput, list[PaddedLaunch]], list[int]]
"""Runs the forward passes of a step. It returns the tokens of each request that samples, in their
order: the next one, and one after each of its drafts."""


def make_batch(config: VllmConfig) -> InputBatch:
    """Make the batch of running requests for a config."""
    limits = config.scheduler
    return InputBatch(limits.max_num_seqs, limits.max_model_len, config.max_blocks_per_request)


class ScheduleLoop:
    """Runs the scheduler, batch and planner of an engine without a model.

    Each step is handled in the order of an engine: wait for the step in flight, update the batch,
    plan, sample.

    Args:
        config: config of the engine.
        num_blocks: KV blocks, the null block included.
        plan: buckets.
        depth: number of outstanding results while the next step is scheduled.
        draft_source: makes draft tokens, as many as the config allows.

    Attributes:
        token_ids: token ids of each request.
        new_names: ids of the requests that got tokens in the last call of `step`.
        finished: how each request finished that was not cancelled.
    """

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        plan: BucketPlan,
        depth: int = 0,
        draft_source: DraftSource | None = None,
    ) -> None:
        cache = config.cache
        blocks = KVCacheManager(
            num_blocks,
            cache.block_size,
            cache.enable_prefix_caching,
            is_dense=config.has_dense_cache,
        )
        self.scheduler = Scheduler(config.scheduler, blocks, draft_source)
        self.plan = plan
        self.batch = make_batch(config)
        self.merged_prompts = min(config.scheduler.max_num_seqs, 2) * config.hpu.merged_prefill
        self.planner = HPULaunchPlanner(plan.catalog, plan.limits, self.batch, self.merged_prompts)
        self.inputs = HPUInputBuilder(
            self.batch, cache.block_size, reads_blocks=config.reads_blocks
        )
        self._depth = depth
        self.token_ids: defaultdict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, Finished] = {}
        self.new_names: list[str] = []
        self._outputs: deque[tuple[ModelRunnerOutput, ExpectedTokens]] = deque()

    def step(self, run: Run) -> bool:
        """Schedule a step, let `run` execute it, and process the oldest result.

        Args:
            run: executes the forward passes of a step.

        Returns:
            Whether there was something to run.
        """
        self.new_names.clear()
        step = self.scheduler.schedule()
        if not len(step.rows):
            self._take_in(0)
            return False
        self.batch.update(step)
        self.inputs.place([new.row for new in step.new_requests])
        launches: Any = self.planner.plan(step)
        rows = sampled_rows(step, self.batch)
        token_ids, counts = np.array(run(step, launches), np.int32), None
        expected = self.batch.expect(rows, num_drafts_of(step, rows))
        if expected.num_drafts is not None:
            assert expected.draft_ids is not None
            sizes = expected.num_drafts + 1
            counts = count_accepted(token_ids, expected.draft_ids, expected.num_drafts)
            token_ids = token_ids[positions_within(sizes) < np.repeat(counts, sizes)]
            self.inputs.place(rows[expected.num_drafts > 0].tolist())
        output = ModelRunnerOutput(
            step_id=step.step_id, rows=rows, token_ids=token_ids, num_tokens=counts
        )
        self._outputs.append((output, expected))
        self._take_in(self._depth)
        return True

    def _take_in(self, max_left: int) -> None:
        while len(self._outputs) > max_left:
            sampled, expected = self._outputs.popleft()
            self.batch.record(expected, sampled.token_ids, sampled.num_tokens)
            output = self.scheduler.update(sampled)
            tokens = iter(output.token_ids)
            counts = output.num_tokens or [1] * len(output.request_ids)
            for name, count in zip(output.request_ids, counts, strict=True):
                self.token_ids[name] += islice(tokens, count)
            self.finished.update(output.finished)
            self.new_names += output.request_ids


def sampled_rows(step: SchedulerOutput, batch: InputBatch) -> IntArray:
    """Return the batch indices of requests that sample: a step reaches their last token."""
    after = step.num_computed_tokens + step.num_scheduled_tokens
    return step.rows[after >= batch.num_tokens[step.rows]]


def num_drafts_of(step: SchedulerOutput, rows: IntArray) -> IntArray | None:
    """Return the number of drafts of some requests of a step; None if the step has no drafts."""
    if step.num_draft_tokens is None:
        return None
    counts = dict(zip(step.rows.tolist(), step.num_draft_tokens.tolist(), strict=True))
    return np.array([counts[row] for row in rows.tolist()], np.int32)


@dataclass
class PhaseTime:
    """Predicted device time of the forward passes of one phase."""

    padded_s: float = 0.0
    needed_s: float = 0.0
    """Seconds without padding."""
    padded_tokens: int = 0
    needed_tokens: int = 0

    @property
    def padding(self) -> float:
        """Time of padding, relative to the time without padding."""
        return self.padded_s / self.needed_s - 1 if self.needed_s else 0.0


@dataclass(frozen=True)
class Replay:
    """The result of a replay: times of the requests, and sizes of the forward passes."""

    table: TrafficTable
    """Sizes that the forward passes needed."""
    by_phase: dict[Phase, PhaseTime]
    seconds: float
    """Seconds from the first request to the end of the last one."""
    num_steps: int
    num_preemptions: int
    num_outputs: npt.NDArray[np.int64]
    """[n] tokens that were generated for each request."""
    kv_seconds: float
    """The part of the KV blocks that is in use, times seconds."""
    max_kv_usage: float
    """The largest part of the KV blocks that was in use."""
    arrivals: npt.NDArray[np.float64]
    """[n] seconds at which each request came."""
    first_tokens: npt.NDArray[np.float64]
    """[n] seconds at which each had its first token."""
    ends: npt.NDArray[np.float64]
    """[n] seconds at which each ended."""

    @property
    def padding(self) -> float:
        """Time of padding in both phases, relative to the time without padding."""
        padded = sum(time.padded_s for time in self.by_phase.values())
        needed = sum(time.needed_s for time in self.by_phase.values())
        return padded / needed - 1 if needed else 0.0


def replay(
    config: VllmConfig,
    num_blocks: int,
    plan: BucketPlan,
    requests: RequestLengths,
    cost: Cost,
    *,
    rate: float = 1.0,
) -> Replay:
    """Replay requests on a planned engine.

    No two of them share a prefix. Requests that are longer than the engine accepts are shortened.

    Args:
        config: config of the engine.
        num_blocks: KV blocks, the null block included.
        plan: its buckets.
        requests: requests to replay; without times, all arrive at once.
        cost: predicted seconds of a forward pass of a shape.
        rate: factor on the arrival rate of the file.
    """
    loop = ScheduleLoop(config, num_blocks, plan)
    longest = plan.limits.max_seq_len
    count = len(requests)
    arrivals = np.zeros(count) if requests.times is None else requests.times / rate
    first_tokens, ends = np.full(count, np.nan), np.full(count, np.nan)
    table = TrafficTable(config.cache.block_size)
    by_phase = {phase: PhaseTime() for phase in Phase}
    now, num_added, num_steps = 0.0, 0, 0
    num_outputs = np.zeros(count, np.int64)
    pool, kv_seconds, max_kv_usage = loop.scheduler.cache.pool, 0.0, 0.0
    costs: dict[Any, float] = {}
    times = arrivals.tolist()

    def seconds(bucket: Bucket) -> float:
        found = costs.get(bucket)
        if found is None:
            found = costs[bucket] = cost(bucket)
        return found

    def run(step: SchedulerOutput, launches: list[PaddedLaunch]) -> list[int]:
        nonlocal now, kv_seconds, max_kv_usage
        before = now
        for launch in launches:
            assert launch.needed is not None
            bucket = launch.bucket
            table.add(bucket.phase, *launch.needed)
            time = by_phase[bucket.phase]
            padded_s = seconds(bucket)
            time.padded_s += padded_s
            time.needed_s += seconds(Bucket(bucket.phase, *launch.needed))
            time.padded_tokens += bucket.num_tokens
            time.needed_tokens += int(launch.num_scheduled_tokens.sum())
            now += padded_s
        usage = 1 - pool.num_free / pool.num_usable_blocks
        kv_seconds += usage * (now - before)
        max_kv_usage = max(max_kv_usage, usage)
        rows = sampled_rows(step, loop.batch)
        drafts = num_drafts_of(step, rows)
        return [_TOKEN] * (len(rows) + (0 if drafts is None else int(drafts.sum())))

    num_finished = 0
    while num_finished < count:
        while num_added < count and times[num_added] <= now:
            loop.scheduler.add_request(_request(requests, num_added, longest))
            num_added += 1
        if not loop.step(run):
            now = max(now, times[num_added]) if num_added < count else now
            continue
        num_steps += 1
        for name in loop.new_names:
            if np.isnan(first_tokens[int(name)]):
                first_tokens[int(name)] = now
        for name in loop.finished:
            ends[int(name)] = now
            num_outputs[int(name)] = len(loop.token_ids.pop(name, ()))
            num_finished += 1
        loop.finished.clear()
    return Replay(
        table,
        by_phase,
        now,
        num_steps,
        loop.scheduler.stats().num_preemptions,
        num_outputs,
        kv_seconds,
        max_kv_usage,
        arrivals,
        first_tokens,
        ends,
    )


def _request(requests: RequestLengths, number: int, longest: int) -> EngineRequest:
    """Return a request of this length whose prompt has a unique beginning."""
    num_prompt = min(int(requests.num_inputs[number]), longest - 1)
    num_total = min(num_prompt + max(1, int(requests.num_outputs[number])), longest)
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=[number] * num_prompt,
        sampling_params=_PARAMS,
        seed=0,
        eos_token_id=None,
        max_total_tokens=num_total,
        arrival_time=0.0,
    )
