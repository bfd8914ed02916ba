"""Test the operators of a Gaudi card against the torch reference, in simulation."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gaudi_sim.bridge import SimBridge
from tests.loops import loop_over

# The imported tests run here again, with the `ops` fixture of this file.
from tests.ops.test_ops_parity import (  # noqa: F401
    packed_qkv,
    seeded,
    test_fused_add_rms_norm_agrees_with_reference,
    test_not_a_number_is_not_hidden,
    test_reshape_and_cache_writes_real_slots_only,
    test_rms_norm_agrees_with_reference,
    test_silu_and_mul_agrees_with_reference,
    test_silu_and_mul_of_extreme_gates,
)
from vllm.ops.expert_options import NO_BIASES, ExpertBiases, ExpertOptions, RoutingOptions
from vllm.ops.hpu.low_bit_experts import HPULowBitExperts
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.hpu.quantized import HPUFp8Experts
from vllm.ops.native.operators import NativeOps
from vllm.ops.prepared import ExpertMatmuls
from vllm.ops.stored_weight import (
    Fp8Weight,
    GroupedWeight,
    GroupScales,
    Int8Weight,
    MinimumWeight,
    Mxfp4Weight,
)
from vllm.platforms.habana.kernels import FusedKernels

NATIVE = NativeOps()
ROUTING = RoutingOptions(top_k=3, weights="softmax")
OTHERS_FIRST = ExpertOptions(first_expert=2)
"""The first two experts are on other ranks."""
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
    torch.float16: {"rtol": 2**-10, "atol": 2**-10},
}


class OnCard:
    """`HPUOps` for tensors of the host: copies them to the card, and the results back."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            moved = [x.to("hpu") if isinstance(x, Tensor) else x for x in args]
            result = getattr(self._ops, name)(*moved)
            for mine, given in zip(moved, args, strict=True):
                if isinstance(mine, Tensor) and name == "reshape_and_cache":
                    given.copy_(mine)
            if isinstance(result, tuple):
                return tuple(x.cpu() for x in result)
            return result if result is None else result.cpu()

        return call


@pytest.fixture(params=["lazy", "eager"])
def bridge(request: pytest.FixtureRequest) -> Iterator[SimBridge]:
    with torch.inference_mode():
        yield SimBridge("gaudi2", is_lazy=request.param == "lazy", is_strict=True)


@pytest.fixture
def ops(bridge: SimBridge) -> OnCard:
    return OnCard(HPUOps(bridge))


def table(num_positions: int, rot_dim: int) -> Tensor:
    angles = torch.rand(num_positions, rot_dim // 2) * 7
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@loop_over("dtype", TOLERANCES)
@loop_over("is_neox", [True, False])
@loop_over("head_size, rot_dim", [(16, 16), (64, 32), (80, 20), (100, 100)])
@loop_over("index_dtype", [torch.int32, torch.int64])
def test_rotary_embedding_agrees_with_reference(
    bridge, head_size, rot_dim, is_neox, index_dtype, dtype
):
    packed = torch.randn(40, 10, head_size, dtype=dtype)
    cos_sin, positions = table(300, rot_dim), torch.randint(300, (40,), dtype=index_dtype)
    query, key, _ = packed.split([6, 2, 2], dim=1)
    want = NATIVE.rotary_embedding(positions, query, key, cos_sin, is_neox)
    on_card = packed.to("hpu")
    query, key, _ = on_card.split([6, 2, 2], dim=1)
    got = HPUOps(bridge).rotary_embedding(
        positions.to("hpu"), query, key, cos_sin.to("hpu"), is_neox
    )
    for mine, reference in zip(got, want, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.cpu(), reference, **TOLERANCES[dtype])
        assert torch.equal(mine[..., rot_dim:].cpu(), reference[..., rot_dim:])
    assert torch.equal(on_card.cpu(), packed), "an argument was written over"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(5, 4, 32), (2, 3, 4, 32), (32,)])
def test_rms_norm_of_any_shape_keeps_shape_and_dtype(ops, shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(32).to(dtype)
    want = NATIVE.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), want, **TOLERANCES[dtype])
    want = NATIVE.rms_norm(x, weight, 1e-5, 1)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5, 1), want, **TOLERANCES[dtype])


def test_rms_norm_of_heads_in_a_packed_tensor_on_the_card(bridge):
    packed, weight = torch.randn(9, 8, 20), torch.randn(20)
    want = NATIVE.rms_norm(packed[:, :4], weight, 1e-6)
    got = HPUOps(bridge).rms_norm(packed.to("hpu")[:, :4], weight.to("hpu"), 1e-6)
    assert got.is_contiguous()
    torch.testing.assert_close(got.cpu(), want)


def test_the_kernel_of_the_norm_gets_at_least_three_dimensions():
    shapes = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        shapes.append(tuple(x.shape))
        return x.clone()

    kernels = SimpleNamespace(rms_norm=rms_norm, has=lambda name: name == "FusedRMSNorm")
    ops = HPUOps(SimpleNamespace(kernels=kernels, is_recording=True, fp8_max=240.0))
    for shape in [(7, 16), (7, 2, 16), (16,)]:
        assert ops.rms_norm(torch.randn(shape), torch.ones(16), 1e-5).shape == shape
    assert shapes == [(1, 7, 16), (7, 2, 16), (1, 1, 16)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_size", [64, 72, 80])
def test_attention_within_images_agrees_with_reference(ops, head_size, dtype):
    inputs = [torch.randn(2, 9, 3, head_size).to(dtype).transpose(1, 2) for _ in range(3)]
    group = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    of_group, of_first = group[:, None] == group, group < 1
    masks = (None, of_group, of_group[None, None], of_first[None, None, None], of_first[None])
    for mask in masks:
        for scale in (None, 0.3):
            want = NATIVE.full_attention(*inputs, mask, scale)
            got = ops.full_attention(*inputs, mask, scale)
            torch.testing.assert_close(got, want, **TOLERANCES[dtype])


def test_attention_within_images_is_the_fused_kernel_where_there_is_one():
    masks, inputs = [], [torch.randn(2, 4, 9, 72) for _ in range(3)]

    def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        masks.append(mask if mask is None else tuple(mask.shape))
        return query

    for name in ("FusedSDPA", "none"):
        kernels = SimpleNamespace(sdpa=sdpa, has=name.__eq__)
        ops = HPUOps(SimpleNamespace(kernels=kernels, is_recording=True, fp8_max=240.0))
        for mask in (None, torch.ones(9, 9).bool(), torch.ones(2, 1, 1, 9).bool()):
            ops.full_attention(*inputs, mask)
    assert masks == [None, (2, 1, 9, 9), (2, 1, 9, 9)]


def test_shapes_that_do_not_fit_are_named(ops):
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"\[7\].*\[3, 8\]"):
        ops.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"\[2, 8\]"):
        ops.fused_add_rms_norm(x, torch.randn(2, 8), torch.ones(8), 1e-5)
    q = torch.randn(3, 2, 8)
    for rot_dim in (7, 10):
        with pytest.raises(ValueError, match=rf"rot_dim .* head size 8, got {rot_dim}"):
            ops.rotary_embedding(torch.arange(3), q, q, torch.zeros(9, rot_dim), True)
    with pytest.raises(ValueError, match=r"positions \(4\), queries \(3\) and keys \(3\)"):
        ops.rotary_embedding(torch.arange(4), q, q, torch.zeros(9, 8), True)


class Layer(nn.Module):
    """All operators of a layer except attention."""

    def __init__(self, ops: NativeOps) -> None:
        super().__init__()
        self.ops = ops
        self.register_buffer("weight", torch.randn(16))
        self.register_buffer("cos_sin", table(64, 8))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        normed, residual = self.ops.fused_add_rms_norm(x, x, self.weight, 1e-5)
        heads = normed.unflatten(1, (2, 8))
        neox = self.ops.rotary_embedding(positions, heads, heads, self.cos_sin, True)
        pairs = self.ops.rotary_embedding(positions, heads, heads, self.cos_sin, False)
        return residual, *neox, *pairs, self.ops.silu_and_mul(normed)


def launches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 16), torch.randint(64, (6,), dtype=torch.int32)) for _ in range(3)]


def test_a_warmed_layer_neither_compiles_nor_waits_and_a_graph_follows_its_inputs(bridge):
    reference, layer = Layer(NATIVE), Layer(HPUOps(bridge))
    layer.load_state_dict(reference.state_dict())
    layer.to("hpu")
    if bridge.is_lazy:
        run = bridge.wrap_in_hpu_graph(layer)
    else:
        run = torch.compile(layer, backend="hpu_backend", dynamic=False, fullgraph=True)
    inputs = launches()
    on_card = [(x.to("hpu"), positions.to("hpu")) for x, positions in inputs]
    run(*on_card[0])
    for given, moved in zip(inputs, on_card, strict=True):
        with bridge.warmed_section():
            got = run(*moved)
        for mine, want in zip(got, reference(*given), strict=True):
            torch.testing.assert_close(mine.cpu(), want)
    assert not bridge.counters().cpu_fallbacks


def test_without_a_bridge_it_is_that_of_the_platform(monkeypatch):
    from vllm import envs
    from vllm.platforms import registry

    settings = envs.Envs.load({"VLLM_HPU_SIM": "gaudi2"})
    monkeypatch.setattr(envs, "get", lambda: settings)
    registry.resolve_platform.cache_clear()
    try:
        x = torch.randn(3, 8)
        ops = HPUOps()
        assert ops.rms_norm(x.to("hpu"), torch.ones(8).to("hpu"), 1e-5).shape == (3, 8)
    finally:
        registry.resolve_platform.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_one_operator_of_the_bridge_where_it_has_one(bridge, dtype, monkeypatch):
    ops, kernels = HPUOps(bridge), CountsOfExperts(bridge.kernels)
    monkeypatch.setattr(ops, "kernels", kernels)
    x, gate_up, down = torch.randn(9, 32), torch.randn(5, 48, 32) / 6, torch.randn(5, 32, 24) / 5
    given = [t.to(dtype) for t in (x, gate_up, down)]
    routed = NATIVE.route(torch.randn(9, 5), RoutingOptions(top_k=3, weights="softmax_of_chosen"))
    added = ExpertBiases(torch.randn(5, 48).to(dtype), torch.randn(5, 32).to(dtype))
    for options in (ExpertOptions(), ExpertOptions(limit=1.0), ExpertOptions(scales_inputs=True)):
        ops.expect_experts(options)
        for biases in (NO_BIASES, added):
            before, more = kernels.calls, biases is not NO_BIASES
            want = NATIVE.moe(given[0], *routed, *given[1:], biases, options)
            tensors = [t.to("hpu") for t in (given[0], *routed, *given[1:])]
            on_card = ExpertBiases(*(t.to("hpu") for t in biases)) if more else biases
            got = ops.moe(*tensors, on_card, options)
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=TOLERANCES[dtype]["atol"] * 8)
            has_one = options.limit or (options == ExpertOptions() and not more)
            assert kernels.calls - before == bool(has_one and bridge.is_lazy)
    monkeypatch.setattr(kernels, "has", lambda name: name != "mixture_of_experts", raising=False)
    ops.expect_experts(ExpertOptions(limit=1.0))  # asks the bridge again
    before = kernels.calls
    ops.moe(*(t.to("hpu") for t in (given[0], *routed, *given[1:])))
    assert kernels.calls == before


class CountsOfExperts:
    calls = 0

    def __init__(self, kernels: FusedKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        self.calls += name.endswith("moe")
        return getattr(self._kernels, name)


def fp8_experts(num_out: int, num_in: int, block_inputs: int) -> list[Fp8Weight]:
    scales = torch.rand(3, num_out, num_in // block_inputs) * 1e-3 + 1e-3
    numbers = (torch.randn(3, num_out, num_in) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return [
        Fp8Weight(numbers=n, scales=s, block_inputs=block_inputs)
        for n, s in zip(numbers, scales, strict=True)
    ]


@pytest.mark.parametrize(("card", "block_inputs"), [("gaudi2", 8), ("gaudi2", 0), ("gaudi3", 0)])
@pytest.mark.parametrize("is_lazy", [False, True])
@torch.inference_mode()
def test_experts_in_fp8_stay_in_fp8(card, block_inputs, is_lazy):
    """One operator computes them if it can, else one matmul after another.

    This rank has the last 3 of 5 experts.
    """
    bridge = SimBridge(card, is_lazy=is_lazy, is_strict=True)
    ops, size, hidden = HPUOps(bridge), 24, 32
    stored = [
        fp8_experts(*shape, block_inputs or shape[1])
        for shape in ((size, hidden), (size, hidden), (hidden, size))
    ]
    ops.kernels = counted = CountsOfExperts(bridge.kernels)
    experts = ops.prepare_experts(*stored, torch.bfloat16, options=OTHERS_FIRST)
    assert isinstance(experts, HPUFp8Experts)
    numbers = [p for name, p in experts.named_parameters() if "scale" not in name]
    assert {p.dtype for p in numbers} == {torch.float8_e4m3fn}
    x, routed = torch.randn(9, hidden).bfloat16(), NATIVE.route(torch.randn(9, 5), ROUTING)
    gate, up, down = (torch.stack([w.dequantize() for w in weights]) for weights in stored)
    want = NATIVE.moe(x.float(), *routed, torch.cat([gate, up], dim=1), down, options=OTHERS_FIRST)
    got = experts.to("hpu").forward(*(t.to("hpu") for t in (x, *routed))).cpu()
    assert got.dtype == x.dtype
    # Gaudi 2 rounds inputs and intermediate results to 3 bits of mantissa.
    error = (got.float() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < 0.1
    assert counted.calls == is_lazy
    assert_products(experts, gate, up, down, 0.06)


def assert_products(
    experts: ExpertMatmuls, gate: Tensor, up: Tensor, down: Tensor, most: float
) -> None:
    """Check the matmuls of one expert. The largest error is a fraction `most` of the largest
    result.
    """
    for multiply, weight in (
        (experts.multiply_gate_up, torch.cat([gate[1], up[1]])),
        (experts.multiply_down, down[1]),
    ):
        x = torch.randn(4, weight.shape[1]).bfloat16()
        want = x.float() @ weight.float().T
        assert (multiply(1, x.to("hpu")).cpu().float() - want).norm() < most * want.norm()


def grouped_experts(
    num_out: int, num_in: int, bits: int, has_order: bool = False
) -> list[GroupedWeight]:
    """Return experts with groups of 8 inputs."""
    order = torch.randperm(num_in) // 8
    return [
        GroupedWeight(
            words=torch.randint(-(2**31), 2**31 - 1, (num_in * bits // 32, num_out)).int(),
            bits=bits,
            scales=(torch.rand(num_in // 8, num_out) + 1).bfloat16().float() / 2**bits,
            zeros=torch.randint(0, 2**bits, (num_in // 8, num_out), dtype=torch.int16),
            groups=order.roll(number).int() if has_order else None,
        )
        for number in range(3)
    ]


def int8_experts(num_out: int, num_in: int) -> list[Int8Weight]:
    numbers = torch.randint(-128, 128, (3, num_out, num_in), dtype=torch.int8)
    return [Int8Weight(numbers=n, scales=(torch.rand(num_out) + 1) / 2**9) for n in numbers]


def mxfp4_experts(num_out: int, num_in: int) -> list[Mxfp4Weight]:
    """Return experts in which every element occurs with every scale."""
    return [
        Mxfp4Weight(
            blocks=torch.randint(256, (num_out, num_in // 32, 16), dtype=torch.uint8),
            scales=torch.randint(120, 126, (num_out, num_in // 32), dtype=torch.uint8),
        )
        for _ in range(3)
    ]


def minimum_experts(num_out: int, num_in: int, bits: int) -> list[MinimumWeight]:
    """Return experts like Q4_K and Q5_K, with groups of 8 inputs instead of 32."""

    def numbers() -> GroupScales:
        return GroupScales(
            factors=(torch.rand(num_out, num_in // 32) / 2**10).half().float(),
            multipliers=torch.randint(64, (num_out, num_in // 8), dtype=torch.int8),
        )

    return [
        MinimumWeight(
            codes=torch.randint(2**bits, (num_out, num_in), dtype=torch.uint8),
            bits=bits,
            scales=numbers(),
            minimums=numbers(),
        )
        for _ in range(3)
    ]


NARROW = {
    "int8": (int8_experts, torch.int8),
    "8 bits": (partial(grouped_experts, bits=8), torch.int8),
    "8 bits, act-order": (partial(grouped_experts, bits=8, has_order=True), torch.int8),
    "4 bits": (partial(grouped_experts, bits=4), torch.int32),
    "2 bits": (partial(grouped_experts, bits=2), torch.int32),
    "4 bits, act-order": (partial(grouped_experts, bits=4, has_order=True), torch.int32),
    "MXFP4": (mxfp4_experts, torch.int32),
    "Q4_K": (partial(minimum_experts, bits=4), torch.int32),
    "Q5_K": (partial(minimum_experts, bits=5), torch.int8),
}
CLAMPED = ExpertOptions(limit=1.0, first_expert=2)
SCALED = ExpertOptions(scales_inputs=True, first_expert=2)
WITHOUT_GATES = ExpertOptions(has_gate=False, first_expert=2)


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("is_lazy", [False, True])
@torch.inference_mode()
def test_experts_of_few_bits_stay_so_and_are_widened_for_each_launch(kind, is_lazy):
    torch.manual_seed(0)
    make, dtype = NARROW[kind]
    release = (1, 23)  # this release does not have the operator for MXFP4
    bridge = SimBridge("gaudi2", is_lazy=is_lazy, is_strict=True, release=release)
    ops, size, hidden = HPUOps(bridge), 32, 64
    gates, ups, downs = (make(*s) for s in ((size, hidden), (size, hidden), (hidden, size)))
    if "order" in kind:  # both weights have the same inputs, so the same order
        ups = [replace(up, groups=gate.groups) for gate, up in zip(gates, ups, strict=True)]
    ops.kernels = counted = CountsOfExperts(bridge.kernels)
    gate, up, down = (
        torch.stack([w.dequantize() for w in weights]).bfloat16() for weights in (gates, ups, downs)
    )
    x, routed = torch.randn(9, hidden).bfloat16(), NATIVE.route(torch.randn(9, 5), ROUTING)
    added = ExpertBiases(torch.randn(3, 2 * size).bfloat16(), torch.randn(3, hidden).bfloat16())
    for options, biases in (
        *((OTHERS_FIRST, NO_BIASES), (CLAMPED, added)),
        *((CLAMPED, ExpertBiases(added[0])), (SCALED, NO_BIASES), (OTHERS_FIRST, added)),
        (WITHOUT_GATES, NO_BIASES),
    ):
        given = gates if options.has_gate else []
        experts = ops.prepare_experts(given, ups, downs, torch.bfloat16, biases, options)
        assert isinstance(experts, HPULowBitExperts)
        parameters = experts.named_parameters()
        numbers = [p for name, p in parameters if name.endswith(("numbers", "words"))]
        assert [p.dtype for p in numbers] == [dtype] * 2
        both = torch.cat([gate, up], dim=1) if options.has_gate else up
        want = NATIVE.moe(x, *routed, both, down, biases, options).float()
        before = counted.calls
        got = experts.to("hpu").forward(*(t.to("hpu") for t in (x, *routed))).cpu()
        assert got.dtype == x.dtype
        assert (got.float() - want).norm() < 0.01 * want.norm()
        has_one = options == CLAMPED or (options == OTHERS_FIRST and biases == NO_BIASES)
        assert counted.calls - before == (has_one and is_lazy)
        assert_products(experts, gate[:, :0] if not options.has_gate else gate, up, down, 0.01)
    exact = ops.prepare_experts(gates, ups, downs, torch.float32).to("hpu")
    for number, weight in enumerate(downs):
        widened = exact.down.of_expert(number, torch.float32).cpu()
        assert torch.equal(widened.T, weight.dequantize())


@pytest.mark.parametrize("options", [CLAMPED, OTHERS_FIRST, WITHOUT_GATES])
@torch.inference_mode()
def test_experts_in_fp8_without_an_operator_are_products_of_fp8(options):
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    ops, size, hidden = HPUOps(bridge), 24, 32
    shapes = ((size, hidden), (size, hidden), (hidden, size))
    stored = [fp8_experts(*shape, shape[1]) for shape in shapes]
    biases = ExpertBiases(torch.randn(3, 2 * size).bfloat16(), torch.randn(3, hidden).bfloat16())
    if not options.has_gate:
        stored[0], biases = [], NO_BIASES
    experts = ops.prepare_experts(*stored, torch.bfloat16, biases, options)
    assert isinstance(experts, HPUFp8Experts)
    x, routed = torch.randn(9, hidden).bfloat16(), NATIVE.route(torch.randn(9, 5), ROUTING)
    *first, down = (torch.stack([w.dequantize() for w in weights]) for weights in stored if weights)
    exact = ExpertBiases(*(None if bias is None else bias.float() for bias in biases))
    given = x.float(), *routed, torch.cat(first, dim=1), down, exact
    want = NATIVE.moe(*given, options)
    got = experts.to("hpu").forward(*(t.to("hpu") for t in (x, *routed))).cpu().float()
    assert (got - want).norm() < 0.1 * want.norm()


def test_experts_that_differ_too_much_are_left_to_torch():
    ops = HPUOps(SimBridge("gaudi2", is_lazy=True, is_strict=True))
    narrow, int8 = grouped_experts(32, 32, 4), int8_experts(32, 32)
    mixed = [narrow[0], int8[1], narrow[2]]
    uneven = [replace(w, groups=(torch.arange(32) ** 2 // 200).int()) for w in narrow]
    other = [replace(w, groups=(torch.randperm(32) // 8).int()) for w in narrow]
    mxfp4, blocks = mxfp4_experts(32, 32), minimum_experts(32, 32, 4)
    short = [replace(w, scales=replace(w.scales, factors=w.scales.factors[:, :0])) for w in blocks]
    for gate, up, down in (
        *((mixed, mixed, int8), (narrow, int8, narrow), (narrow, narrow, uneven)),
        *((narrow, other, narrow), (mxfp4, narrow, narrow), (blocks, short, blocks)),
    ):
        assert ops.prepare_experts(gate, up, down, torch.bfloat16) is None
