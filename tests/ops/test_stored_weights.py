"""Test weights of quantized checkpoints in the C++ kernels against their formula, on every
processor.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.loops import loop_over
from tests.ops.test_cpu_linear import in_blocks
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.weights.int4_layouts import NO_ZERO, make_groups
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.stored import pack_stored
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.stored_weight import (
    NF4,
    Fp8Weight,
    GroupedWeight,
    GroupScales,
    Int8Weight,
    MinimumWeight,
    Mxfp4Weight,
    StackedWeight,
    TableWeight,
    pack_bits,
    round_to_fp8,
    round_to_nf4,
)

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")


def fp8(num_out: int, num_in: int, block: int) -> Fp8Weight:
    codes = torch.randint(0, 127, (num_out, num_in)) + 128 * torch.randint(0, 2, (num_out, num_in))
    return Fp8Weight(
        numbers=codes.to(torch.uint8).view(torch.float8_e4m3fn),
        scales=torch.rand(num_out, -(-num_in // block)) + 0.1,
        block_inputs=block,
    )


def whole(num_out: int, num_in: int, block: int, is_ordered: bool = False) -> GroupedWeight:
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
    shape = num_in // block, num_out
    groups = (torch.randperm(num_in) // block).int() if is_ordered else None
    return GroupedWeight(
        words=codes.view(torch.int32).T.contiguous(),
        bits=8,
        scales=torch.rand(shape) + 0.1,
        zeros=torch.randint(0, 257, shape, dtype=torch.int16),
        groups=groups,
    )


def nibbles(num_out: int, num_in: int, block: int, groups: Tensor | None = None) -> GroupedWeight:
    shape = num_in // block, num_out
    return GroupedWeight(
        words=torch.randint(-(2**31), 2**31 - 1, (num_in // 8, num_out), dtype=torch.int32),
        bits=4,
        scales=torch.rand(shape).half().float(),
        zeros=torch.randint(0, 17, shape, dtype=torch.int16),
        groups=groups,
    )


def in_table(num_out: int, num_in: int, block: int) -> TableWeight:
    return TableWeight(
        codes=torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8),
        table=torch.randn(16).bfloat16().float(),
        scales=torch.rand(num_out, num_in // block) + 0.1,
    )


WEIGHTS = {
    "fp8, a scale per block": lambda: fp8(200, 320, 128),
    "fp8, small blocks": lambda: fp8(72, 192, 32),
    "fp8, blocks smaller than a tile": lambda: fp8(72, 192, 8),
    "fp8, long blocks": lambda: fp8(64, 1300, 640),
    "fp8, a scale per output": lambda: fp8(130, 300, 300),
    "8 bits in groups": lambda: whole(72, 256, 64),
    "8 bits, a group for all": lambda: whole(100, 300, 300),
    "8 bits, inputs of a group from everywhere": lambda: whole(64, 256, 128, is_ordered=True),
    "codes of a table, groups of 64": lambda: in_table(200, 320, 64),
    "codes of a table, groups of 8": lambda: in_table(72, 1096, 8),
    "codes of a table, a scale per output": lambda: in_table(130, 1304, 1304),
}


@loop_over("name", WEIGHTS)
def test_rows_and_products_are_those_of_the_formula(isa, name):
    """Rows equal the formula bit for bit; matmuls up to the rounding of float32 sums and of
    bfloat16 results.
    """
    torch.manual_seed(0)
    weight = WEIGHTS[name]()
    dense, packed = weight.dequantize(), pack_stored(weight)
    assert packed.weight_format in (WeightFormat.FP8, WeightFormat.UINT8, WeightFormat.TABLE4)
    ids = torch.arange(len(dense))
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 2**-7)):
        assert torch.equal(packed.rows(ids, dtype), dense.to(dtype))
        many = torch.randn(64, dense.shape[1]).to(dtype)
        bias = torch.randn(len(dense)).to(dtype)
        want = many.double() @ dense.double().T + bias.double()
        size = many.double().norm(dim=1)[:, None] * dense.double().norm(dim=1)
        got = packed.linear(many, bias)
        assert ((got.double() - want).abs() <= allowed * (want.abs() + 0.05 * size)).all()
        for num_rows in (1, 3, 17):
            assert torch.equal(packed.linear(many[:num_rows], bias), got[:num_rows])


def test_codes_of_a_table_in_groups_that_fill_no_word_become_bytes():
    """A rank may have a part of a group. Values change by at most 0.4 % of the largest value of a
    table.
    """
    weight = replace(in_table(64, 96, 4), table=torch.linspace(-1, 1, 16) ** 3)
    packed = pack_stored(weight)
    assert packed.weight_format is WeightFormat.UINT8
    change = packed.rows(torch.arange(64), torch.float32) - weight.dequantize()
    largest = weight.scales.repeat_interleave(4, dim=1)
    assert (change.abs() <= 0.004 * largest).all()
    assert pack_stored(in_table(64, 90, 45)) is None


@pytest.mark.parametrize(("bits", "num_in"), [(4, 320), (2, 192), (8, 320)])
def test_parts_of_groups_from_everywhere_are_the_product_of_sorted_inputs(isa, bits, num_in):
    """A rank may have such inputs, in groups of 1 to 100."""
    torch.manual_seed(0)
    groups = torch.cat((torch.arange(5), torch.randint(0, 3, (num_in - 5,))))
    codes = torch.randint(0, 1 << bits, (72, num_in), dtype=torch.uint8)
    weight = GroupedWeight(
        words=pack_bits(codes, bits).T.contiguous(),
        bits=bits,
        scales=torch.rand(5, 72).half().float() + 0.125,
        zeros=torch.randint(0, 1 << bits, (5, 72), dtype=torch.int16),
        groups=groups[torch.randperm(num_in)].int(),
    )
    equal, order = weight.with_neighbours(32)
    packed, even, dense = pack_stored(weight), pack_stored(equal), weight.dequantize()
    assert torch.equal(packed.rows(torch.arange(72), torch.float32), dense)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(17, num_in).to(dtype)
        got = packed.linear(x)
        assert torch.equal(got, even.linear(x[:, order].contiguous()))
        assert torch.equal(packed.linear(x[:1]), got[:1])
        assert (got.double() - x.double() @ dense.double().T).norm() < 0.03 * got.norm()


def test_a_zero_point_that_is_no_number_leaves_parts_of_groups_to_torch():
    weight = whole(64, 64, 32)
    unequal = replace(weight, groups=(torch.arange(64) // 40).int())
    assert (unequal.zeros == 256).any() and pack_stored(unequal) is None


def test_an_infinite_input_does_not_reach_the_next_block(isa):
    """The kernel must not multiply inputs of other blocks with 0, because infinity times 0 is
    NaN.
    """
    weight = Fp8Weight(
        numbers=torch.ones(64, 64).to(torch.float8_e4m3fn),
        scales=torch.ones(64, 4),
        block_inputs=16,
    )
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(20, 64, dtype=dtype)
        x[:, 20] = float("inf")
        assert (pack_stored(weight).linear(x) == float("inf")).all()


def scales_of(num_out: int, num_groups: int, num_factors: int) -> GroupScales:
    return GroupScales(
        factors=(torch.rand(num_out, num_factors) + 0.1).half().float(),
        multipliers=torch.randint(-64, 64, (num_out, num_groups), dtype=torch.int8),
    )


def minimums(num_out: int, num_in: int, bits: int, block: int, factor: int) -> MinimumWeight:
    sizes = num_out, num_in // block, num_in // factor
    return MinimumWeight(
        codes=torch.randint(0, 1 << bits, (num_out, num_in), dtype=torch.uint8),
        bits=bits,
        scales=scales_of(*sizes),
        minimums=scales_of(*sizes),
    )


def mxfp4(num_out: int, num_in: int) -> Mxfp4Weight:
    return Mxfp4Weight(
        blocks=torch.randint(0, 256, (num_out, num_in // 32, 16), dtype=torch.uint8),
        scales=torch.randint(112, 132, (num_out, num_in // 32), dtype=torch.uint8),
    )


INT4_BLOCKS = {
    "4 bits with minimums": (lambda: minimums(72, 1536, 4, 32, 256), 32),
    "4 bits, factors of a group": (lambda: minimums(130, 96, 4, 32, 32), 32),
    "4 bits, small groups": (lambda: minimums(64, 768, 4, 16, 256), 16),
    "5 bits with minimums": (lambda: minimums(200, 1280, 5, 32, 256), 32),
    "5 bits, factors of a group": (lambda: minimums(64, 32, 5, 32, 32), 32),
    "mxfp4": (lambda: mxfp4(200, 1120), 32),
    "mxfp4, one group": (lambda: mxfp4(64, 32), 32),
    "mxfp4, groups of 16": (lambda: mxfp4_in_groups(72, 544, 16), 16),
    "mxfp4, groups of 8": (lambda: mxfp4_in_groups(64, 544, 8), 8),
}


def mxfp4_in_groups(num_out: int, num_in: int, size: int) -> tuple[Tensor, PackedWeight]:
    """Return E2M1 weights with one scale per `size` inputs: the dense values, and the packed
    weight.
    """
    wide = mxfp4(num_out, num_in)
    words = wide.blocks.flatten(1).view(torch.int32).T.contiguous()
    scales = (torch.rand(num_in // size, num_out) + 0.125).half().float()
    zeros = torch.full(scales.shape, NO_ZERO, dtype=torch.uint8)
    groups = make_groups(wide.shape, words, scales / 2, zeros, None)
    elements = Mxfp4Weight(blocks=wide.blocks, scales=torch.full_like(wide.scales, 127))
    dense = elements.dequantize() * scales.T.repeat_interleave(size, dim=1)
    return dense, PackedWeight.from_groups(words, groups, False, WeightFormat.MXFP4)


@loop_over("name", INT4_BLOCKS)
def test_weights_of_4_and_5_bits_are_those_of_the_formula(isa, name):
    """Rows equal the formula bit for bit; matmuls up to the rounding of float32 sums, with rounded
    inputs.
    """
    torch.manual_seed(0)
    make, block = INT4_BLOCKS[name]
    made = make()
    if isinstance(made, tuple):
        dense, packed = made
    else:
        dense, packed = made.dequantize(), pack_stored(made)
    assert packed.weight_format.has_int4_blocks
    ids = torch.arange(len(dense))
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 2**-7)):
        assert torch.equal(packed.rows(ids, dtype), dense.to(dtype))
        many, bias = torch.randn(40, dense.shape[1]).to(dtype), torch.randn(len(dense)).to(dtype)
        rounded = in_blocks(many, block)
        want = rounded @ dense.double().T + bias.double()
        size = rounded.norm(dim=1)[:, None] * dense.double().norm(dim=1)
        got = packed.linear(many, bias)
        assert ((got.double() - want).abs() <= allowed * (want.abs() + 0.05 * size)).all()
        for num_rows in (1, 3, 7, 17):
            assert torch.equal(packed.linear(many[:num_rows], bias), got[:num_rows])


def test_every_number_of_mxfp4_is_multiplied_exactly(isa):
    blocks = torch.arange(16, dtype=torch.uint8).repeat(64, 1, 1) * 17
    scales = torch.full((64, 1), 120, dtype=torch.uint8)
    weight = Mxfp4Weight(blocks=blocks, scales=scales)
    assert torch.equal(pack_stored(weight).linear(127 * torch.eye(32)).T, 127 * weight.dequantize())


def test_sums_of_the_largest_numbers_do_not_overflow(isa):
    """All inputs are 127 steps, and all weights the largest value of their format."""
    ones, num_in = torch.ones(1, 256), 256
    whole_numbers = nibbles(64, num_in, 128)
    whole_numbers.words.fill_(-1), whole_numbers.scales.fill_(1), whole_numbers.zeros.fill_(1)
    packed = {"4 bits": (pack_stored(whole_numbers), 14.0)}
    for bits in (4, 5):
        weight = minimums(64, num_in, bits, 32, 256)
        weight.codes.fill_((1 << bits) - 1)
        for scales, multiplier in ((weight.scales, 1), (weight.minimums, 0)):
            scales.factors.fill_(1), scales.multipliers.fill_(multiplier)
        packed[f"{bits} bits with minimums"] = pack_stored(weight), (1 << bits) - 1
    weight = mxfp4(64, num_in)
    weight.blocks.fill_(0x77), weight.scales.fill_(127)
    packed["mxfp4"] = pack_stored(weight), 6.0
    numbers = torch.full((64, num_in), -127, dtype=torch.int8)
    packed["int8"] = pack_stored(Int8Weight(numbers=numbers, scales=torch.ones(64))), -127.0
    for name, (weight, number) in packed.items():
        for sign in (1, -1):
            got = weight.linear(sign * ones.expand(7, -1).contiguous())
            torch.testing.assert_close(got, torch.full_like(got, sign * number * num_in), msg=name)


def test_exponents_of_mxfp4_that_are_far_apart_are_left_to_torch():
    weight = mxfp4(64, 64)
    weight.scales[5] = torch.tensor([100, 150])
    assert pack_stored(weight) is None


def test_parts_of_different_formats_are_one_weight(isa):
    torch.manual_seed(0)
    parts = (minimums(72, 256, 4, 32, 256), whole(100, 256, 64), fp8(64, 256, 256))
    stacked, alone = StackedWeight(parts=parts), [pack_stored(part) for part in parts]
    dense, packed = stacked.dequantize(), pack_stored(stacked)
    assert packed.num_bytes == sum(part.num_bytes for part in alone)
    assert torch.equal(packed.rows(torch.arange(236), torch.float32), dense)
    with pytest.raises(IndexError, match=r"ids\[1\] must be at least 0 and below 236, got 236"):
        packed.rows(torch.tensor([235, 236]), torch.float32)
    for num_rows in (1, 5, 20):
        x, bias = torch.randn(num_rows, 256), torch.randn(236)
        want = torch.cat([part.linear(x) for part in alone], dim=1) + bias
        assert torch.equal(packed.linear(x, bias), want)
    part = StackedWeight(parts=(parts[0], whole(64, 96, 48)))
    assert pack_stored(part) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_number_of_rows(isa, dtype):
    torch.manual_seed(0)
    for weight in (
        *(fp8(72, 384, 128), fp8(64, 300, 300), whole(72, 256, 64), mxfp4(72, 544)),
        in_table(72, 384, 64),
        *(minimums(72, 768, 4, 32, 256), minimums(72, 512, 5, 32, 256)),
    ):
        packed, x = pack_stored(weight), torch.randn(512, weight.shape[1]).to(dtype)
        all_rows = packed.linear(x)
        for num_rows in range(1, 512):
            assert torch.equal(packed.linear(x[:num_rows]), all_rows[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_fp8_is_multiplied_exactly(isa, dtype):
    """This includes subnormal values. The inputs are rows of the identity matrix."""
    magnitudes = torch.arange(127, dtype=torch.uint8)
    numbers = torch.cat((magnitudes, magnitudes + 128, magnitudes[:2])).view(64, 4)
    numbers = torch.stack([numbers.roll(shift, 1) for shift in range(4)], 1).view(64, 16)
    weight = Fp8Weight(
        numbers=numbers.view(torch.float8_e4m3fn), scales=torch.ones(64, 1), block_inputs=16
    )
    got = pack_stored(weight).linear(torch.eye(16, dtype=dtype))
    assert torch.equal(got.T.float(), weight.dequantize())


def test_int8_numbers_are_taken_over(isa):
    torch.manual_seed(0)
    numbers = torch.randint(-128, 128, (72, 256), dtype=torch.int8)
    weight = Int8Weight(numbers=numbers, scales=torch.rand(72) + 0.1)
    dense, packed = weight.dequantize(), pack_stored(weight)
    assert packed.weight_format is WeightFormat.INT8
    assert torch.equal(packed.rows(torch.arange(72), torch.float32), dense)
    x = torch.randn(17, 256)
    error = packed.linear(x) - x @ dense.T
    assert (error.abs() <= 0.05 * dense.norm(dim=1)).all()  # inputs are rounded


def test_rounding_to_fp8_keeps_the_largest_and_lets_what_is_not_finite_through():
    weight = torch.randn(4, 64)
    weight[1] = 0
    weight[2, 3], weight[3, 5] = float("nan"), float("inf")
    rounded = round_to_fp8(weight).dequantize()
    assert rounded[0].abs().max() == pytest.approx(float(weight[0].abs().max()), rel=1e-6)
    assert (rounded[:2] - weight[:2]).abs().max() <= weight[0].abs().max() / 28
    assert rounded[2:].isnan().all()


@pytest.mark.parametrize(("num_in", "size"), [(128, 64), (80, 16)])
def test_rounding_to_nf4_takes_the_nearest_element(num_in, size):
    weight = torch.randn(3, num_in)
    weight[1] = 0
    groups, rounded = weight.unflatten(1, (-1, size)), round_to_nf4(weight)
    scales = groups.abs().amax(-1)
    distances = groups[..., None] / scales[..., None, None].clamp(min=1e-9) - torch.tensor(NF4)
    assert torch.equal(rounded.codes, distances.abs().argmin(-1).flatten(1).to(torch.uint8))
    assert torch.equal(rounded.scales, scales.where(scales > 0, 1.0))
    weight[2, 3], weight[0, 5] = float("nan"), float("inf")
    assert round_to_nf4(weight).dequantize().isnan().sum() == 2 * size
    assert isinstance(round_to_nf4(torch.ones(2, 40)), Int8Weight)


@pytest.mark.parametrize(
    "weight",
    [
        *(fp8(64, 6, 6), fp8(64, 96, 96 // 2), whole(64, 96, 48)),
        *(minimums(64, 96, 5, 16, 32), minimums(64, 96, 4, 32, 96)),
    ],
    ids=["6 inputs", "blocks of 48", "groups of 48", "5 bits in groups of 16", "factors of 96"],
)
def test_what_no_kernel_takes_is_left_to_torch(weight):
    assert pack_stored(weight) is None
