"""Test the log line about the possible gain of int8: on which processors it is logged, and its
figures.
"""

import logging
import runpy
from pathlib import Path

import pytest
import torch

from vllm import LLM
from vllm.worker.cpu import worker
from vllm.worker.cpu.int8_advice import (
    HAS_BF16,
    LinearRates,
    MachineRates,
    int8_advice,
    is_worth_measuring,
    measure_rates,
)

ROOT = Path(__file__).parents[2]


def rates_of(*, dense_s=(4.0, 4.0), int8_s=(2.0, 2.0), dense_bytes=2, read=float("inf"), threads=1):
    """Return rates with seconds for a decode and for a prompt."""
    dense = LinearRates(*dense_s, num_bytes=dense_bytes)
    return MachineRates(dense, LinearRates(*int8_s, num_bytes=1), read, threads)


@pytest.mark.parametrize(
    ("rates", "decode", "prompt"),
    [
        (rates_of(), 2.0, 2.0),
        (rates_of(dense_s=(4, 6), int8_s=(4, 4)), 1.0, 1.5),
        # Memory bandwidth is the limit of both formats in the first case, and of one format in the
        # second.
        (rates_of(dense_bytes=4, read=0.01), 4.0, 2.0),
        (rates_of(read=0.4), 5 / 2.5, 2.0),
        (rates_of(dense_s=(4, 4), int8_s=(2, 2), read=0.25), 8 / 4, 2.0),
        (rates_of(dense_bytes=4, read=1.0, threads=4), 4.0, 2.0),
    ],
)
def test_a_gain_follows_from_the_slower_of_threads_and_memory(rates, decode, prompt):
    assert rates.decode_gain() == pytest.approx(decode)
    assert rates.prompt_gain() == pytest.approx(prompt)


def test_the_line_names_what_gains_alone():
    both = int8_advice(rates_of(), "avx2")
    assert both is not None and "\n" not in both
    assert "avx2" in both and "decodes 2.0 times as fast and prompts 2.0 times" in both
    prompts = int8_advice(rates_of(int8_s=(4, 2)), "avx2")
    assert prompts is not None and "decodes" not in prompts and "prompts 2.0" in prompts
    assert int8_advice(rates_of(int8_s=(4, 3.8)), "avx2") is None


def test_sets_with_bf16_are_those_that_are_compiled_for_it():
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    sets = {isa for group in build["ISAS"].values() for isa in group}
    assert {isa.name for isa in sets if "bf16" in isa.flags} == HAS_BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_measured(dtype):
    storages = [torch.ones(24 << 20, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)]
    threads = torch.get_num_threads()
    rates = measure_rates(dtype, storages)
    assert torch.get_num_threads() == rates.num_threads == threads
    assert 0 < rates.read_bytes_per_s < float("inf")
    assert rates.dense.num_bytes == dtype.itemsize and 1 <= rates.int8.num_bytes < 1.1
    assert min(rates.dense.decode_s, rates.int8.decode_s, rates.decode_gain()) > 0
    assert measure_rates(dtype, storages[1:]).read_bytes_per_s == float("inf")


@pytest.mark.parametrize(
    ("isa", "dtype", "is_worth"),
    [
        ("avx2", torch.float32, True),
        ("avx512", torch.bfloat16, True),
        ("avx2", torch.float16, False),
        ("avx512_bf16", torch.bfloat16, False),
        ("torch", torch.float32, False),
    ],
)
def test_nothing_is_measured_with_bf16_or_without_kernels(isa, dtype, is_worth):
    assert is_worth_measuring(isa, dtype) == is_worth


@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
@pytest.mark.parametrize(
    ("options", "gains", "says"),
    [({}, True, 1), ({}, False, 0), ({"quantization": "int8"}, True, 0)],
    ids=["dense", "dense, no gain", "int8"],
)
def test_the_start_says_it_once(monkeypatch, caplog, isa, options, gains, says):
    rates = rates_of() if gains else rates_of(int8_s=(4.0, 4.0))
    monkeypatch.setattr(worker, "measure_rates", lambda dtype, storages: rates)
    monkeypatch.setattr(worker.logger, "propagate", False)
    monkeypatch.setattr(worker.logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, logger=worker.logger.name):
        LLM(max_model_len=32, num_gpu_blocks_override=8, load_format="dummy", **options)
    assert "GiB of weights" in caplog.text
    assert caplog.text.count("--quantization int8 would") == says
