"""Test that each step of the scheduler under random load is within the limits, and so has a
bucket.
"""

import random

import numpy as np
import pytest

from tests.bucketing.helpers import close
from tests.reach import scheduled_steps_of
from vllm.bucketing.bucket import Phase
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.step_limits import StepLimits
from vllm.config import SchedulerConfig
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.scheduler import Scheduler
from vllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput
from vllm.sampling_params import SamplingParams

BLOCK_SIZE = 2


def make_limits(rng: random.Random, chunked: bool, caching: bool) -> StepLimits:
    max_model_len = rng.randint(4, 24)
    seqs = rng.randint(1, 6)
    return StepLimits(
        max_num_seqs=seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=rng.randint(seqs if chunked else max(seqs, max_model_len), 24),
        block_size=BLOCK_SIZE,
        num_blocks=rng.randint(3, 30),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
    )


def make_scheduler(limits: StepLimits) -> Scheduler:
    assert limits.num_blocks is not None
    config = SchedulerConfig(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_chunked_prefill=limits.enable_chunked_prefill,
    )
    cache = KVCacheManager(limits.num_blocks, BLOCK_SIZE, limits.enable_prefix_caching)
    return Scheduler(config, cache)


def make_request(rng: random.Random, name: int, limits: StepLimits) -> EngineRequest:
    """Make a request whose prompt has few distinct tokens, so that it shares prefixes with
    others.
    """
    total = rng.randint(2, limits.max_seq_len)
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, total - 1))]
    return EngineRequest(
        request_id=str(name),
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=total - len(prompt), temperature=0.0),
        seed=0,
        eos_token_id=None,
        max_total_tokens=total,
        arrival_time=float(name),
    )


def launches(step: SchedulerOutput) -> list[tuple[Phase, int, int, int]]:
    """Return one decode of all requests with a single token, and one prefill for each other
    request.
    """
    computed, scheduled = step.num_computed_tokens, step.num_scheduled_tokens
    is_decode = scheduled == 1
    found = [
        (Phase.PREFILL, 1, int(query_len), -(-int(before) // BLOCK_SIZE))
        for before, query_len in zip(computed[~is_decode], scheduled[~is_decode], strict=True)
    ]
    if is_decode.any():
        refs = int((-(-(computed[is_decode] + 1) // BLOCK_SIZE)).sum())
        found.append((Phase.DECODE, int(is_decode.sum()), 1, refs))
    return found


def answer(rng: random.Random, scheduler: Scheduler, step: SchedulerOutput) -> None:
    rows = step.rows
    booked = scheduled_steps_of(scheduler)[-1].rows
    assert set(booked.tolist()) <= set(rows.tolist())
    tokens = np.array([rng.randrange(2) for _ in booked], np.int32)
    scheduler.update(ModelRunnerOutput(step_id=step.step_id, rows=booked, token_ids=tokens))


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_every_launch_of_a_random_load_has_a_bucket(chunked, caching):
    rng = random.Random(7)
    num_launches = 0
    for _ in range(25):
        limits = make_limits(rng, chunked, caching)
        catalog = close(Catalog([], []), limits)
        scheduler = make_scheduler(limits)
        for name in range(60):
            if limits.max_seq_len < 2:
                break
            if rng.random() < 0.6:
                scheduler.add_request(make_request(rng, name, limits))
            if rng.random() < 0.05:
                scheduler.abort_requests([str(rng.randrange(name + 1))])
            step = scheduler.schedule()
            if not len(step.rows):
                continue
            for phase, batch, query_len, blocks in launches(step):
                assert catalog.fit(phase, batch, query_len, blocks) is not None
                if phase is Phase.DECODE:
                    assert blocks <= limits.max_decode_blocks(batch)
                else:
                    assert query_len <= limits.max_query_len
                    assert blocks <= limits.max_context_blocks(query_len)
                num_launches += 1
            answer(rng, scheduler, step)
    assert num_launches > 500
