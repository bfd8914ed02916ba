"""Test that a warm-up does not run out of memory: shapes that do not fit are given up, and every
request is still served.
"""

import io
import random
import re
import sys

import pytest

from gaudi_sim.bridge import SimBridge
from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import bind_caches, planner_of, worker_of
from tests.worker.hpu_helpers import run_warm_up
from vllm import LLM, SamplingParams
from vllm.bucketing import MemoryClass, Phase
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.closure import prove
from vllm.cost_model import constants
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.worker.hpu.memory.memory import divide_memory, make_ledger
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.warmup import warmup as hpu_warmup
from vllm.worker.hpu.warmup.warmup import WarmUp
from vllm.worker.hpu.worker import HPUWorker
from vllm.worker.interface import WarmUpUpdate

MIB = 2**20
HELD = (MemoryClass.WEIGHTS, MemoryClass.WORKSPACE, MemoryClass.KV_CACHE)
GRAPHS = (MemoryClass.PREFILL_GRAPHS, MemoryClass.DECODE_GRAPHS)
LAZY = {"PT_HPU_LAZY_MODE": 1}

LONG_PROMPTS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "block_size": 64,
    "sampling_warmup": "all",
}
LARGE_BUCKETS = {
    "VLLM_PROMPT_BS_BUCKET_MAX": 2,
    "VLLM_PROMPT_SEQ_BUCKET_MIN": 128,
    "VLLM_PROMPT_SEQ_BUCKET_STEP": 256,
    "VLLM_DECODE_BS_BUCKET_MIN": 4,
    "VLLM_PROMPT_USE_FUSEDSDPA": 0,
}
"""Attention with all scores in memory: 32 MiB for two prompts of 512 tokens, several times over."""


@pytest.fixture(scope="module")
def load():
    """Return prompts of up to 500 tokens, and the tokens that the CPU generates from them."""
    rng = random.Random(2)
    lengths = [1, 100, 256, 257, 500, 499, 40, 300]
    prompts = [{"prompt_token_ids": rng.choices(range(16, 4000), k=n)} for n in lengths]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
    llm = LLM(dtype="float32", max_model_len=512, max_num_seqs=4, device="cpu")
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return prompts, params, [output.outputs[0].token_ids for output in outputs]


def check_memory(worker: HPUWorker) -> None:
    """Check that booked memory is within its budget, that memory in use is booked, and that all
    shapes are warmed up.
    """
    ledger, catalog = worker.ledger, worker.runner.launches.planner.catalog
    assert all(0 <= ledger.booked(cls) <= ledger.budget(cls) for cls in MemoryClass)
    assert ledger.unassigned_bytes >= 0
    held = sum(ledger.booked(cls) for cls in HELD + GRAPHS)
    memory = worker.bridge.memory_info()
    assert memory.total_bytes - memory.free_bytes <= held
    assert len(catalog.warmed) == len(catalog)


@pytest.mark.parametrize(
    ("pool_mib", "is_eager"),
    [
        *((30, False), (48, True)),
        # Exhaustive: test_memory_forecast.py starts with 56 MiB too.
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in ((36, True), (56, False), (70, True), (130, False))
        ),
    ],
)
def test_whatever_memory_there_is_a_start_serves_or_says_why_not(pool_mib, is_eager, load):
    prompts, params, want = load
    variables = LARGE_BUCKETS | LAZY | {"VLLM_GRAPH_RESERVED_MEM": 0.4}
    with simulated_hpu(pool_bytes=pool_mib * MIB, **variables) as bridge, captured_log() as log:
        try:
            llm = LLM(**LONG_PROMPTS, enforce_eager=is_eager)
        except ConfigError as error:
            assert pool_mib < 48 and "\n" not in str(error)
            return
        assert pool_mib > 30
        worker = worker_of(llm)
        check_memory(worker)
        before = bridge.counters()
        bridge.reset_peak()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert bridge.counters().compilations == before.compilations
        assert bridge.peak_bytes() <= sum(worker.ledger.booked(cls) for cls in HELD + GRAPHS)
    assert [output.outputs[0].token_ids for output in outputs] == want
    assert not any("was not warmed-up" in line for line in log)
    dropped = [line for line in log if "is not used: a forward pass takes" in line]
    assert dropped or pool_mib > 50


def make_warm_up(
    bridge, *, workspace: int, forecast: MemoryForecast | None = None, **settings
) -> WarmUp:
    """Make a worker with its cache, about to warm up, and a ledger without memory for graphs."""
    worker = HPUWorker(EngineArgs(**SMALL_ENGINE | settings).create_engine_config())
    worker.load(0)
    memory, block_bytes = bridge.memory_info(), worker.runner.cache_layout.block_bytes
    report = divide_memory(
        worker.config,
        free_bytes=memory.free_bytes,
        launch_bytes=workspace,
        block_bytes=block_bytes,
    )
    num_blocks = report.num_blocks
    ledger = make_ledger(worker.config, report, memory.total_bytes, num_blocks)
    for cls in GRAPHS:
        ledger.assign(cls, 0)
    ledger.assign(MemoryClass.KV_CACHE, ledger.left(MemoryClass.KV_CACHE) + ledger.unassigned_bytes)
    bind_caches(worker, num_blocks)
    ledger.book(MemoryClass.KV_CACHE, num_blocks * block_bytes)
    plan = plan_buckets(worker.config, num_blocks)
    worker.runner.launches.use_catalog(plan.catalog, plan.limits)
    return WarmUp(worker.config, bridge, worker.runner, plan.catalog, plan.limits, ledger, forecast)


def test_a_slice_of_the_cache_that_needs_too_much_is_given_up_with_its_cost():
    variables = FEW_BUCKETS | LAZY | {"VLLM_CONTIGUOUS_PA": 1}
    variables |= {"VLLM_DECODE_BS_BUCKET_MIN": 64, "VLLM_DECODE_BLOCK_BUCKET_STEP": 1000}
    many = {"max_model_len": 512, "max_num_seqs": 64, "num_gpu_blocks_override": 2000}
    with simulated_hpu(**variables) as bridge, captured_log() as log:
        warm_up = make_warm_up(bridge, workspace=16 * MIB, **many)
        run_warm_up(warm_up)
        planner = planner_of(warm_up)
    lost = [line for line in log if "is not used" in line]
    assert re.fullmatch(
        r"The bucket decode \(64, 1, 2000\) is not used: a forward pass takes [\d.]+ MiB, but "
        "only 16 MiB are reserved for forward passes",
        lost[0],
    )
    assert not planner.limits.contiguous_pa
    assert prove(planner.catalog, planner.limits).is_covered
    assert len(planner.catalog.warmed) == len(planner.catalog)


def test_without_memory_for_the_smallest_launch_the_error_names_what_to_lower():
    with simulated_hpu(**FEW_BUCKETS | LAZY) as bridge, captured_log():
        warm_up = make_warm_up(bridge, workspace=5 * MIB)
        with pytest.raises(ConfigError, match=r"no prefill bucket fits.*--max-model-len \(128\)"):
            run_warm_up(warm_up)


# ---- graphs ---------------------------------------------------------------------------------


def graph_lines(log: list[str]) -> list[str]:
    """Return phase, batch and size of each graph, in the order in which their captures began."""
    pattern = re.compile(
        r"\[Warmup\]\[Graph/(\w+)\]\[.*\] batch_size:(\d+) seq_len:(\d+)(?: num_blocks:(\d+))?"
    )
    found = (pattern.match(line) for line in log)
    return [" ".join(filter(None, match.groups())) for match in found if match]


SIX_LAUNCHES = FEW_BUCKETS | {"VLLM_PROMPT_BS_BUCKET_MAX": 4, "VLLM_PROMPT_SEQ_BUCKET_MAX": 64}
"""Five of prompts and one of decodes."""


@pytest.mark.usefixtures("all_layers")
def test_graphs_beyond_their_memory_are_left_out_and_all_is_still_served(monkeypatch):
    # Weights use 21 MiB and workspaces 10 MiB; a tenth of the rest is for graphs, which is enough
    # for three or four graphs.
    monkeypatch.setattr(constants, "GRAPH_BYTES_PER_OP", 10_000)
    with (
        simulated_hpu(pool_bytes=160 * MIB, **SIX_LAUNCHES | LAZY) as bridge,
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE | {"num_gpu_blocks_override": None})
        worker = worker_of(llm)
        check_memory(worker)
        captures = bridge.counters().graph_captures
        before = bridge.counters()
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [20] * n} for n in (20, 90)], params, use_tqdm=False)
        after = bridge.counters()
    left_out = [line for line in log if line.startswith("no graph for")]
    assert len(left_out) == 6 - len(worker.runner.launches.execution.shapes) > 0
    assert captures >= len(worker.runner.launches.execution.shapes) > 0
    assert after.graph_replays > before.graph_replays
    assert after.compilations == before.compilations
    assert any(re.match(r"Graph/Prompt captured:[1-4] \(\d\d.0%\)", line) for line in log)


def test_a_graph_that_does_not_fit_the_card_is_left_out(monkeypatch):
    monkeypatch.setattr(constants, "GRAPH_BYTES_PER_OP", MIB)
    with (
        simulated_hpu(pool_bytes=128 * MIB, **SIX_LAUNCHES | LAZY) as bridge,
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE)
        check_memory(worker_of(llm))
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        llm.generate({"prompt_token_ids": [20] * 20}, params, use_tqdm=False)
        assert bridge.counters().graph_replays == 0
    assert sum(line.startswith("no graph for") for line in log) == 6


PROMPT_GRAPHS = ["Prompt 1 32", "Prompt 1 32 8"]
DECODE_GRAPHS = ["Decode 1 8", "Decode 2 16", "Decode 4 16", "Decode 4 32"]


@pytest.mark.parametrize(
    ("variables", "order"),
    [
        ({}, [*PROMPT_GRAPHS, "Prompt 2 32", *DECODE_GRAPHS[2:], *DECODE_GRAPHS[1::-1]]),
        (
            {"VLLM_GRAPH_PROMPT_STRATEGY": "max_bs", "VLLM_GRAPH_DECODE_STRATEGY": "min_tokens"},
            ["Prompt 2 32", *PROMPT_GRAPHS, *DECODE_GRAPHS],
        ),
    ],
)
def test_graphs_are_captured_in_the_order_that_was_asked_for(variables, order):
    buckets = FEW_BUCKETS | {
        "VLLM_PROMPT_BS_BUCKET_MAX": 2,
        "VLLM_DECODE_BS_BUCKET_MIN": 1,
        "VLLM_DECODE_BLOCK_BUCKET_MIN": 16,
        "VLLM_DECODE_BLOCK_BUCKET_STEP": 16,
    }
    variables = buckets | LAZY | variables
    with simulated_hpu(has_profiling_run=False, **variables), captured_log() as log:
        LLM(**SMALL_ENGINE)
    assert graph_lines(log) == order


def test_the_share_of_prompts_reaches_the_graphs():
    variables = FEW_BUCKETS | LAZY | {"VLLM_GRAPH_PROMPT_RATIO": 0.75}
    with simulated_hpu(pool_bytes=200 * MIB, **variables), captured_log() as log:
        llm = LLM(**SMALL_ENGINE)
        worker = worker_of(llm)
        prompt, decode = (worker.ledger.budget(cls) for cls in GRAPHS)
    assert prompt == pytest.approx(3 * decode, rel=1e-6)
    assert any(line.endswith("(VLLM_GRAPH_PROMPT_RATIO=0.75)") for line in log)


# ---- progress -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(is_terminal, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", shown)
    with hpu_warmup.progress_bar(Phase.DECODE) as bar:
        bar.total = 2
        bar.update()
    assert ("Decode warm-up" in shown.getvalue()) == is_terminal


# ---- compile-only mode ----------------------------------------------------------------------


@pytest.mark.parametrize(("is_lazy", "can"), [(True, True), (True, False), (False, False)])
def test_everything_is_compiled_without_a_launch_and_then_launched_once(is_lazy, can, monkeypatch):
    monkeypatch.setattr(SimBridge, "can_compile_only", can)
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS) as bridge, captured_log():
        config = EngineArgs(**SMALL_ENGINE, enforce_eager=True).create_engine_config()
        worker = HPUWorker(config)
        worker.load(0)
        worker.allocate(worker.measure().num_blocks)
        done: list[tuple[str, int, int]] = []
        while step := worker.next_warm_up(WarmUpUpdate()):
            before = bridge.counters()
            assert worker.warm_up() is None
            bridge.synchronize()
            after = bridge.counters()
            launches, compiled = (
                getattr(after, name) - getattr(before, name)
                for name in ("launches", "compilations")
            )
            done.append((step.phase, launches, compiled))
        (num_shapes,) = {
            sum(len(worker.runner.launches.launch_shapes(b)) for b in (*c.prefill, *c.decode))
            for c in [worker.runner.launches.planner.catalog]
        }
    compiling = [each for each in done if each[0].endswith("buckets")]
    launching = [each for each in done if each[0].endswith("launches")]
    assert len(launching) == num_shapes and all(launches for _, launches, _ in launching)
    assert len(compiling) == (num_shapes if can else 0)
    if can:
        assert not any(launches for _, launches, _ in compiling)
        assert any(compiled for *_, compiled in compiling)
        assert not any(compiled for *_, compiled in launching)
