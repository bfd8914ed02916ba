"""Check FP8, 4-bit weights, and experts in one operator, against the host."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.hpu_check.check import LIMITS, Comparison, Outcome, slow_call
from vllm.hpu_check.stopwatch import shortest_s
from vllm.ops.expert_options import ExpertBiases, ExpertOptions
from vllm.ops.hpu.low_bit_experts import HPULowBitExperts
from vllm.ops.hpu.mxfp4_experts import HPUMxfp4Experts
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.hpu.quantized import HPUFp8Experts, HPUNarrowWeight
from vllm.ops.native.operators import NativeOps
from vllm.ops.stored_weight import (
    GroupedWeight,
    GroupScales,
    MinimumWeight,
    Mxfp4Weight,
    StoredWeight,
    round_to_fp8,
)
from vllm.platforms.habana.bridge import HabanaBridge

_FP8 = torch.float8_e4m3fn
_FP8_STEP = 2**-3
"""Distance of two neighbours of e4m3, as a fraction of the smaller one; the rounding error is half
of it."""

_FP8_MOE_ERROR = 0.1
"""Inputs of two matmuls and their weights are rounded to 3 bits."""


def check_moe(bridge: HabanaBridge) -> Outcome:
    """Check a mixture with two of four experts for each token, one of them twice."""
    comparison, host = Comparison(), NativeOps()
    for dtype in LIMITS:
        x = torch.randn(17, 64).to(dtype)
        gate_up, down = torch.randn(4, 64, 64).to(dtype) / 8, torch.randn(4, 64, 32).to(dtype) / 6
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(17)])
        ids[0] = 3
        weights = torch.rand(17, 2)
        near = [t.to(bridge.device) for t in (x, ids, weights, gate_up, down)]
        call = partial(HPUOps(bridge).moe, near[0], near[1], near[2], near[3], near[4])
        got = call()
        want = host.moe(x.float(), ids, weights, gate_up.float(), down.float())
        comparison.add(str(dtype), got, want)
        comparison.add_time(str(dtype), shortest_s(bridge, call))
    return comparison.outcome()


def check_fp8_moe(bridge: HabanaBridge) -> Outcome:
    """Check experts with FP8 weights, in one operator if the bridge has it and it can run."""
    gate, up, down = torch.randn(3, 4, 64, 64) / 8
    gates, ups, downs = ([round_to_fp8(weight) for weight in part] for part in (gate, up, down))
    prepared = HPUOps(bridge).prepare_experts(gates, ups, downs, torch.bfloat16)
    assert isinstance(prepared, HPUFp8Experts)
    experts = prepared.to(bridge.device)
    x, ids = torch.randn(17, 64), torch.stack([torch.randperm(4)[:2] for _ in range(17)])
    weights = torch.rand(17, 2)
    near = [t.to(bridge.device) for t in (x.bfloat16(), ids, weights)]
    call = partial(experts.forward, near[0], near[1], near[2])
    want = NativeOps().moe(x, ids, weights, torch.cat([gate, up], dim=1), down)
    error = (call().cpu().float() - want).square().mean().sqrt() / want.square().mean().sqrt()
    if (reason := slow_call("e4m3", shortest_s(bridge, call))) is not None:
        return Outcome("fail", reason)
    detail = f"error {error:.3f} of the values, limit {_FP8_MOE_ERROR}"
    return Outcome("pass" if error <= _FP8_MOE_ERROR else "fail", detail)


def check_bias_moe(bridge: HabanaBridge) -> Outcome:
    """Check experts with biases and a clamped activation (GPT-OSS), unquantized and in MXFP4.

    Gate and up of a feature are neighbours in the operator's weights.
    """
    if (skipped := _without_conversion(bridge)) is not None:
        return skipped
    if (reason := bridge.kernels.why_unused("mixture_of_experts with biases")) is not None:
        return Outcome("skip", reason)
    comparison = Comparison()
    x, ids, weights = _routed()
    first, second = torch.randn(4, 128).bfloat16(), torch.randn(4, 64).bfloat16()
    options = ExpertOptions(limit=1.0)
    stored = [[_mxfp4_weight() for _ in range(4)] for _ in range(3)]
    gate, up, down = (torch.stack([w.dequantize() for w in part]) for part in stored)
    both = torch.cat([gate, up], dim=1)
    want = NativeOps().moe(
        *(x.float(), ids, weights, both, down), ExpertBiases(first.float(), second.float()), options
    )
    ops = HPUOps(bridge)
    prepared = ops.prepare_experts(
        *(stored[0], stored[1], stored[2], torch.bfloat16), ExpertBiases(first, second), options
    )
    assert isinstance(prepared, HPUMxfp4Experts | HPULowBitExperts)
    given: list[Any] = [t.to(bridge.device) for t in (x, ids, weights)]
    dense: list[Any] = [
        t.to(bridge.device) for t in (both.bfloat16(), down.bfloat16(), first, second)
    ]
    on_card = ExpertBiases(*dense[2:])
    moe: Any = ops.moe
    calls: dict[str, Callable[[], Tensor]] = {
        "dense": partial(moe, *given, *dense[:2], on_card, options),
        "MXFP4": partial(prepared.to(bridge.device).forward, *given),
    }
    for name, call in calls.items():
        comparison.add_call(bridge, name, call, want)
    return comparison.outcome()


def check_narrow_moe(bridge: HabanaBridge) -> Outcome:
    """Check experts with 8-bit and 4-bit weights, which are dequantized before the operator."""
    if (skipped := _without_conversion(bridge)) is not None:
        return skipped
    comparison = Comparison()
    x, ids, weights = _routed()
    for name, make in _NARROW.items():
        stored = [[make() for _ in range(4)] for _ in range(3)]
        prepared = HPUOps(bridge).prepare_experts(stored[0], stored[1], stored[2], torch.bfloat16)
        assert isinstance(prepared, HPUMxfp4Experts | HPULowBitExperts)
        near = [t.to(bridge.device) for t in (x, ids, weights)]
        call = partial(prepared.to(bridge.device).forward, near[0], near[1], near[2])
        gate, up, down = (torch.stack([w.dequantize() for w in part]) for part in stored)
        want = NativeOps().moe(x.float(), ids, weights, torch.cat([gate, up], dim=1), down)
        comparison.add_call(bridge, name, call, want)
    return comparison.outcome()


def check_narrow_matmul(bridge: HabanaBridge) -> Outcome:
    """Check weights of 8 bits, and of 4 and 5 bits with minimums, which are dequantized before a
    matmul, against a float32 matmul of the same values.
    """
    if (skipped := _without_conversion(bridge)) is not None:
        return skipped
    comparison = Comparison()
    x = torch.randn(17, 64).bfloat16()
    for name, make in _NARROW.items():
        weight = make()
        want = x.float() @ weight.dequantize().T
        prepared = HPUOps(bridge).prepare_weight(weight, torch.bfloat16)
        assert isinstance(prepared, HPUNarrowWeight)
        call = partial(prepared.to(bridge.device).linear, x.to(bridge.device))
        comparison.add_call(bridge, name, call, want)
    return comparison.outcome()


def check_fp8_cast(bridge: HabanaBridge) -> Outcome:
    """Check the conversion to FP8 (e4m3) with a scale, and back."""
    if (missing := _missing("cast_to_fp8_v2", "cast_from_fp8")) is not None:
        return missing
    hpu: Any = torch.ops.hpu
    x = torch.randn(64, 64).bfloat16()
    scale = torch.tensor(16.0)
    on_card = x.to(bridge.device), scale.to(bridge.device)
    call = partial(hpu.cast_to_fp8_v2, *on_card, False, False, dtype=_FP8)
    cast, _ = call()
    inverse = (1 / scale).to(bridge.device)
    back = hpu.cast_from_fp8(cast, inverse, torch.bfloat16).cpu().float()
    normal = x.float().abs() * scale > 2**-6  # smaller values are subnormal and have fewer bits
    error = ((back - x.float()).abs() / x.float().abs())[normal].max()
    if (reason := slow_call("e4m3", shortest_s(bridge, call))) is not None:
        return Outcome("fail", reason)
    detail = f"largest rounding error {error:.3f}, limit {_FP8_STEP / 2 + 2**-8:.3f}"
    return Outcome("pass" if error <= _FP8_STEP / 2 + 2**-8 else "fail", detail)


def check_fp8_matmul(bridge: HabanaBridge) -> Outcome:
    """Check an FP8 (e4m3) matmul with scales, against a float32 matmul of the same values."""
    if (missing := _missing("cast_to_fp8_v2", "fp8_gemm_v2")) is not None:
        return missing
    hpu: Any = torch.ops.hpu
    left, right = torch.randn(32, 64).to(_FP8), torch.randn(48, 64).to(_FP8)
    scales = torch.tensor(0.5), torch.tensor(0.25)
    one = torch.tensor(1.0).to(bridge.device)
    on_card = [
        hpu.cast_to_fp8_v2(x.bfloat16().to(bridge.device), one, False, False, dtype=_FP8)[0]
        for x in (left, right)
    ]
    call = partial(
        hpu.fp8_gemm_v2,
        on_card[0],
        False,
        on_card[1],
        True,
        None,
        torch.bfloat16,
        *(scale.to(bridge.device) for scale in scales),
        None,
        False,
    )
    comparison = Comparison()
    comparison.add_call(
        bridge, "e4m3", call, left.float() @ right.float().T * scales[0] * scales[1]
    )
    return comparison.outcome()


def check_uint4_matmul(bridge: HabanaBridge) -> Outcome:
    """Check a matmul with a grouped 4-bit weight with zero points, against a float32 matmul of the
    same values.

    With and without an order of its inputs, and with partial groups.
    """
    if (skipped := _without_conversion(bridge)) is not None:
        return skipped
    comparison = Comparison()
    num_out, num_in, num_groups = 48, 128, 4
    words = torch.randint(-(2**31), 2**31 - 1, (num_in // 8, num_out)).int()
    in_order = (torch.arange(num_in) // (num_in // num_groups)).int()
    parts = (torch.arange(num_in) % 37 // 10).int()
    orders = {"in order": None, "act-order": in_order[torch.randperm(num_in)], "parts": parts}
    for name, groups in orders.items():
        weight = GroupedWeight(
            words=words,
            bits=4,
            scales=(torch.rand(num_groups, num_out) / 64 + 2**-8).bfloat16().float(),
            zeros=torch.randint(0, 16, (num_groups, num_out), dtype=torch.int16),
            groups=groups,
        )
        prepared = HPUOps(bridge).prepare_weight(weight, torch.bfloat16)
        assert isinstance(prepared, HPUNarrowWeight)
        x = torch.randn(17, num_in).bfloat16()
        call = partial(prepared.to(bridge.device).linear, x.to(bridge.device))
        comparison.add_call(bridge, name, call, x.float() @ weight.dequantize().T)
    return comparison.outcome()


def _routed() -> tuple[Tensor, Tensor, Tensor]:
    """Return 17 tokens of 64 features, two of four experts for each, and the weights of these
    experts.
    """
    return torch.randn(17, 64).bfloat16(), torch.randint(0, 4, (17, 2)), torch.rand(17, 2)


def _grouped_weight(bits: int) -> GroupedWeight:
    """Return a quantized weight [64, 64] with four groups."""
    return GroupedWeight(
        words=torch.randint(-(2**31), 2**31 - 1, (64 * bits // 32, 64)).int(),
        bits=bits,
        scales=torch.full((4, 64), 2.0 ** -(bits + 2)),
        zeros=torch.full((4, 64), 2 ** (bits - 1), dtype=torch.int16),
    )


def _mxfp4_weight() -> Mxfp4Weight:
    """Return an MXFP4 weight [64, 64]."""
    blocks = torch.randint(256, (64, 2, 16), dtype=torch.uint8)
    return Mxfp4Weight(blocks=blocks, scales=torch.randint(121, 125, (64, 2), dtype=torch.uint8))


def _weight_with_minimums(bits: int) -> MinimumWeight:
    """Return a quantized weight [64, 64] with two groups of 32 inputs, in the form of GGUF
    files.
    """
    scales, minimums = (
        GroupScales(
            factors=torch.full((64, 1), 2.0**-exponent),
            multipliers=torch.randint(64, (64, 2), dtype=torch.int8),
        )
        for exponent in (bits + 8, 8)
    )
    codes = torch.randint(2**bits, (64, 64), dtype=torch.uint8)
    return MinimumWeight(codes=codes, bits=bits, scales=scales, minimums=minimums)


_NARROW: dict[str, Callable[[], StoredWeight]] = {
    "8 bits": partial(_grouped_weight, 8),
    "4 bits": partial(_grouped_weight, 4),
    "MXFP4": _mxfp4_weight,
    "4 bits with minimums": partial(_weight_with_minimums, 4),
    "5 bits with minimums": partial(_weight_with_minimums, 5),
}
"""Weights that are dequantized in different ways."""


def _without_conversion(bridge: HabanaBridge) -> Outcome | None:
    if not bridge.is_lazy:
        return Outcome("skip", "convert_from_uint4 is documented for lazy mode and compiled graphs")
    return _missing("convert_from_uint4")


def _missing(*names: str) -> Outcome | None:
    lacking = [name for name in names if not hasattr(torch.ops.hpu, name)]
    if lacking:
        return Outcome("skip", f"this bridge has no operator {', '.join(lacking)}")
    return None
