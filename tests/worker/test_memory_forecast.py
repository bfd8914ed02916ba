"""Test that shapes that cannot fit are not tried, and that shapes that fit are tried."""

import random
import re
from contextlib import contextmanager

import pytest
from pytest import MonkeyPatch

from tests.exhaustive import exhaustive, seeds
from tests.hpu import FEW_BUCKETS, captured_log, simulated_hpu
from tests.reach import failed_allocations, planner_of, worker_of
from tests.worker.hpu_helpers import run_warm_up
from tests.worker.test_hpu_warmup import (
    LARGE_BUCKETS,
    LAZY,
    LONG_PROMPTS,
    MIB,
    check_memory,
    make_warm_up,
)
from vllm import LLM
from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.catalog.closure import prove
from vllm.config.hpu import PromptSlicing
from vllm.errors import ConfigError
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.memory.memory_profile import Attempt


def attempt_of(num_bytes: float, *, has_grown: bool = True, refused: int | None = None) -> Attempt:
    return Attempt(None, int(num_bytes), int(num_bytes), has_grown, refused)


def sizes_of(bucket: Bucket) -> list[int]:
    tokens = bucket.num_tokens
    return [1000, tokens * 4, tokens * bucket.query_len, bucket.batch * bucket.blocks * 7]


@pytest.mark.parametrize("seed", seeds(15, 40))
def test_a_launch_that_fits_is_never_refused(seed):
    """A forward pass needs the memory of its largest recipe, which is a sum of parts."""
    rng = random.Random(seed)
    recipes = [[rng.choice([0, rng.uniform(1, 50)]) for _ in range(4)] for _ in range(3)]

    def needs(bucket):
        parts = sizes_of(bucket)
        return max(sum(f * p for f, p in zip(r, parts, strict=True)) for r in recipes)

    grid = [prefill(b, q, c) for b in (1, 2, 4) for q in (16, 64, 256) for c in (0, 4)]
    forecast, kept = MemoryForecast(), 0.0
    for bucket in rng.sample(grid, 8):
        has_grown, kept = needs(bucket) > kept, max(kept, needs(bucket))
        forecast.add(PaddedShape(bucket), attempt_of(kept, has_grown=has_grown))
    for bucket in grid:
        assert forecast.exceeds(PaddedShape(bucket), int(needs(bucket)) + 1) is None


@pytest.mark.parametrize(
    ("seen", "asked", "predicted"),
    [
        # Measured: 100 bytes, and 2 bytes for each block.
        ([(decode(4, 50), 200), (decode(4, 100), 300)], decode(4, 400), 900),
        # For twice as many tokens: all of the constant 100 bytes may grow with the tokens.
        ([(decode(4, 50), 200), (decode(4, 100), 300)], decode(8, 400), 900),
        # Prompts need 1 byte for each pair of tokens.
        ([(prefill(1, 64), 4096), (prefill(1, 128), 16384)], prefill(1, 256), 65536),
        # One measurement does not show how memory grows.
        ([(decode(4, 100), 300)], decode(4, 400), None),
        # Measurements of larger shapes show nothing about a smaller shape.
        ([(decode(4, 50), 200), (decode(4, 100), 300)], decode(2, 400), None),
        # Measurements of prompts show nothing about decodes.
        ([(prefill(1, 64), 4096), (prefill(1, 128), 16384)], decode(1, 400), None),
    ],
)
def test_a_larger_launch_is_predicted_from_two_smaller_ones(seen, asked, predicted):
    forecast = MemoryForecast()
    for bucket, num_bytes in seen:
        forecast.add(PaddedShape(bucket), attempt_of(num_bytes))
    found = forecast.exceeds(PaddedShape(asked), 100)
    assert found == (None if predicted is None else pytest.approx(predicted, abs=1))
    if predicted is not None:
        assert forecast.exceeds(PaddedShape(asked), predicted) is None


def test_the_mask_of_a_sliced_prompt_grows_with_its_keys_alone():
    """The mask has one byte for each score of the 128 queries that run at a time."""
    sliced = MemoryForecast(PromptSlicing(256, 128), block_size=16)
    assert [sliced.num_scores(prefill(2, q)) for q in (64, 256, 512)] == [2 * 64**2, 2**17, 2**17]
    for forecast, most in ((sliced, 128 * 4096), (MemoryForecast(), 4096**2)):
        for query_len in (512, 1024):
            num_bytes = forecast.num_scores(prefill(1, query_len))
            forecast.add(PaddedShape(prefill(1, query_len)), attempt_of(num_bytes))
        assert forecast.exceeds(PaddedShape(prefill(1, 4096)), 1000) == most
        assert forecast.exceeds(PaddedShape(prefill(1, 4096)), most) is None


def test_a_failed_launch_and_one_within_the_workspace_are_no_measurements():
    forecast = MemoryForecast()
    forecast.add(PaddedShape(decode(4, 50)), attempt_of(200))
    forecast.add(PaddedShape(decode(4, 100)), attempt_of(300, has_grown=False))
    forecast.add(PaddedShape(decode(4, 100)), attempt_of(300, refused=10))
    assert forecast.exceeds(PaddedShape(decode(4, 400)), 100) is None


# ---- on the simulated card --------------------------------------------------------------------


@contextmanager
def failures_counted(*, is_predicted: bool):
    """Yield a list of the failed allocations of the card in this context.

    Args:
        is_predicted: use the forecast; False: try every shape.
    """
    with MonkeyPatch.context() as patch:
        failed = failed_allocations(patch)
        if not is_predicted:
            patch.setattr(MemoryForecast, "exceeds", lambda *_: None)
        yield failed


def start(pool_mib: int, *, is_predicted: bool):
    """Start an engine; return the failed allocations, the shapes that it can run, and the log."""
    variables = LARGE_BUCKETS | LAZY | {"VLLM_GRAPH_RESERVED_MEM": 0.4}
    with (
        simulated_hpu(pool_bytes=pool_mib * MIB, **variables),
        captured_log() as log,
        failures_counted(is_predicted=is_predicted) as failed,
    ):
        llm = LLM(**LONG_PROMPTS)
        worker = worker_of(llm)
        check_memory(worker)
        catalog = worker.runner.launches.planner.catalog
    return failed, (catalog.prefill, catalog.decode), log


@pytest.mark.parametrize(("pool_mib", "num_lost"), [(56, 1), exhaustive(100, 0)])
def test_a_start_in_little_memory_fails_no_allocation_and_loses_no_bucket_that_fits(
    pool_mib, num_lost
):
    tried, tried_buckets, _ = start(pool_mib, is_predicted=False)
    failed, buckets, log = start(pool_mib, is_predicted=True)
    assert len(tried) == num_lost and not failed
    assert buckets == tried_buckets
    lines = [line for line in log if "is not used" in line]
    assert len(lines) == num_lost
    assert all("as predicted from smaller ones, but only " in line for line in lines)


@pytest.mark.usefixtures("all_layers")
# Exhaustive: that the same start fails without the forecast.
@pytest.mark.parametrize("is_predicted", [True, exhaustive(False)])
def test_slices_beyond_the_profiling_run_begin_with_the_smallest_and_end_before_a_failure(
    is_predicted,
):
    variables = FEW_BUCKETS | LAZY | {"VLLM_CONTIGUOUS_PA": 1, "VLLM_GRAPH_RESERVED_MEM": 0}
    variables |= {"VLLM_DECODE_BS_BUCKET_MIN": 64, "VLLM_DECODE_BLOCK_BUCKET_STEP": 250}
    many = {"max_model_len": 512, "max_num_seqs": 64, "num_gpu_blocks_override": 2000}
    settings = {**many, "gpu_memory_utilization": 0.98}
    with (
        simulated_hpu(pool_bytes=236 * MIB, **variables) as bridge,
        captured_log() as log,
        failures_counted(is_predicted=is_predicted) as failed,
    ):
        forecast = MemoryForecast()
        warm_up = make_warm_up(bridge, workspace=12 * MIB, forecast=forecast, **settings)
        if not is_predicted:
            # The card keeps the workspace of the largest forward pass that could run. This
            # workspace is larger than the memory for forward passes, so the start fails.
            with pytest.raises(ConfigError, match="no decode bucket fits"):
                run_warm_up(warm_up)
            assert failed
            return
        forecast.max_blocks = 32
        forecast.passing_bytes = 5 * MIB  # short-lived tensors of prompts
        run_warm_up(warm_up)
        planner = planner_of(warm_up)
    assert not failed
    lost = [line for line in log if "is not used" in line]
    assert any("as predicted from smaller ones" in line for line in lost)
    assert prove(planner.catalog, planner.limits).is_covered
    assert len(planner.catalog.warmed) == len(planner.catalog)
    pattern = re.compile(r"\[Warmup\]\[Decode\].* seq_len:(\d+)")
    order = [int(found[1]) for line in log if (found := pattern.match(line))]
    assert order[:3] == [64, 128, 250], "the smallest of the long slices comes first"
