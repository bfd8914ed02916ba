"""Test experts in MXFP4 with the operator of a card, against the same values in torch."""

from dataclasses import replace

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from tests.hpu import needs_simulated_device
from tests.ops.test_hpu_ops import (
    CLAMPED,
    OTHERS_FIRST,
    ROUTING,
    SCALED,
    CountsOfExperts,
    assert_products,
    mxfp4_experts,
)
from vllm.ops.expert_options import NO_BIASES, ExpertBiases
from vllm.ops.hpu.low_bit_experts import HPULowBitExperts
from vllm.ops.hpu.mxfp4_experts import HPUMxfp4Experts
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.native.operators import NativeOps

pytestmark = needs_simulated_device

NATIVE = NativeOps()
SIZE, HIDDEN = 32, 64
SHAPES = ((SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def added() -> ExpertBiases:
    return ExpertBiases(torch.randn(3, 2 * SIZE).bfloat16(), torch.randn(3, HIDDEN).bfloat16())


CASES = {
    "silu": (OTHERS_FIRST, lambda: NO_BIASES),
    "clamped, biases": (CLAMPED, added),
    "clamped, one bias": (CLAMPED, lambda: ExpertBiases(added().gate_up)),
    "clamped": (CLAMPED, lambda: NO_BIASES),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["lazy", "compiled", "eager"])
@torch.inference_mode()
def test_they_stay_packed_and_give_what_torch_gives(case, mode):
    bridge = SimBridge("gaudi2", is_lazy=mode == "lazy", is_strict=True)
    options, make_biases = CASES[case]
    ops = HPUOps(bridge)
    ops.kernels = counted = CountsOfExperts(bridge.kernels)
    stored, biases = [mxfp4_experts(*shape) for shape in SHAPES], make_biases()
    experts = ops.prepare_experts(*stored, torch.bfloat16, biases, options)
    assert isinstance(experts, HPUMxfp4Experts)
    packed = sum(p.nbytes for p in experts.parameters() if p.dtype == torch.uint8)
    assert packed == 3 * 3 * SIZE * HIDDEN * 17 // 32
    gate, up, down = (torch.stack([w.dequantize() for w in part]).bfloat16() for part in stored)
    x, routed = torch.randn(9, HIDDEN).bfloat16(), NATIVE.route(torch.randn(9, 5), ROUTING)
    want = NATIVE.moe(x, *routed, torch.cat([gate, up], dim=1), down, biases, options)
    forward = experts.to("hpu").forward
    if mode == "compiled":
        forward = torch.compile(forward, backend="hpu_backend", dynamic=False, fullgraph=True)
    got = forward(*(t.to("hpu") for t in (x, *routed))).cpu()
    assert got.dtype == x.dtype
    assert (got.float() - want.float()).norm() < 0.01 * want.float().norm()
    assert bool(counted.calls) == (mode != "eager")
    assert not bridge.counters().cpu_fallbacks
    assert_products(experts, gate, up, down, 0.01)


def test_what_the_operator_does_not_take_is_widened():
    bridge = SimBridge("gaudi2", is_lazy=True)
    stored = [mxfp4_experts(*shape) for shape in SHAPES]
    parts = [  # weights of a rank that shares blocks of 32 with another rank
        replace(w, blocks=w.blocks.view(HIDDEN, -1, 8), scales=w.scales.repeat_interleave(2, 1))
        for w in stored[2]
    ]
    cases = {
        "inputs are scaled": (stored, torch.bfloat16, SCALED, NO_BIASES, {}),
        "silu with biases": (stored, torch.bfloat16, OTHERS_FIRST, added(), {}),
        "float32": (stored, torch.float32, OTHERS_FIRST, NO_BIASES, {}),
        "parts of blocks": ([*stored[:2], parts], torch.bfloat16, CLAMPED, added(), {}),
        "older": (stored, torch.bfloat16, CLAMPED, added(), {"release": (1, 23)}),
    }
    for case, (weights, dtype, options, biases, bridge_options) in cases.items():
        if bridge_options:
            bridge = SimBridge("gaudi2", is_lazy=True, **bridge_options)
        experts = HPUOps(bridge).prepare_experts(*weights, dtype, biases, options)
        assert isinstance(experts, HPULowBitExperts), case
