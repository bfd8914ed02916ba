"""Test packed experts against the torch reference, for each instruction set of this machine."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.loops import loop_over
from tests.ops.test_stored_weights import fp8, minimums, mxfp4, nibbles, whole
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.cpu.weights.stored import pack_stored, pack_stored_experts
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.expert_options import NO_BIASES, ExpertBiases, ExpertOptions
from vllm.ops.native.operators import NativeOps
from vllm.ops.stored_weight import StoredWeight

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
INT8, INT4 = WeightFormat.INT8, WeightFormat.INT4
NATIVE = NativeOps()

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def experts_of(num: int, hidden: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return gate_up and down projections, scaled so that results are about 1."""
    gate_up = torch.randn(num, 2 * size, hidden) * 2 * hidden**-0.5
    return gate_up.to(dtype), (torch.randn(num, hidden, size) * size**-0.5).to(dtype)


def choices_of(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose different experts for each token; the last quarter of the experts is never chosen."""
    num_used = max(top_k, num_experts * 3 // 4)
    topk_ids = torch.rand(num_tokens, num_used).topk(top_k, dim=-1).indices
    return topk_ids, torch.rand(num_tokens, top_k).softmax(-1)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "size"),
    [(4, 1, 64, 64), (8, 2, 96, 200), (64, 8, 128, 40), (5, 3, 640, 24)],
)
def test_packed_experts_agree_with_the_reference(isas, num_experts, top_k, hidden, size, dtype):
    gate_up, down = experts_of(num_experts, hidden, size, dtype)
    tolerance = 1e-5 if dtype is FLOAT32 else 2**-6
    cases = []
    for num_tokens in (1, 2, 7, 64, 300):
        x = torch.randn(num_tokens, hidden + 8).to(dtype)[:, :hidden]
        choices = choices_of(num_tokens, num_experts, top_k)
        cases.append((x, choices, NATIVE.moe(x, *choices, gate_up, down)))
    for _ in isas:
        packed = PackedExperts.pack(gate_up.clone(), down.clone())
        for x, choices, want in cases:
            got = packed.forward(x, *choices)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        first = packed.multiply_gate_up(1, x)
        torch.testing.assert_close(first, F.linear(x, gate_up[1]), rtol=tolerance, atol=tolerance)
        second = packed.multiply_down(1, first[:, :size])
        want = F.linear(first[:, :size], down[1])
        torch.testing.assert_close(second, want, rtol=tolerance, atol=tolerance)


@loop_over("dtype", [FLOAT32, BFLOAT16])
@loop_over(
    "options",
    [
        ExpertOptions(),
        ExpertOptions(limit=0.8),
        ExpertOptions(is_gelu=True),
        ExpertOptions(alpha=1.1, limit=3.0, scales_inputs=True),
        ExpertOptions(scales_inputs=True),
        ExpertOptions(has_gate=False),
        ExpertOptions(has_gate=False, first_expert=3),
    ],
)
def test_biases_and_options_agree_with_the_reference(isa, options, dtype):
    gate_up, down = experts_of(6, 96, 104, dtype)
    added = ExpertBiases(torch.randn(6, 208).to(dtype), torch.randn(6, 96).to(dtype))
    if not options.has_gate:
        gate_up = gate_up[:, :104].contiguous()
    for biases in (added, NO_BIASES) if options.has_gate else (NO_BIASES,):
        packed = PackedExperts.pack(gate_up.clone(), down.clone(), None, biases, options)
        for num_tokens in (1, 7, 64):
            x = torch.randn(num_tokens, 96).to(dtype)
            choices = choices_of(num_tokens, 6, 2)
            got = packed.forward(x, *choices)
            want = NATIVE.moe(x, *choices, gate_up, down, biases, options)
            tolerance = 1e-5 if dtype is FLOAT32 else 2**-6
            torch.testing.assert_close(got, want, rtol=tolerance, atol=2 * tolerance)
    few = ExpertBiases(torch.randn(5, 208).to(dtype))
    message = (
        r"a bias must be dense \[6, 208\] .* got \[5, 208\]"
        if options.has_gate
        else "must not have biases"
    )
    with pytest.raises(ValueError, match=message):
        PackedExperts.pack(gate_up, down, None, few, options)


@loop_over("dtype", [FLOAT32, BFLOAT16])
@loop_over("weight_format", [None, INT8])
@loop_over("scales_inputs", [False, True])
def test_parts_of_the_experts_add_up_to_all(isa, dtype, weight_format, scales_inputs):
    gate_up, down = experts_of(7, 96, 72, FLOAT32)
    biases = torch.randn(7, 144).to(dtype), torch.randn(7, 96).to(dtype)
    x = torch.randn(9, 96).to(dtype)
    topk_ids, topk_weights = choices_of(9, 7, 2)
    topk_ids[0] = torch.tensor([5, 4])  # both experts are in the last part
    parts = torch.zeros(9, 96)
    for first, end in ((0, 3), (3, 4), (4, 7)):
        options = ExpertOptions(scales_inputs=scales_inputs, first_expert=first)
        own = [part[first:end].to(dtype) for part in (gate_up, down, *biases)]
        added = ExpertBiases(*own[2:])
        packed = PackedExperts.pack(
            *(part.clone() for part in own[:2]), weight_format, added, options
        )
        got = packed.forward(x, topk_ids, topk_weights)
        alone = NATIVE.moe(x, topk_ids, topk_weights, *own[:2], added, options)
        tolerance = 2**-4 if weight_format else 1e-5 if dtype is FLOAT32 else 2**-6
        torch.testing.assert_close(got, alone, rtol=tolerance, atol=4 * tolerance)
        assert bool((got[0] == 0).all()) == (first != 4)
        parts += alone.float()
    all_of_them = (gate_up.to(dtype), down.to(dtype), ExpertBiases(*biases))
    options = ExpertOptions(scales_inputs=scales_inputs)
    want = NATIVE.moe(x, topk_ids, topk_weights, *all_of_them, options).float()
    torch.testing.assert_close(parts, want, rtol=2**-6, atol=2**-5)


def composed(experts: list[list[PackedWeight]], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the same result from packed weights, expert by expert."""
    gate, up, down = experts
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            row = x[token][None]
            parts = torch.cat((gate[expert].linear(row), up[expert].linear(row)), dim=-1)
            out[token] += weight * down[expert].linear(NATIVE.silu_and_mul(parts))[0].float()
    return out.to(x.dtype)


@loop_over("weight_format", [INT8, INT4])
@loop_over("dtype", [FLOAT32, BFLOAT16])
def test_quantized_experts_agree_with_single_layers(isa, dtype, weight_format):
    gate_up, down = experts_of(6, 96, 72, dtype)
    x = torch.randn(9, 96).to(dtype)
    topk_ids, topk_weights = choices_of(9, 6, 2)
    experts = [
        [PackedWeight.quantize(matrix.clone(), weight_format) for matrix in part]
        for part in (*gate_up.chunk(2, dim=1), down)
    ]
    want = composed(experts, x, topk_ids, topk_weights)
    for packed in (PackedExperts(*experts), PackedExperts.pack(gate_up, down, weight_format)):
        got = packed.forward(x, topk_ids, topk_weights)
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


STORED: dict[str, Callable[[int, int], StoredWeight]] = {
    "fp8": lambda num_out, num_in: fp8(num_out, num_in, 32),
    "8 bits with zero points": lambda num_out, num_in: whole(num_out, num_in, 32),
    "mxfp4": mxfp4,
    "4 bits with minimums": lambda num_out, num_in: minimums(num_out, num_in, 4, 32, 32),
    "5 bits with minimums": lambda num_out, num_in: minimums(num_out, num_in, 5, 32, 32),
}


@loop_over("name", STORED)
@loop_over("dtype", [FLOAT32, BFLOAT16])
def test_stored_experts_agree_with_single_layers(isa, dtype, name):
    shapes = ((96, 64), (96, 64), (64, 96))  # shapes of gate, up and down
    stored = [[STORED[name](*shape) for _ in range(4)] for shape in shapes]
    alone = [[pack_stored(weight) for weight in part] for part in stored]
    largest = max(weight.dequantize().abs().max() for part in stored for weight in part)
    x, (topk_ids, topk_weights) = torch.randn(9, 64).to(dtype) / largest, choices_of(9, 4, 2)
    want = composed(alone, x, topk_ids, topk_weights)
    got = pack_stored_experts(*stored).forward(x, topk_ids, topk_weights)
    size = want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * size)


def test_experts_may_read_their_inputs_in_an_order_of_their_own(isa):
    orders = [torch.arange(128)[torch.randperm(128)] // 32 for _ in range(4)]
    gate, up, down = (
        [pack_stored(nibbles(128, 128, 32, groups)) for groups in orders] for _ in range(3)
    )
    x, (topk_ids, topk_weights) = torch.randn(9, 128) / 16, choices_of(9, 4, 2)
    got = PackedExperts(gate, up, down).forward(x, topk_ids, topk_weights)
    want = composed([gate, up, down], x, topk_ids, topk_weights)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="gate and up of expert 0 have different orders"):
        PackedExperts(gate, up[::-1], down)


@pytest.mark.parametrize("weight_format", [None, INT8, INT4])
def test_a_token_does_not_depend_on_the_tokens_beside_it_nor_on_the_threads(
    isa, weight_format, restore_threads
):
    packed = PackedExperts.pack(*experts_of(16, 256, 128, BFLOAT16), weight_format)
    num_tokens = 1100  # more than one slab of tokens, and more than one block of an expert
    x = torch.randn(num_tokens, 256).bfloat16()
    topk_ids, topk_weights = choices_of(num_tokens, 16, 4)
    topk_ids[:, 1] = 3
    torch.set_num_threads(1)
    alone = [packed.forward(*(t[i, None] for t in (x, topk_ids, topk_weights))) for i in range(20)]
    for count, num_threads in ((2, 1), (7, 2), (20, 1), (num_tokens, 2)):
        torch.set_num_threads(num_threads)
        got = packed.forward(x[:count], topk_ids[:count], topk_weights[:count])
        assert torch.equal(got[:20], torch.cat(alone[:count]))


def test_the_reference_is_a_sum_over_the_experts_of_each_token():
    gate_up, down = experts_of(5, 16, 12, FLOAT32)
    x, (topk_ids, topk_weights) = torch.randn(7, 16), choices_of(7, 5, 3)
    topk_ids[2] = 4  # one expert is chosen three times
    want = torch.zeros(7, 16)
    for token in range(7):
        for expert, weight in zip(topk_ids[token], topk_weights[token], strict=True):
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2)
            want[token] += weight * F.linear(F.silu(gate) * up, down[expert])
    torch.testing.assert_close(NATIVE.moe(x, topk_ids, topk_weights, gate_up, down), want)
    packed = PackedExperts.pack(gate_up, down)
    torch.testing.assert_close(packed.forward(x, topk_ids, topk_weights), want)


def test_dense_experts_are_packed_in_their_own_memory():
    gate_up, down = experts_of(3, 128, 64, BFLOAT16)
    before = gate_up.clone(), down.clone()
    packed = PackedExperts.pack(gate_up, down)
    assert packed.num_bytes == 3 * 3 * 64 * 128 * 2
    assert not torch.equal(gate_up, before[0])
    assert not torch.equal(down, before[1])


def test_what_does_not_fit_is_refused():
    gate_up, down = experts_of(4, 64, 64, FLOAT32)
    quantized = PackedExperts.pack(gate_up, down, INT8)
    parts = [[PackedWeight.quantize(gate_up[0, :64], f)] for f in (INT8, INT4)]
    wide, short = torch.randn(5, 128), gate_up[..., :32].contiguous()
    x, (ids, weights) = torch.randn(5, 64), choices_of(5, 4, 2)
    for message, call in [
        (r"INT8.*INT4|INT4.*INT8", lambda: PackedExperts(parts[0], parts[1], parts[0])),
        ("got 1, 0 and 1 weights", lambda: PackedExperts(parts[0], [], parts[0])),
        (r"must be \[32, 64\], got \[64, 64\]", lambda: PackedExperts.pack(short, down)),
        ("with one dense row", lambda: quantized.forward(x, ids[:4], weights)),
        ("with one dense row", lambda: quantized.forward(x, ids, weights.double())),
        ("with one dense row", lambda: quantized.forward(x, ids[:, :0], weights[:, :0])),
        (
            r"x torch.float32 \[5, 32\] .* not fit",
            lambda: quantized.forward(x[:, :32], ids, weights),
        ),
        ("not dense: strides", lambda: quantized.forward(wide[:, ::2], ids, weights)),
        (r"x \[5, 64\], gate_up \[4", lambda: NATIVE.moe(x, ids, weights, gate_up, down[:3])),
        (r"of 5 tokens, got \[4, 2\]", lambda: NATIVE.moe(x, ids[:4], weights, gate_up, down)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    ids[3, 1] = 4
    with pytest.raises(IndexError, match=r"topk_ids\[7\] must be one of the 4 experts, got 4"):
        quantized.forward(x, ids, weights)
    assert quantized.forward(x[:0], ids[:0], weights[:0]).shape == (0, 64)
