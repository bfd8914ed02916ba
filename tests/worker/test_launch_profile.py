"""Test VLLM_PT_PROFILE: a trace of one forward pass instead of a start."""

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, captured_log, simulated_hpu
from vllm import LLM
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.strategies.profiled import parse_profiled
from vllm.errors import ConfigError


def start(mode: str, folder: Path, **variables: object) -> tuple[str, list[str]]:
    """Start an engine that profiles. Returns its error, and its log."""
    is_lazy, is_eager = MODES[mode]
    variables |= {"PT_HPU_LAZY_MODE": is_lazy, "VLLM_TORCH_PROFILER_DIR": folder, **FEW_BUCKETS}
    with simulated_hpu(has_profiling_run=False, **variables), captured_log() as lines:
        with pytest.raises(ConfigError) as error:
            LLM(**SMALL_ENGINE, enforce_eager=is_eager)
        return str(error.value), lines


@pytest.mark.parametrize(
    ("mode", "variables", "launch", "how"),
    [
        ("HPU graphs", {"VLLM_PT_PROFILE": "prompt_1_48_t"}, "prompt_1_48_t", "replay"),
        ("HPU graphs", {"VLLM_PT_PROFILE": "decode_4_16_f"}, "decode_4_16_f", "lazy"),
        exhaustive("eager", {"VLLM_PROFILE_DECODE": "4,16"}, "decode_4_16_t", "eager"),
        ("lazy", {"VLLM_PROFILE_PROMPT": "2,32,3"}, "prompt_2_32_3_t", "lazy"),
    ],
)
def test_one_launch_is_traced_and_nothing_else_runs(tmp_path, mode, variables, launch, how):
    """The shape need not be a bucket."""
    error, lines = start(mode, tmp_path, **variables)
    assert error.startswith(f"Finished profiling {launch} ({how}): the trace is in {tmp_path}")
    assert not any("[Warmup]" in line for line in lines)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{launch}.")
    assert str(path) in error
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
    assert operators & {"aten::mm", "aten::linear", "aten::bmm", "aten::copy_"}


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        ("prompt_5_32_t", "max_num_seqs is 4"),
        ("prompt_1_256_t", "max_model_len is 128"),
        ("decode_4_34_t", "the KV cache has 33 blocks"),
    ],
)
def test_a_launch_that_is_not_possible_is_refused(tmp_path, launch, reason):
    error, _ = start("lazy", tmp_path, VLLM_PT_PROFILE=launch)
    assert error == f"VLLM_PT_PROFILE='{launch}' cannot run: {reason}"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"VLLM_PT_PROFILE": "prompt_1_t"}, "must be prompt_BATCH_LENGTH_t or decode"),
        ({"VLLM_PT_PROFILE": "decode_1_2_3_t"}, "must be prompt_BATCH_LENGTH_t or decode"),
        ({"VLLM_PT_PROFILE": "prompt_0_32_t"}, "must have sizes of at least 1"),
        (
            {"VLLM_PT_PROFILE": "decode_4_2_t"},
            "at least one block for each of its 4 requests, got 2",
        ),
        ({"VLLM_PROFILE_PROMPT": "1,32"}, "must be like 1,512,0"),
        ({"VLLM_PROFILE_DECODE": "4;128"}, "must be like 4,128"),
        ({"VLLM_PROFILE_DECODE": "4,8", "VLLM_PT_PROFILE": "prompt_1_32_t"}, "Set one of them"),
    ],
)
def test_a_variable_that_names_no_launch_is_refused_before_anything_is_loaded(
    tmp_path, variables, message
):
    error, lines = start("lazy", tmp_path, **variables)
    assert re.search(message, error)
    assert not any("weights took" in line for line in lines)


def test_both_phases_are_read():
    assert parse_profiled("prompt_2_512_t") == (prefill(2, 512), True)
    assert parse_profiled("prompt_2_512_4_f") == (prefill(2, 512, 4), False)
    assert parse_profiled("decode_4_128_f") == (decode(4, 128), False)
