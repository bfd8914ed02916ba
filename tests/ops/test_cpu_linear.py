"""Test packed weights against matmuls in float64, for each instruction set of this machine."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.loops import loop_over
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import WeightFormat, can_pack

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
INT8, INT4 = WeightFormat.INT8, WeightFormat.INT4
# (weight dtype, storage format or None for the weight dtype itself, dtype of x)
COMBINATIONS = [
    (FLOAT32, None, FLOAT32),
    (BFLOAT16, None, BFLOAT16),
    (BFLOAT16, None, FLOAT32),
    *product((FLOAT32, BFLOAT16), (INT8, INT4), (FLOAT32, BFLOAT16)),
]
# Tolerance for sums of up to 2,056 products of normally distributed numbers. For bfloat16 it is one
# unit in the last place.
TOLERANCES = {FLOAT32: {"rtol": 1e-5, "atol": 3e-4}, BFLOAT16: {"rtol": 2**-7, "atol": 3e-4}}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def packed_of(weight: Tensor, weight_format: WeightFormat | None) -> PackedWeight:
    if weight_format is None:
        return PackedWeight.pack(weight.clone())
    return PackedWeight.quantize(weight, weight_format)


def to_int8(x: Tensor) -> Tensor:
    """Round rows to 127 steps on each side, in float64."""
    largest = x.float().abs().amax(-1, keepdim=True)
    steps = (x.float() * torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)).round()
    return steps.double() * (largest / 127).double()


def to_int4(weight: Tensor) -> Tensor:
    """Round groups of 32, scaled so that the element of largest magnitude is -8, in float64. The
    scales are float16 times a power of two of the row.
    """
    unit = torch.exp2((weight.float().abs().amax(1, keepdim=True) / 8).log2().floor())
    groups = []
    for group in weight.float().split(32, dim=1):
        largest = group.gather(1, group.abs().argmax(1, keepdim=True))
        scale = (largest / -8 / unit).half().float() * unit
        steps = (group * torch.where(scale != 0, 1 / scale, 0.0)).round().clamp(-8, 7)
        groups.append(steps.double() * scale.double())
    return torch.cat(groups, dim=1)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Return inputs as int4 kernels round them: int8 with a scale per block, in float64."""
    return torch.cat([to_int8(block) for block in x.split(size, dim=-1)], dim=-1)


def expected(x: Tensor, weight: Tensor, weight_format: WeightFormat | None, bias: Tensor) -> Tensor:
    if weight_format is INT8:
        return F.linear(to_int8(x), to_int8(weight), bias.double())
    if weight_format is INT4:
        return F.linear(in_blocks(x, 32), to_int4(weight), bias.double())
    return F.linear(x.double(), weight.double(), bias.double())


@loop_over("weight_dtype, weight_format, dtype", COMBINATIONS)
@loop_over("num_out, num_in", [(1, 8), (64, 32), (200, 688), (130, 2056)])
def test_products_agree_with_float64(isas, num_out, num_in, weight_dtype, weight_format, dtype):
    weight, bias = torch.randn(num_out, num_in, dtype=weight_dtype), torch.randn(num_out).to(dtype)
    inputs = [torch.randn(num_rows, num_in).to(dtype) for num_rows in (1, 2, 3, 4, 5, 6, 7, 64)]
    outputs = [expected(x, weight, weight_format, bias).to(dtype) for x in inputs]
    for _ in isas:
        packed = packed_of(weight, weight_format)
        for x, want in zip(inputs, outputs, strict=True):
            got = packed.linear(x, bias)
            assert got.dtype is dtype
            torch.testing.assert_close(got, want, **TOLERANCES[dtype])


@loop_over("weight_dtype, weight_format, dtype", COMBINATIONS)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(
    isa, weight_dtype, weight_format, dtype, restore_threads
):
    packed = packed_of(torch.randn(128, 2080, dtype=weight_dtype), weight_format)
    # More than one of each unit into which the kernel divides a matrix.
    x = torch.randn(1040, 2080).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([packed.linear(row) for row in x[:20, None]])
    for num_rows, num_threads in ((2, 1), (7, 1), (20, 2), (1040, 2)):
        torch.set_num_threads(num_threads)
        together = packed.linear(x[:num_rows])[:20]
        assert torch.equal(together, alone[:num_rows])


@pytest.mark.parametrize("weight_format", [None, INT8, INT4])
def test_a_row_of_a_long_prompt_has_the_bits_that_it_has_alone(isa, weight_format, restore_threads):
    """Matrix tiles multiply many tokens with several panels at a time; here 21 panels in groups of
    four.
    """
    torch.set_num_threads(1)
    packed = packed_of(torch.randn(1300, 1640, dtype=BFLOAT16), weight_format)
    x = torch.randn(500, 1640).to(BFLOAT16)
    together = packed.linear(x)
    for row in (0, 31, 32, 249, 256, 499):
        assert torch.equal(together[row], packed.linear(x[row]))


def test_int8_is_the_same_on_every_processor(isa):
    x, weight = torch.randn(9, 688), torch.randn(100, 688)
    got = packed_of(weight, INT8).linear(x)
    assert load_cpu_kernels().set_isa("base")
    assert torch.equal(got, packed_of(weight, INT8).linear(x))


@pytest.mark.parametrize("weight_format", [None, INT8, INT4])
def test_what_is_not_a_number_reaches_the_result(isa, weight_format):
    x = torch.zeros(4, 64)
    x[1, 5], x[2, 63], x[3, 0] = float("nan"), float("inf"), 1.0
    got = packed_of(torch.rand(10, 64) + 0.1, weight_format).linear(x)
    assert (got[0] == 0).all()
    assert not got[1:3].isfinite().any()
    assert (got[3] != 0).all()


@loop_over("weight_format", [None, INT8, INT4])
@loop_over("dtype", [FLOAT32, BFLOAT16])
def test_a_weight_that_is_not_a_number_reaches_the_result(isa, dtype, weight_format):
    weight = torch.rand(70, 64, dtype=dtype) + 0.1
    weight[2, 5], weight[66, 63] = float("nan"), float("inf")
    got = packed_of(weight, weight_format).linear(torch.ones(3, 64, dtype=dtype))
    assert got.isfinite().all(0).tolist() == [output not in (2, 66) for output in range(70)]


@pytest.mark.parametrize("weight_format", [INT8, INT4])
def test_numbers_too_small_for_a_step_are_zero(isa, weight_format):
    """The inverse of a step of 1e-37 / 127 does not exist in float32."""
    small, large = torch.full((64, 64), 1e-37), torch.full((64, 64), 1e30)
    assert not packed_of(large, weight_format).linear(small).any()
    # int4 also has powers of two besides its scales, so its results may differ from zero.
    if weight_format is INT8:
        assert not packed_of(small, weight_format).linear(large).any()


@pytest.mark.parametrize("weight_format", [None, INT8, INT4])
def test_x_may_be_of_any_rank_and_have_strided_rows(weight_format):
    if load_cpu_kernels() is None:
        pytest.skip("the C++ kernels are not built")
    packed = packed_of(torch.randn(70, 32), weight_format)
    x = torch.randn(6, 96)
    want = packed.linear(x[:, 32:64].contiguous())
    assert torch.equal(packed.linear(x[:, 32:64]), want)
    assert torch.equal(packed.linear(x[:, 32:64].contiguous().view(2, 3, 32)), want.view(2, 3, 70))
    assert torch.equal(packed.linear(x[0, 32:64]), want[0])
    assert packed.linear(x[:0, 32:64]).shape == (0, 70)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_rows_of_a_packed_weight_can_be_read(isa, dtype):
    weight, ids = torch.randn(100, 48, dtype=dtype), torch.tensor([99, 0, 64, 0])
    assert torch.equal(packed_of(weight, None).rows(ids, dtype), weight[ids])
    for weight_format, rounded in ((INT8, to_int8(weight)), (INT4, to_int4(weight))):
        got = packed_of(weight, weight_format).rows(ids, dtype)
        torch.testing.assert_close(got, rounded[ids].to(dtype))


@pytest.mark.parametrize(
    ("num_out", "is_in_place"), [(128, True), (64, True), (100, False), (1, False)]
)
def test_packing_uses_the_memory_of_the_weight_when_panels_are_full(num_out, is_in_place):
    if load_cpu_kernels() is None:
        pytest.skip("the C++ kernels are not built")
    weight = torch.randn(num_out, 40)
    before = weight.clone()
    packed = PackedWeight.pack(weight)
    assert torch.equal(weight, before) != is_in_place
    assert packed.num_bytes == -(-num_out // 64) * 64 * 40 * 4


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_format", "bits"),
    [
        ((64, 64), FLOAT32, None, 32),
        ((64, 64), BFLOAT16, None, 16),
        ((64, 64), BFLOAT16, INT8, 9),  # and a 32-bit scale and a 32-bit sum for each 64 values
        # And a 32-bit scale for each 64 values, and 16 bits for each 32.
        ((64, 64), BFLOAT16, INT4, 5),
    ],
)
def test_a_weight_has_so_many_bits(shape, dtype, weight_format, bits):
    if load_cpu_kernels() is None:
        pytest.skip("the C++ kernels are not built")
    packed = packed_of(torch.randn(shape, dtype=dtype), weight_format)
    assert packed.num_bytes * 8 == bits * shape[0] * shape[1]


def test_only_what_the_kernels_take_can_be_packed():
    if load_cpu_kernels() is None:
        pytest.skip("the C++ kernels are not built")
    for num_in, dtype, weight_format, fits in [
        (7, FLOAT32, None, True),
        (7, BFLOAT16, None, False),
        (6, BFLOAT16, None, True),
        (6, BFLOAT16, INT8, False),
        (12, BFLOAT16, INT8, True),
        (12, FLOAT32, INT4, False),
        (40, FLOAT32, INT4, True),
        (80_000, BFLOAT16, INT8, False),
        (8, torch.float16, None, False),
        (0, FLOAT32, None, False),
    ]:
        assert can_pack(torch.empty(3, num_in, dtype=dtype), weight_format) is fits
    assert not can_pack(torch.empty(3, 8, device="meta"))


def test_what_does_not_fit_is_refused_with_both_shapes():
    if load_cpu_kernels() is None:
        pytest.skip("the C++ kernels are not built")
    packed = PackedWeight.pack(torch.randn(10, 8))
    both = r"\[4, 6\] on cpu, the weight is FLOAT32 \[10, 8\]"
    with pytest.raises(ValueError, match=both):
        packed.linear(torch.randn(4, 6))
    with pytest.raises(
        ValueError, match=r"x is torch.bfloat16 \[4, 8\] on cpu, the weight is FLOAT32"
    ):
        packed.linear(torch.randn(4, 8).bfloat16())
    with pytest.raises(
        ValueError, match=r"bias is torch.float32 \[9\] on cpu, the weight is FLOAT32"
    ):
        packed.linear(torch.randn(4, 8), torch.randn(9))
    with pytest.raises(ValueError, match=r"x is torch.float32 \[4, 8\] on meta"):
        packed.linear(torch.randn(4, 8, device="meta"))
    with pytest.raises(ValueError, match=r"not dense: shape \[8, 8\], strides \[1, 8\]"):
        packed.linear(torch.randn(8, 8).T)
    with pytest.raises(ValueError, match=r"must be dense, got strides \[1, 8\]"):
        PackedWeight.pack(torch.randn(8, 8).T)
    with pytest.raises(ValueError, match="must be aligned to 64 bytes"):
        PackedWeight.pack(torch.randn(9, 8)[1:])
    with pytest.raises(ValueError, match=r"bfloat16 \[4, 7\] on cpu cannot be packed as its own"):
        PackedWeight.pack(torch.randn(4, 7).bfloat16())
    with pytest.raises(ValueError, match="cannot be packed as INT4"):
        PackedWeight.quantize(torch.randn(4, 12), INT4)
    with pytest.raises(ValueError, match="FLOAT32 is not a quantized format"):
        PackedWeight.quantize(torch.randn(4, 8), WeightFormat.FLOAT32)
    with pytest.raises(IndexError, match=r"ids\[1\] must be at least 0 and below 10, got 10"):
        packed.rows(torch.tensor([3, 10]), FLOAT32)
    with pytest.raises(ValueError, match=r"got torch.float16"):
        packed.rows(torch.tensor([3]), torch.float16)


def test_without_memory_a_call_is_refused_and_the_next_one_works():
    if load_cpu_kernels() is None:
        pytest.skip("the C++ kernels are not built")
    code = """
import resource, torch
from pathlib import Path
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.cpu.weights.moe import PackedExperts
INT8 = WeightFormat.INT8
packed, x = PackedWeight.quantize(torch.ones(8, 40000), INT8), torch.ones(1024, 40000)
experts = PackedExperts.pack(torch.ones(2, 80000, 8), torch.ones(2, 8, 40000), INT8)
choices = torch.ones(1024, 8), torch.zeros(1024, 1, dtype=torch.int64), torch.ones(1024, 1)
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for call in (lambda: packed.linear(x), lambda: experts.forward(*choices)):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, hard))
    try:
        call()
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(call().isfinite().all().item())
"""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [
        "not enough memory for 1024 rows of a linear layer",
        "True",
        "not enough memory to run 2 experts for 1024 tokens",
        "True",
    ]
