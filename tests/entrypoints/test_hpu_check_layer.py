"""Test the checks of `vllm hpu-check` for a decoder layer, sampling, FP8 and experts, on cards with
faults. test_hpu_check.py tests that a card without faults passes.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.clock import Clock
from gaudi_sim.graphs.graphs import CapturedGraph
from gaudi_sim.kernels import fp8 as sim_fp8
from gaudi_sim.kernels import uint4 as sim_uint4
from vllm.attention.backends import hpu_attn
from vllm.cost_model import cards
from vllm.hpu_check import CHECKS, decoder_layer, short_run, stopwatch
from vllm.hpu_check.check import CheckResult, run_check
from vllm.ops.hpu.low_bit_experts import HPULowBitExperts
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.hpu.quantized import HPUFp8Experts, HPUNarrowWeight
from vllm.platforms.habana.kernels import FusedKernels
from vllm.sample import sampler
from vllm.sample.penalties import Penalties
from vllm.sample.restrictions.masks import TokenMasks

LAYER_ROWS = ("layer eager", "layer graph", "prefill with context")
KERNEL_ROWS = (
    *("sdpa causal", "sdpa shared heads", "sdpa mask", "sdpa valid lengths", "rms_norm"),
    *("rotary neox", "rotary gpt-j", "silu_and_mul", "moe", "fp8 cast", "fp8 matmul"),
    "uint4 matmul",
)
SAMPLING_ROWS = tuple(name for name in CHECKS if name.startswith("sampling"))
STEP_ROWS = ("decode attention", "prefill attention", "prefill with context", SAMPLING_ROWS[0])


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two runs: a simulated card takes the same time for each run after the first."""
    monkeypatch.setattr(stopwatch, "NUM_RUNS", 2)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimBridge]:
    """Return a simulated card with so little memory that copying its cache takes no time."""
    small = replace(cards.CARDS["gaudi2"], pool_bytes=2**30)
    monkeypatch.setitem(cards.CARDS, "gaudi2", small)
    yield SimBridge("gaudi2", is_lazy=True)


def result_of(bridge: SimBridge, name: str) -> CheckResult:
    return run_check(name, lambda: CHECKS[name].run(bridge, ""))


@pytest.fixture
def eager_bridge(bridge: SimBridge) -> SimBridge:
    """Return a card of the same size, without lazy mode."""
    return SimBridge("gaudi2")


def store_nothing(*args: object) -> None:
    pass


def write_through_a_view(key, value, key_cache, value_cache, slots, scales):
    for new, cache in ((key, key_cache), (value, value_cache)):
        rows = new.reshape(-1, *cache.shape[1:])
        cache.unflatten(0, (-1, 128)).flatten(0, 1).index_copy_(0, slots.flatten().long(), rows)


def slow_by_size(bridge: SimBridge, write=hpu_attn.write_kv_cache):
    def write_slowly(key, value, key_cache, value_cache, slots, scales):
        bridge.card.clock.host_s += key_cache.nbytes / 1e9
        write(key, value, key_cache, value_cache, slots, scales)

    return write_slowly


def fallback_at_each_reading():
    readings = iter(range(1, 99))

    def counters(self: SimBridge):
        return replace(self.card.counters(), cpu_fallbacks={"aten::sort": next(readings)})

    return counters


def test_a_layer_with_a_fault_is_found(bridge, monkeypatch):
    def failure(owner: object, name: str, value: object, row: str = "layer eager") -> str:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            result = result_of(bridge, row)
        assert result.status == "fail", (name, result.detail)
        return result.detail

    for row in LAYER_ROWS:
        assert "max error" in failure(hpu_attn, "write_kv_cache", store_nothing, row)
    detail = failure(SimBridge, "counters", fallback_at_each_reading())
    assert detail == "ran on the host: aten::sort (1)"
    assert "copies of a whole cache tensor" in failure(
        hpu_attn, "write_kv_cache", write_through_a_view
    )
    assert "the time depends on the cache" in failure(
        hpu_attn, "write_kv_cache", slow_by_size(bridge)
    )
    assert failure(decoder_layer, "CACHE_SHARE", 9.0).startswith("MemoryError: ")


FAULTS = ("wrong value", "fallback", "slow", "out of memory")


def faulty(bridge: SimBridge, monkeypatch: pytest.MonkeyPatch, row: str, fault: str) -> CheckResult:
    """Return the result of the check on a card with this kind of fault."""
    owner, name, value = {
        "wrong value": (hpu_attn, "write_kv_cache", store_nothing),
        "fallback": (SimBridge, "counters", fallback_at_each_reading()),
        "slow": (Clock, "sync", slow_sync),
        "out of memory": (decoder_layer, "CACHE_SHARE", 9.0),
    }[fault]
    if fault == "out of memory":
        monkeypatch.setattr(short_run, "CACHE_SHARE", 9.0 * 8)
    if fault == "slow" and row != "short run":
        owner, name, value = hpu_attn, "write_kv_cache", slow_by_size(bridge)
    monkeypatch.setattr(owner, name, value)
    return result_of(bridge, row)


def slow_sync(self, sync=Clock.sync):
    self.device_s = max(self.device_s, self.host_s) + 0.01
    sync(self)


SIGNS = {
    "wrong value": "max error",
    "fallback": "ran on the host: aten::sort (1)",
    "slow": "the time depends on the cache",
    "out of memory": "MemoryError: ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_graph_is_found(bridge, monkeypatch, fault):
    # A replay of a graph does not run Python code again, so a slow operator is simulated by a slow
    # replay.
    if fault == "slow":
        monkeypatch.setattr(CapturedGraph, "replay", slow_replay(bridge))
    result = faulty(bridge, monkeypatch, "layer graph", fault)
    assert result.status == "fail" and SIGNS[fault] in result.detail, result.detail


def slow_replay(bridge: SimBridge, replay=CapturedGraph.replay):
    cache_bytes = iter([0, 1])  # bytes of the smaller cache, then of the larger one
    seen: dict[int, float] = {}

    def call(self, *args, **kwargs):
        bridge.card.clock.host_s += seen.setdefault(id(self), next(cache_bytes, 1)) * 0.01
        return replay(self, *args, **kwargs)

    return call


@pytest.mark.parametrize(
    "fault", [f if f == "slow" else pytest.param(f, marks=pytest.mark.exhaustive) for f in FAULTS]
)
def test_a_faulty_compiled_layer_is_found(eager_bridge, monkeypatch, fault):
    if fault == "slow":
        times = iter([0.001, 0.008])
        monkeypatch.setattr(decoder_layer, "shortest_s", lambda bridge, run: run() and next(times))
    result = faulty(eager_bridge, monkeypatch, "layer compiled", fault)
    assert result.status == "fail" and SIGNS[fault] in result.detail, result.detail


def test_the_short_run_gives_the_figures_side_by_side_and_finds_faults(bridge, monkeypatch):
    result = result_of(bridge, "short run")
    assert result.status == "pass", result.detail
    assert re.fullmatch(
        r"\d+ tokens/s \(.* ms a step of 3 requests\); "
        r"the cost model predicts \d+ tokens/s \(.* ms\)",
        result.detail,
    )
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            result = faulty(bridge, patch, "short run", fault)
        sign = "more than 4 times slower" if fault == "slow" else SIGNS[fault]
        assert result.status == "fail" and sign in result.detail, result.detail


OPEN_WITHOUT_MEMORY = ("host fallbacks",)
"""Checks that need no memory of the card."""


def test_a_card_without_memory_fails_every_row(bridge, monkeypatch):
    taken = bridge.zeros((bridge.memory_info().free_bytes,), torch.int8)
    for name in CHECKS:
        if name in OPEN_WITHOUT_MEMORY or name in ("layer compiled", "torch.compile"):
            continue
        if name.startswith("kernel ") or name == "moe with biases":
            # Most checks only look the kernel up, and a kernel that fails its trial is not used.
            continue
        result = result_of(bridge, name)
        assert result.status == "fail", (name, result.detail)
    del taken


def test_a_fallback_in_any_row_is_found_by_the_row_of_fallbacks(bridge):
    assert result_of(bridge, "host fallbacks").status == "pass"
    with torch.inference_mode():
        torch.ones(4, dtype=torch.float64).to(bridge.device).sort()
    result = result_of(bridge, "host fallbacks")
    assert result.status == "fail" and "aten::sort" in result.detail, result.detail


def on_card_only(function, wrong):
    """Return an operator whose result is `wrong(result)` if its first tensor is on the card."""

    def call(x, *args, **kwargs):
        result = function(x, *args, **kwargs)
        return wrong(result) if x.device.type == "hpu" else result

    return call


def no_penalties_on_card(self, x, params, apply=Penalties.apply):
    if x.device.type != "hpu":
        apply(self, x, params)


def less_likely(found):
    return found._replace(logprobs=found.logprobs - 1)


def test_a_kind_of_sampling_with_a_fault_is_found(bridge, monkeypatch):
    other_token = on_card_only(sampler.argmax, lambda token_ids: token_ids + 1)
    faults = {
        "sampling greedy": (sampler, "argmax", other_token),
        "sampling random": (sampler, "draw", on_card_only(sampler.draw, lambda ids: ids * 0)),
        "sampling top-k": (sampler, "logit_floor", on_card_only(sampler.logit_floor, no_floor)),
        "sampling min-p": (sampler, "logit_floor", on_card_only(sampler.logit_floor, no_floor)),
        "sampling top-p": (sampler, "nucleus_floor", on_card_only(sampler.nucleus_floor, zero)),
        "sampling penalties": (Penalties, "apply", no_penalties_on_card),
        "sampling allowed tokens": (TokenMasks, "apply_on_card", lambda *_: None),
        "sampling logprobs": (
            sampler,
            "gather_logprobs",
            on_card_only(sampler.gather_logprobs, less_likely),
        ),
    }
    assert tuple(faults) == SAMPLING_ROWS
    for row, fault in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            result = result_of(bridge, row)
        assert result.status == "fail", row
        assert "on the host" in result.detail or "log-probabilities" in result.detail


def no_floor(floor: object) -> None:
    return None


def zero(x: torch.Tensor) -> torch.Tensor:
    return x * 0


def test_experts_and_fp8_with_a_fault_are_found(bridge, monkeypatch):
    faults = {
        "moe": (HPUOps, "moe", lambda self, x, *args: x),
        "fp8 cast": (sim_fp8, "saturate", lambda x, dtype: x * 1.5),
        "fp8 matmul": (sim_fp8, "saturate", lambda x, dtype: x * 1.5),
        "fp8 moe": (HPUFp8Experts, "forward", lambda self, x, *args: x),
        "moe of few bits": (HPULowBitExperts, "forward", lambda self, x, *args: x),
        "moe with biases": (FusedKernels, "bias_moe", lambda self, x, *args: x),
        "matmul of few bits": (HPUNarrowWeight, "linear", lambda self, x: x),
        "uint4 matmul": (sim_uint4, "_nibbles", nibbles_from_the_highest),
    }
    for row, fault in faults.items():
        assert result_of(bridge, row).status == "pass"
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            assert result_of(bridge, row).status == "fail", row


def nibbles_from_the_highest(words):
    places = torch.arange(28, -1, -4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> places & 15).flatten(-2).float()


def slower_sync(self, sync=Clock.sync):
    self.device_s = max(self.device_s, self.host_s) + 0.06
    sync(self)


def test_a_slow_kernel_is_found(bridge, monkeypatch):
    monkeypatch.setattr(Clock, "sync", slow_sync)
    for row in KERNEL_ROWS:
        result = result_of(bridge, row)
        assert result.status == "fail", row
        assert "ms, at most 5 ms are expected" in result.detail


def test_a_slow_step_is_found(bridge, monkeypatch):
    monkeypatch.setattr(Clock, "sync", slower_sync)
    for row in STEP_ROWS:
        result = result_of(bridge, row)
        assert result.status == "fail", row
        assert "ms, at most 50 ms are expected" in result.detail
