"""Random engines and loads for tests of the Gaudi path."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gaudi_sim.card.device import active_card
from vllm.bucketing import StepLimits
from vllm.bucketing.bucket import Bucket
from vllm.bucketing.catalog.bucket_plan import BucketPlan, plan_buckets
from vllm.bucketing.catalog.shrink import shrink_launches
from vllm.config import CacheConfig, HPUConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.errors import ConfigError
from vllm.messages import EngineRequest
from vllm.planning.replay import Run, ScheduleLoop
from vllm.sampling_params import SamplingParams
from vllm.worker.hpu.launches.input import fields_of, padded_sizes
from vllm.worker.hpu.launches.planner import (
    PaddedLaunch,
    PaddedShape,
    launch_shapes,
)
from vllm.worker.hpu.warmup.warmup import WarmUp
from vllm.worker.hpu.worker import HPUWorker
from vllm.worker.interface import WarmUpUpdate

EOS = 3
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Of every request: what is sampled is no business of the planner."""

Rows = list[tuple[int, int, int]]
"""Row, first position, tokens."""

_SCHEDULER_FIELDS = {
    "max_model_len",
    "max_draft_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
    "scheduling_policy",
}


def make_config(
    *, block_size: int = 4, enable_prefix_caching: bool = True, **settings: Any
) -> VllmConfig:
    """Make a configuration; settings are fields of SchedulerConfig or of HPUConfig."""
    limits = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    scheduler = {key: settings.pop(key) for key in _SCHEDULER_FIELDS & settings.keys()}
    return VllmConfig(
        model=ModelConfig(model="none"),
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        scheduler=SchedulerConfig(**{**limits, **scheduler}),
        hpu=HPUConfig(**settings),
    )


# ---- random configurations -----------------------------------------------------------------------


def random_plan(rng: random.Random, folder: Path) -> tuple[VllmConfig, int, BucketPlan]:
    """Return a random configuration, its number of KV blocks, and its buckets.

    Args:
        rng: random generator.
        folder: folder for a bucket file.
    """
    while True:
        config = random_config(rng, folder)
        scheduler, size = config.scheduler, config.cache.block_size
        least = -(-scheduler.max_model_len // size)
        # From too few blocks for the longest request to enough for all requests; mostly too few for
        # all.
        most = max(2, round(least * rng.choice([0.6, 1, 1.5, 2, 3, scheduler.max_num_seqs])))
        num_blocks = 1 + rng.randint(min(least, most), max(least, most))
        try:
            plan = plan_buckets(config, num_blocks)
        except ConfigError:  # these variables exclude each other
            continue
        if plan.limits.max_seq_len > 1:
            return config, num_blocks, shrunk_plan(rng, plan)


def shrunk_plan(rng: random.Random, plan: BucketPlan) -> BucketPlan:
    """Return a plan without some buckets, as if there were no memory for them; mostly with all
    buckets.
    """
    phase = rng.choice([plan.catalog.prefill, plan.catalog.decode])
    given_up = phase[-rng.randint(1, len(phase)) :]
    if rng.random() < 0.8 or len(given_up) == len(phase):
        return plan
    found = shrink_launches(plan.catalog.without(given_up), plan.limits, given_up)
    return plan if found is None else replace(plan, catalog=found[0], limits=found[1])


def random_config(rng: random.Random, folder: Path) -> VllmConfig:
    """Return a config with small values, so that every limit is reached soon."""
    max_model_len = rng.choice([rng.randint(4, 24), rng.randint(16, 64), rng.randint(48, 96)])
    max_num_seqs = rng.choice([1, 2, 3, 4, 6, 8, 8, 12])
    is_chunked = rng.random() < 0.6
    least = max_num_seqs if is_chunked else max(max_num_seqs, max_model_len)
    partial = rng.choice([1, 1, 2, 3])
    choice = rng.choice(["plain", "variables", "variables", "variables", "file", "other", "chosen"])
    hpu: dict[str, Any] = {}
    if choice == "variables":
        hpu["bucket_variables"] = random_variables(rng)
    elif choice == "file":
        path = folder / f"{rng.random()}.txt"
        path.write_text(random_bucket_file(rng))
        hpu["bucketing_file"] = str(path)
    elif choice == "other":
        hpu["bucketing_strategy"] = rng.choice(["exponential", "sparse"])
    elif choice == "chosen":
        hpu["bucketing_strategy"] = "optimal"
        hpu["chosen_buckets"] = tuple(
            (rng.randint(0, 1), rng.randint(1, 12), rng.randint(1, 20), rng.randint(1, 40))
            for _ in range(rng.randint(0, 8))
        )
    return make_config(
        block_size=rng.choice([1, 2, 4, 4, 8, 16]),
        enable_prefix_caching=rng.random() < 0.6,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=least + rng.choice([0, rng.randint(0, 12), rng.randint(0, 96)]),
        enable_chunked_prefill=is_chunked,
        max_num_partial_prefills=partial,
        max_long_partial_prefills=rng.randint(1, partial),
        long_prefill_token_threshold=rng.choice([0, 0, 2, rng.randint(1, max_model_len)]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        contiguous_pa=rng.random() < 0.6,
        merged_prefill=rng.random() < 0.15,
        max_draft_tokens=rng.choice([0, 0, 0, rng.randint(1, 6)]),
        **hpu,
    )


def random_variables(rng: random.Random) -> tuple[tuple[str, int], ...]:
    """Return some of the twelve variables, with sizes up to far below the size of a step."""
    high = {"PROMPT_BS": 6, "PROMPT_SEQ": 48, "DECODE_BS": 8, "DECODE_BLOCK": 40}
    return tuple(
        (f"VLLM_{key}_BUCKET_{part}", rng.randint(1, max(1, most // 4 if part == "MIN" else most)))
        for key, most in high.items()
        for part in ("MIN", "STEP", "MAX")
        if rng.random() < 0.4
    )


def random_bucket_file(rng: random.Random) -> str:
    """Write a few buckets into a file, perhaps of one phase only."""
    prompts = [f"({rng.randint(1, 4)}, {rng.randint(2, 40)}, {rng.randint(0, 8)})" for _ in "abc"]
    decodes = [f"({rng.randint(1, 8)}, 1, range(1, {rng.randint(2, 24)}, 3))" for _ in "ab"]
    return "\n".join(rng.choice([prompts, decodes, prompts + decodes]))


def random_request(
    rng: random.Random, name: str, max_len: int, stems: list[list[int]]
) -> EngineRequest:
    """Return a random request of up to `max_len` tokens, whose first tokens other requests may
    share.

    Args:
        rng: random generator.
        name: id of the request.
        max_len: at least 2.
        stems: possible beginnings of prompts.
    """
    total = rng.choice([rng.randint(2, max_len), rng.randint(2, max_len), max_len])
    num_prompt = total - min(
        total - 1, rng.choice([1, 2, rng.randint(1, 8), rng.randint(1, total)])
    )
    shared = rng.choice(stems)[: rng.choice([0, total, total, rng.randint(0, num_prompt)])]
    shared = shared[:num_prompt]
    own = rng.choices(range(3), k=num_prompt - len(shared))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=shared + own,
        sampling_params=PARAMS,
        seed=0,
        eos_token_id=EOS if rng.random() < 0.3 else None,
        max_total_tokens=total,
        arrival_time=float(rng.randrange(8)),
        priority=rng.choice([-1, 0, 0, 1]),
    )


# ---- running the requests ------------------------------------------------------------------------


def run_load(
    rng: random.Random, loop: ScheduleLoop, num_schedules: int, run: Run
) -> dict[str, EngineRequest]:
    """Let requests arrive, run and be cancelled at random.

    Args:
        rng: random generator.
        loop: an engine.
        num_schedules: number of steps in which a request runs.
        run: see `ScheduleLoop.step`.

    Returns:
        The requests that were not cancelled; some of them may not be finished.
    """
    engine, longest = loop.scheduler, loop.plan.limits.max_seq_len
    stems = [rng.choices(range(3), k=longest) for _ in range(rng.choice([1, 2, 4]))]
    crowd, cancels = rng.choice([0.2, 0.5, 0.8]), rng.choice([0, 0.02, 0.1])
    requests: dict[str, EngineRequest] = {}
    count = 0
    while num_schedules:
        while rng.random() < crowd and len(engine.waiting) < 12:
            request = random_request(rng, str(count), longest, stems)
            engine.add_request(request)
            requests[request.request_id] = request
            count += 1
        if rng.random() < cancels:
            name = str(max(0, count - 1 - rng.randrange(10)))
            engine.abort_requests([name])
            requests.pop(name, None)
        num_schedules -= loop.step(run)
    return requests


# ---- checks of a step ----------------------------------------------------------------------------


def entries(launches: list[PaddedLaunch]) -> Rows:
    """Return (batch index, computed tokens, scheduled tokens) of everything that the forward passes
    run, in order.
    """
    return [
        entry
        for launch in launches
        for entry in zip(
            launch.rows.tolist(),
            launch.num_computed_tokens.tolist(),
            launch.num_scheduled_tokens.tolist(),
            strict=True,
        )
    ]


def joined(rows: Rows) -> Rows:
    """Return the same work, with neighbouring pieces of a request joined."""
    whole: Rows = []
    for row, start, count in rows:
        if whole and whole[-1][0] == row and sum(whole[-1][1:]) == start:
            whole[-1] = (row, whole[-1][1], whole[-1][2] + count)
        else:
            whole.append((row, start, count))
    return whole


@cache
def warmed_shapes(bucket: Bucket, limits: StepLimits, merged_prompts: int) -> list[PaddedShape]:
    """Return `launch_shapes`, computed once."""
    return launch_shapes(bucket, limits, merged_prompts)


def input_sizes(shape: PaddedShape) -> tuple[int, ...]:
    """Return the number of elements of each part of the packed input. The last part has a batch
    index for each row of logits.
    """
    return fields_of(shape).part_sizes(padded_sizes(shape))


def run_warm_up(worker: HPUWorker | WarmUp) -> None:
    """Advance a warm-up to its end, as an executor with one worker does."""
    given_up = None
    while (step := worker.next_warm_up(WarmUpUpdate(given_up=given_up))) is not None:
        given_up = worker.warm_up() if step.given_up is None else step.given_up
        # Between two parts of the warm-up the caller may do other work, so no mode of the warm-up
        # may be active.
        assert not torch.is_inference_mode_enabled() and not active_card().is_compile_only
