"""Test the worker on the simulated card: memory sizes, refused settings, and step reports."""

import re
from dataclasses import replace

import pytest

from gaudi_sim.card.memory import Allocation
from tests.engine.fakes import make_config
from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, captured_log, simulated_hpu
from tests.worker.hpu_helpers import run_warm_up
from vllm import LLM, SamplingParams
from vllm.bucketing import MemoryClass
from vllm.bucketing.catalog.bucket_plan import plan_buckets, step_limits
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.log_lines import num_blocks_line
from vllm.config.hpu import HPUConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.worker.hpu.memory.memory import divide_memory, make_ledger
from vllm.worker.hpu.warmup.profile import held_bytes
from vllm.worker.hpu.warmup.warmup import WarmUp
from vllm.worker.hpu.worker import HPUWorker
from vllm.worker.parts.memory_use import CacheBudget, draft_use, states_use, weights_use

GIB, MIB = 2**30, 2**20
BLOCK_BYTES = 16 * MIB  # a block of 128 tokens of Llama-3.1-8B in bfloat16


def loaded_worker(**settings) -> HPUWorker:
    worker = HPUWorker(EngineArgs(**SMALL_ENGINE | settings).create_engine_config())
    worker.load(0)
    return worker


def take_up_to(bridge, num_bytes: int) -> Allocation:
    """Fill the card until this many bytes are in use, as if a large model were loaded."""
    pool = bridge.card.memory
    return Allocation(pool, num_bytes - pool.in_use_bytes)


@pytest.mark.parametrize(
    ("free_gib", "utilization", "reserved", "lines"),
    [
        (
            79.2247,
            0.9,
            0.1,
            [
                "Free device memory: 79.22 GiB, 71.3 GiB usable (gpu_memory_utilization=0.9), "
                "7.13 GiB reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.1), 64.17 GiB "
                "reserved for KV cache",
                "# HPU blocks: 4107, # CPU blocks: 0",
                "Using 7.13 GiB/15.05 GiB of free device memory for HPUGraphs, 2.139 GiB for "
                "prompt and 4.991 GiB for decode (VLLM_GRAPH_PROMPT_RATIO=0.3)",
            ],
        ),
        (
            # A published log has 4.755 GiB and 11.095 GiB here: 0.3 and 0.7 of 15.85, which is a
            # rounded value.
            79.1645,
            0.5,
            0.4,
            [
                "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), "
                "15.83 GiB reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB "
                "reserved for KV cache",
                "# HPU blocks: 1519, # CPU blocks: 0",
                "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.754 GiB for "
                "prompt and 11.09 GiB for decode (VLLM_GRAPH_PROMPT_RATIO=0.3)",
            ],
        ),
    ],
)
def test_the_memory_is_divided_as_in_the_published_logs(free_gib, utilization, reserved, lines):
    variables = {"VLLM_GRAPH_RESERVED_MEM": reserved, "PT_HPU_LAZY_MODE": 1}
    settings = {"gpu_memory_utilization": utilization, "num_gpu_blocks_override": None}
    with simulated_hpu(**variables) as bridge:
        worker = loaded_worker(**settings)
        total, workspace = bridge.memory_info().total_bytes, 504 * MIB
        weights = take_up_to(bridge, total - int(free_gib * GIB) - workspace)
        with captured_log() as log:
            report = divide_memory(
                worker.config,
                free_bytes=bridge.memory_info().free_bytes,
                launch_bytes=workspace,
                block_bytes=BLOCK_BYTES,
            )
            ledger = make_ledger(worker.config, report, total, report.num_blocks)
            cache = Allocation(bridge.card.memory, report.num_blocks * BLOCK_BYTES)
            ledger.book(MemoryClass.KV_CACHE, cache.num_bytes)
            limits = step_limits(worker.config, report.num_blocks)
            no_buckets = Catalog((), ())
            run_warm_up(WarmUp(worker.config, bridge, worker.runner, no_buckets, limits, ledger))
        assert ledger.booked(MemoryClass.WEIGHTS) > weights.num_bytes
    assert [log[0], num_blocks_line(report.num_blocks), log[1]] == lines


def test_a_number_of_bytes_takes_the_place_of_the_share():
    settings = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.1}
    with simulated_hpu(PT_HPU_LAZY_MODE=1) as bridge:
        free_bytes = 8 * GIB
        worker = loaded_worker(**settings, kv_cache_memory_bytes=4 * GIB)
        given = {"free_bytes": free_bytes, "launch_bytes": GIB, "block_bytes": BLOCK_BYTES}
        report = divide_memory(worker.config, **given)
        assert report.num_blocks == 4 * GIB // BLOCK_BYTES
        total = bridge.memory_info().total_bytes
        ledger = make_ledger(worker.config, report, total, report.num_blocks)
        assert ledger.budget(MemoryClass.KV_CACHE) == report.num_blocks * BLOCK_BYTES
        cache = replace(worker.config.cache, kv_cache_memory_bytes=7 * GIB)
        with pytest.raises(
            ConfigError, match=r"7 GiB\): after .* the card has 7 GiB .* Lower it to \d+"
        ):
            divide_memory(replace(worker.config, cache=cache), **given)


@pytest.mark.usefixtures("all_layers")
@pytest.mark.parametrize(
    "mode",
    [m if m in ("HPU graphs", "eager") else exhaustive(m) for m in MODES],
)
def test_the_profiling_run_books_what_the_largest_launches_need(mode):
    is_lazy, is_eager = MODES[mode]
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS) as bridge:
        worker = loaded_worker(enforce_eager=is_eager, enable_sleep_mode=True)
        used = bridge.card.memory.in_use_bytes
        with captured_log() as log:
            worker.allocate(worker.measure().num_blocks)
            run_warm_up(worker)
        ledger = worker.ledger
        assert ledger.booked(MemoryClass.WEIGHTS) == used
        logits = 256 * 4096 * 4  # logits for log-probabilities of prompts are the largest tensor
        assert 2 * logits < ledger.booked(MemoryClass.WORKSPACE) < 4 * logits
        text = next(line for line in log if line.startswith("Model profiling run took"))
        assert re.match(r"Model profiling run took [89]\.\d+ MiB of device memory \(2\d\.", text)
        check_sleep(worker)


@pytest.mark.parametrize("mode", ["HPU graphs", exhaustive("lazy"), "eager"])
def test_what_is_free_once_the_cache_is_there_is_what_was_reported(mode):
    is_lazy, is_eager = MODES[mode]
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS) as bridge:
        worker = loaded_worker(enforce_eager=is_eager)
        before = bridge.memory_info().free_bytes
        report = worker.measure()
        worker.allocate(report.num_blocks)
        assert report.free_bytes == before
        cache_bytes = report.num_blocks * report.block_bytes
        left = report.free_bytes - report.launch_bytes - cache_bytes
        kept = bridge.card.memory.workspace_bytes
        assert (kept > 0) == is_lazy
        assert bridge.memory_info().free_bytes == left + report.launch_bytes - kept
        budgets = sum(worker.ledger.budget(cls) for cls in MemoryClass)
        assert worker.ledger.budget(MemoryClass.WORKSPACE) == report.launch_bytes
        assert budgets <= bridge.memory_info().total_bytes
        run_warm_up(worker)
        bridge.reset_peak()
        launches = worker.runner.launches
        catalog = launches.planner.catalog
        for bucket in (*catalog.prefill, *catalog.decode):
            for shape in launches.launch_shapes(bucket):
                worker.runner.warm_up(shape, sampling="heaviest")
        graphs = 0 if is_eager else report.warm_up_bytes
        least_free = bridge.memory_info().total_bytes - bridge.peak_bytes()
        assert left - graphs <= least_free <= left + held_bytes(worker.config)


def check_sleep(worker: HPUWorker) -> None:
    """Check that the memory of a worker is freed and restored, and that its shapes are
    unchanged.
    """
    memory, bridge = worker.bridge.card.memory, worker.bridge
    awake, compilations = memory.in_use_bytes, bridge.counters().compilations
    for level in (1, 2):
        worker.sleep(level)
        assert memory.in_use_bytes - memory.workspace_bytes < awake / 1000
        worker.wake_up()
        assert memory.in_use_bytes == awake
    launches = worker.runner.launches
    for shape in launches.launch_shapes(launches.planner.catalog.decode[0]):
        worker.runner.warm_up(shape, sampling="none")
    assert bridge.counters().compilations == compilations


@pytest.mark.usefixtures("all_layers")
@pytest.mark.parametrize(
    ("pool_mib", "settings", "what"),
    [
        (15, {}, "no memory for the weights: the card has 15 MiB"),
        (22, {}, "no memory for any forward pass, even the smallest: the card has 22 MiB"),
        (
            30,
            {"num_gpu_blocks_override": None},
            r"the KV cache holds \d+ tokens.*KV cache [0-9.]+ KiB, weights 20.\d+ MiB, forward "
            r"passes 8.\d+ MiB \(--max-num-batched-tokens 64\), .*, or use a smaller model or",
        ),
        (
            60,
            {"num_gpu_blocks_override": 3000},
            r"num_gpu_blocks_override=3000: the blocks take 281.2 MiB, which is more than .* KV "
            r"cache 24.76 MiB, weights .* Lower it to 264, or use a smaller model",
        ),
        (
            60,
            {"num_gpu_blocks_override": 2},
            "It has 192 KiB by --num-gpu-blocks-override. Lower --max-model-len to 16, or raise",
        ),
        (
            90,
            {"num_gpu_blocks_override": None, "gpu_memory_utilization": 1e-6},
            r"one block takes 96 KiB.*, unused 60.* MiB \(--gpu-memory-utilization 1e-06\), "
            r"weights .*\. Raise --gpu-memory-utilization$",
        ),
        (
            600,
            {"num_gpu_blocks_override": None, "max_lora_rank": 256, "max_loras": 16},
            r"any forward pass, even the smallest.*: LoRA adapters .* MiB \(--max-loras 16, "
            r"--max-lora-rank 256\), .*\. Lower --max-loras or --max-lora-rank, or lower --max",
        ),
    ],
)
def test_too_little_memory_is_one_line_that_says_for_what(pool_mib, settings, what):
    settings = SMALL_ENGINE | settings | {"enable_lora": "max_loras" in settings}
    with simulated_hpu(pool_bytes=pool_mib * MIB, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        with pytest.raises(ConfigError, match=what) as caught:
            LLM(**settings)
        assert "\n" not in str(caught.value)


def test_the_largest_use_of_the_memory_is_what_an_error_wants_changed():
    """These cases need no model: graphs, recurrent states, a draft model, and none of them."""
    hpu = HPUConfig(graph_reserved_mem=1.0)
    config = replace(make_config(max_model_len=64), hpu=hpu)
    given = {"free_bytes": 8 * GIB, "launch_bytes": GIB, "block_bytes": BLOCK_BYTES}
    graphs = r"KV cache 0 B, HPU graphs 6.3 GiB \(VLLM_GRAPH_RESERVED_MEM=1\), .*\. Lower VLLM_GR"
    for others, expected in (
        ([], graphs),
        ([weights_use(GIB), draft_use(2 * GIB)], graphs),
        ([draft_use(9 * GIB), weights_use(GIB)], "draft model 9 GiB .*Use a smaller draft model"),
        ([states_use(config, 9 * GIB)], r"states 9 GiB \(--max-num-seqs 8\), .*Lower --max-num-s"),
    ):
        with captured_log(), pytest.raises(ConfigError, match=expected):
            divide_memory(config, **given, others=others)
    assert CacheBudget(0).fix == "use a smaller model"


# ---- reports of steps -----------------------------------------------------------------------

STATS = r"\[\('TotalNumber', (\d+)\), .*\]"
SHAPE = r"is_prompt: (\w+), num_seqs: (\d+), max_context_len: (\d+), max_num_blocks (\d+)"


def step_reports(lines: list[str], tag: str) -> list[tuple[str, ...]]:
    """Return count, is_prompt, num_seqs, max_context_len and max_num_blocks of each report."""
    pattern = re.compile(rf"VLLM_HPU_STEP_{tag}: {STATS}, {SHAPE}")
    return [found.groups() for line in lines if (found := pattern.fullmatch(line))]


def test_every_step_is_reported_on_demand():
    variables = {
        "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL": 1,
        "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL": 1,
    }
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS, **variables),
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE)
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": [20] * 15}, {"prompt_token_ids": [30] * 20}]
        llm.generate(prompts, params, use_tqdm=False)
    want = [
        ("0", "True", "2", "20", "2"),
        ("0", "False", "2", "21", "2"),
        ("0", "False", "2", "22", "2"),
    ]
    assert step_reports(log, "GRAPH_COMPILATION") == want
    assert step_reports(log, "CPU_FALLBACK") == want


def test_only_steps_that_compile_are_reported_otherwise():
    variables = {"VLLM_HPU_LOG_STEP_GRAPH_COMPILATION": 1, "VLLM_SKIP_WARMUP": 1}
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS, **variables),
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE)
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        for _ in range(2):
            llm.generate({"prompt_token_ids": [20] * 15}, params, use_tqdm=False)
    reports = step_reports(log, "GRAPH_COMPILATION")
    assert [report[1:] for report in reports] == [
        ("True", "1", "15", "1"),
        ("False", "1", "16", "1"),
    ]
    assert all(int(report[0]) > 0 for report in reports)
    assert step_reports(log, "CPU_FALLBACK") == []


def test_a_cache_of_fp8_takes_a_byte_for_a_number():
    found = []
    for kv_cache_dtype in ("auto", "fp8"):
        with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
            worker = loaded_worker(kv_cache_dtype=kv_cache_dtype)
            layout = worker.runner.cache_layout
            found.append(layout.block_bytes / worker.runner.attention_layers[0].num_kv_heads)
    assert found[0] in (2 * found[1], 4 * found[1])


@pytest.mark.usefixtures("all_layers")
def test_no_decode_is_measured_that_has_more_blocks_than_the_cache_can():
    def blocks(**settings) -> tuple[int, int]:
        """Return the blocks of the largest decode that is measured, and of the cache."""
        with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
            worker = loaded_worker(max_num_seqs=4, max_model_len=1024, **settings)
            report = worker.measure()
            most = max(bucket.blocks for bucket in plan_buckets(worker.config).catalog.decode)
            assert worker.forecast.max_blocks <= most
            return worker.forecast.max_blocks, report.num_blocks

    measured, num_blocks = blocks(num_gpu_blocks_override=80)
    assert measured <= num_blocks == 80
    in_bytes = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 8 * MIB}
    measured, num_blocks = blocks(**in_bytes)
    assert measured <= num_blocks < 100
    assert blocks(num_gpu_blocks_override=300)[0] >= 4 * 1024 // 16
