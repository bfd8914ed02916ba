"""Test the log of a start on the simulated card, line by line."""

import re

import pytest

from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, captured_log, simulated_hpu
from vllm import LLM

SIZE = r"-?\d[\d.e+]* (B|[KMGT]iB)"
USED = rf"\({SIZE}/{SIZE} used\)"
TOOK = rf"took {SIZE} of device memory {USED} and {SIZE} of host memory {USED}"
RANGES = r"\(min, step, max_warmup\) bs:\[\d+, \d+, \d+\], seq:\[\d+, \d+, \d+\]"
PAIRS = r"\[(\(\d+, \d+(, \d+)?\)(, )?)*\]"
STEP = rf"batch_size:\d+ seq_len:\d+( num_blocks:\d+)? free_mem:{SIZE}"


def warm_up_lines(stage: str, total: int) -> list[str]:
    return [rf"\[Warmup\]\[{stage}\]\[{i}/{total}\] {STEP}" for i in range(1, total + 1)]


def expected_lines(mode: str) -> list[str]:
    """Return patterns of all lines about Gaudi, in order, for 2 prompt buckets and 1 decode
    bucket.
    """
    is_eager = MODES[mode][1]
    reserved = "0.0" if is_eager else "0.1"
    lines = [
        f"Pre-loading model weights on hpu:0 {TOOK}",
        f"{'Wrapping in HPU Graph' if mode == 'HPU graphs' else 'Preparing forward passes'} {TOOK}",
        f"Loading model weights took in total {SIZE} of device memory .*",
        f"Model profiling run {TOOK}",
        rf"Free device memory: {SIZE}, {SIZE} usable \(gpu_memory_utilization=0.9\), {SIZE} "
        rf"reserved for HPUGraphs \(VLLM_GRAPH_RESERVED_MEM={reserved}\), {SIZE} reserved for "
        "KV cache",
        "# HPU blocks: 33, # CPU blocks: 0",
        f"Initializing cache engine {TOOK}",
        f"Prompt bucket config {RANGES}",
        rf"Generated 2 prompt buckets \[bs, query, num_blocks\]: {PAIRS}",
        f"Decode bucket config {RANGES}",
        f"Generated 1 decode buckets: {PAIRS}",
        *warm_up_lines("Prompt", 2),
        *warm_up_lines("Decode", 1),
    ]
    if mode == "HPU graphs":
        lines += [
            rf"Using {SIZE}/{SIZE} of free device memory for HPUGraphs, {SIZE} for prompt and "
            rf"{SIZE} for decode \(VLLM_GRAPH_PROMPT_RATIO=0.3\)",
            *warm_up_lines("Graph/Prompt", 2),
            *warm_up_lines("Graph/Decode", 1),
            rf"Graph/Prompt captured:2 \(100.0%\) used_mem:{SIZE} buckets:{PAIRS}",
            rf"Graph/Decode captured:1 \(100.0%\) used_mem:{SIZE} buckets:{PAIRS}",
        ]
    return [
        *lines,
        rf"Warmup finished in \d+ secs, allocated {SIZE} of device memory",
        f"init_cache_engine {TOOK}",
    ]


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize("mode", ["HPU graphs", "lazy", "eager"])
def test_a_start_logs_every_stage_in_order(mode):
    is_lazy, is_eager = MODES[mode]
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS), captured_log() as lines:
        LLM(**SMALL_ENGINE, enforce_eager=is_eager)
    first = next(i for i, line in enumerate(lines) if line.startswith("Pre-loading"))
    patterns = expected_lines(mode)
    started = lines[first : first + len(patterns)]
    for line, pattern in zip(started, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert not any("warmed-up" in line or "Warmup" in line for line in lines[:first])
    assert lines[first + len(patterns)].startswith("ready in ")
