"""Test that shapes that were compiled late are used like warmed-up ones, until padding to them
costs too much.
"""

import random

import numpy as np
import pytest

from tests.bucketing.helpers import make_limits
from tests.hpu import SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import recorded_launches, runner_of
from tests.worker.test_hpu_planner import make_step
from vllm import LLM, SamplingParams
from vllm.bucketing import Phase
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.hpu.launches.late_shapes import COMPILE_COST, LateShapes
from vllm.worker.hpu.launches.planner import HPULaunchPlanner, PaddedShape

SIZE = 16
BUCKETS = [
    *(prefill(batch, length) for batch in (1, 2, 4) for length in (16, 64, 256)),
    *(decode(batch, blocks) for batch in (1, 2, 4) for blocks in (2, 8, 32)),
]


class Launcher:
    """A planner whose forward passes compile the shapes in which they run.

    Args:
        tables: block ids by batch index.
        limits: limits of a forward pass.
    """

    def __init__(self, tables=None, **limits) -> None:
        self.catalog = Catalog(
            [b for b in BUCKETS if b.phase is Phase.PREFILL],
            [b for b in BUCKETS if b.phase is Phase.DECODE],
        )
        self.batch = batch = InputBatch(max_num_seqs=8, max_model_len=2048, max_blocks=128)
        for row, blocks in (tables or {}).items():
            batch.block_table[row, : len(blocks)] = blocks
        defaults = {"block_size": SIZE, "max_num_seqs": 8, "enable_chunked_prefill": True}
        self.late = LateShapes()
        self.planner = HPULaunchPlanner(
            self.catalog, make_limits(**{**defaults, **limits}), batch, late=self.late
        )
        self.compiled: list[PaddedShape] = []

    def run(self, *rows: tuple[int, int, int]) -> list[PaddedShape]:
        """Plan and run a step. Returns the shapes of its forward passes."""
        columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)]
        shapes = [launch.shape for launch in self.planner.plan(make_step(*columns))]
        for shape in shapes:
            if not self.planner.is_compiled(shape):
                self.late.add(shape)
                self.compiled.append(shape)
        return shapes


def test_a_later_launch_is_padded_to_what_has_compiled():
    launcher = Launcher()
    assert launcher.run((0, 0, 200)) == [PaddedShape(prefill(1, 256))]
    assert launcher.run((0, 0, 3)) == [PaddedShape(prefill(1, 256))]
    # Two prompts run in two forward passes of a compiled shape, instead of one that is not
    # compiled.
    assert launcher.run((0, 0, 10), (1, 0, 30)) == [PaddedShape(prefill(1, 256))] * 2
    first = launcher.run((0, 400, 1), (1, 16, 1))
    assert first == [PaddedShape(decode(2, 32))]
    assert launcher.run((0, 3, 1)) == first
    # Three requests do not fit into the first shape.
    assert launcher.run((0, 3, 1), (1, 3, 1), (2, 3, 1)) != first
    assert len(launcher.compiled) == 3


@pytest.mark.parametrize(
    ("large", "small", "bucket"),
    [((0, 0, 256), (0, 0, 16), prefill(1, 16)), ((0, 500, 1), (0, 3, 1), decode(1, 2))],
)
def test_a_shape_that_is_needed_again_and_again_is_compiled_in_the_end(large, small, bucket):
    launcher = Launcher()
    (padded,) = launcher.run(large)
    wanted = PaddedShape(bucket)
    loss = padded.cost - wanted.cost
    times = 0
    while launcher.run(small) == [padded]:
        times += 1
    assert launcher.compiled == [padded, wanted]
    # Padding has now cost about as much as compiling would.
    assert times * loss <= COMPILE_COST[bucket.phase] < (times + 1) * loss
    assert launcher.run(small) == [wanted]


def test_only_the_shape_that_was_compiled_is_compiled():
    """The decodes of a bucket have three shapes: a slice, a slice with shared blocks, and a
    gather.
    """
    limits = {"contiguous_pa": True, "num_blocks": 64, "enable_prefix_caching": True}
    low, high = {0: [1, 2], 1: [3, 4]}, {0: [1, 2], 1: [3, 60]}
    launcher = Launcher(low, **limits)
    (slice_,) = launcher.run((0, 31, 1), (1, 31, 1))
    assert slice_ == PaddedShape(decode(2, 8), is_contiguous=True)
    assert launcher.catalog.warmed == frozenset()
    # The same number of blocks, but with ids that no compiled slice reaches: no compiled shape
    # fits.
    for row, blocks in high.items():
        launcher.batch.block_table[row, : len(blocks)] = blocks
    (gather,) = launcher.run((0, 31, 1), (1, 31, 1))
    assert gather == PaddedShape(decode(2, 8)) and len(launcher.compiled) == 2
    # One request with low block ids fits into both shapes, and takes the slice, which costs less.
    assert launcher.run((0, 31, 1)) == [slice_]
    assert launcher.run((1, 31, 1)) == [gather]


def test_what_is_warmed_up_comes_first_where_it_costs_least():
    launcher = Launcher()
    launcher.catalog.mark_warmed([prefill(4, 256), decode(4, 32)])
    assert launcher.run((0, 0, 5)) == [PaddedShape(prefill(4, 256))]
    assert launcher.run((0, 5, 1)) == [PaddedShape(decode(4, 32))]
    launcher.late.add(PaddedShape(prefill(1, 64)))
    assert launcher.run((0, 0, 5)) == [PaddedShape(prefill(1, 64))]
    assert not launcher.compiled


@pytest.mark.parametrize("seed", range(8))
def test_padding_never_costs_more_than_compiling_every_shape(seed):
    rng = random.Random(seed)
    launcher, wanted = Launcher(), set()
    padded = exact = 0
    for _ in range(400):
        rows = rng.randint(1, 4)
        is_prompt = rng.random() < 0.5
        steps = [(r, 0, rng.choice([4, 40, 200])) for r in range(rows)]
        if not is_prompt:
            steps = [(r, rng.choice([3, 60]), 1) for r in range(rows)]
        padded += sum(shape.cost for shape in launcher.run(*steps))
        cheapest = Launcher().run(*steps)
        wanted |= set(cheapest)
        exact += sum(shape.cost for shape in cheapest)
    assert set(launcher.compiled) <= wanted
    most = sum(COMPILE_COST[shape.bucket.phase] for shape in wanted)
    assert padded - exact <= most


def test_without_a_warm_up_a_request_that_fits_compiles_nothing():
    variables = {"PT_HPU_LAZY_MODE": 1, "VLLM_SKIP_WARMUP": 1}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def prompts(*lengths):
        # Random prompts have no common prefix, which would be context.
        rng = random.Random(sum(lengths))
        return [{"prompt_token_ids": rng.choices(range(16, 4000), k=n)} for n in lengths]

    with simulated_hpu(has_profiling_run=False, **variables) as bridge, captured_log() as log:
        llm = LLM(**SMALL_ENGINE | {"max_num_batched_tokens": 128})
        llm.generate(prompts(60, 50), params, use_tqdm=False)
        before = bridge.counters().compilations
        outputs = llm.generate(prompts(9, 30), params, use_tqdm=False)
        outputs += llm.generate(prompts(20), params, use_tqdm=False)
        assert bridge.counters().compilations == before
        llm.generate(prompts(60, 60, 60, 60), params, use_tqdm=False)
        assert bridge.counters().compilations > before, "the test would not see compilations"
    assert any("was not warmed-up" in line for line in log)
    llm = LLM(dtype="float32", max_model_len=128, max_num_seqs=4, device="cpu")
    expected = llm.generate(prompts(9, 30), params, use_tqdm=False)
    expected += llm.generate(prompts(20), params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_a_bucket_is_not_warm_before_all_of_its_shapes_are_compiled(monkeypatch):
    variables = {"PT_HPU_LAZY_MODE": 1, "VLLM_SKIP_WARMUP": 1}
    with simulated_hpu(has_profiling_run=False, **variables), captured_log():
        llm = LLM(**SMALL_ENGINE)
        recorded = recorded_launches(runner_of(llm), monkeypatch)
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        llm.generate({"prompt_token_ids": [20] * 30}, params, use_tqdm=False)
        launches = runner_of(llm).launches
        catalog = launches.planner.catalog
        assert {bucket.phase for bucket in catalog.warmed} == {Phase.PREFILL}
        buckets = {launch.bucket for launch, _ in recorded}
        (used,) = {bucket for bucket in buckets if bucket.phase is Phase.DECODE}
        assert len(launches.launch_shapes(used)) > 1
