"""Test a KV cache in FP8: the stored values, and that prefills and decodes of every implementation
read them alike.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.attention.options import operator_options
from tests.loops import loop_over
from vllm.ops.attention_options import FP8_DTYPES
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps

NATIVE = NativeOps()
DTYPES = [torch.float32, torch.bfloat16]
# Weights are rounded to bf16 (2^-9 relative), and so is the result. Values are up to 4 * 1.7.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-6},
}
SCALES = (0.5, 1.7)  # scales of keys and of values


def scales_of(num_kv_heads: int) -> dict[str, Tensor]:
    """Return scales of keys and of values, different for each head."""
    by_head = 1 + torch.arange(num_kv_heads) / 4
    return {f"{of}_scales": s * by_head for of, s in zip(("key", "value"), SCALES, strict=True)}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops(isa: str) -> NativeOps:
    """Use the C++ kernels, with each instruction set of this machine, one after another."""
    return CPUOps()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def store(ops: NativeOps, numbers: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return the values [T, D] as they are stored in a cache."""
    new = numbers[:, None]  # one KV head
    cache = torch.zeros(len(numbers), 1, 1, numbers.shape[1], dtype=torch.uint8).view(dtype)
    other = cache.clone()
    scales = torch.tensor([scale]), torch.tensor([2 * scale])
    ops.reshape_and_cache(new, new, cache, other, torch.arange(len(numbers)), *scales)
    assert torch.equal(bits(other), bits(store_once(numbers, dtype, 2 * scale)))
    return cache[:, 0, 0]


def store_once(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    largest = torch.finfo(dtype).max
    stored = (numbers.float() / scale).clamp(-largest, largest).to(dtype)
    return stored[:, None, None]


@pytest.mark.parametrize("fp8", FP8_DTYPES)
@loop_over("dtype", DTYPES)
def test_the_nearest_number_is_stored_and_no_finite_number_becomes_nan(ops, dtype, fp8):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()].to(dtype)
    numbers = torch.cat((every, torch.tensor([float("inf"), -float("inf")], dtype=dtype)))
    if dtype == torch.float32:  # halfway between two FP8 numbers, and next to the middle
        middle = torch.arange(1, 2**15, dtype=torch.int32).mul(2**16).view(torch.float32)
        numbers = torch.cat((numbers, middle[middle.isfinite()].nextafter(torch.tensor(9.0))))
    numbers = numbers[: len(numbers) // 37 * 37].view(-1, 37)
    for implementation in (NATIVE, ops):
        for scale in (1.0, 0.3):
            got = store(implementation, numbers, fp8, scale)
            assert torch.equal(bits(got), bits(store_once(numbers, fp8, scale)[:, 0, 0]))
            assert got.float().isfinite().all()
    nan = store(ops, torch.full((1, 40), float("nan"), dtype=dtype), fp8)
    assert nan.float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_become_the_nearest_numbers_within_a_limit(ops, dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    if dtype == torch.float32:  # halfway between two FP8 numbers, and next to the middle
        middle = torch.arange(1, 2**15, dtype=torch.int32).mul(2**16).view(torch.float32)
        every = torch.cat((every, middle.nextafter(torch.tensor(9.0))))
    x = every[: len(every) // 37 * 37].view(-1, 37)
    for factor, largest in ((1.0, 448), (1 / 0.3, 240), (2.0**8, 240)):
        scaled = (x.float() * factor).clamp(-largest, largest)
        want = scaled.to(torch.float8_e4m3fn).to(dtype)
        for implementation in (NATIVE, ops):
            got = implementation.round_to_fp8(x, factor, largest)
            assert got.dtype == dtype
            assert torch.equal(got.isnan(), x.isnan())
            assert torch.equal(got.nan_to_num(), want.nan_to_num())


class Launch:
    """Requests of random tokens in an FP8 cache; slots without a token contain NaN."""

    def __init__(self, seq_lens: list[int], num_heads: int, shape: tuple[int, int], fp8) -> None:
        self.seq_lens, block_size = seq_lens, 16
        max_blocks = -(-max(seq_lens) // block_size)
        num_blocks = len(seq_lens) * max_blocks
        self.tables = torch.randperm(num_blocks).view(len(seq_lens), max_blocks).int()
        caches = torch.full((2, num_blocks, block_size, *shape), float("nan"))
        for row, seq_len in zip(self.tables.long(), seq_lens, strict=True):
            slots = (row[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
            caches.flatten(1, 2)[:, slots] = torch.randn(2, seq_len, *shape)
        self.keys, self.values = caches.to(fp8)
        self.query = torch.randn(sum(seq_lens), num_heads, shape[1])

    def decode(self, ops: NativeOps, dtype: torch.dtype) -> Tensor:
        ends = torch.tensor(self.seq_lens).cumsum(0) - 1
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        return ops.paged_attention_decode(
            *(self.query[ends].to(dtype), self.keys, self.values, self.tables, lens),
            *operator_options(scale=0.2, **scales_of(self.keys.shape[2])),
        )

    def prefill(self, ops: NativeOps, dtype: torch.dtype) -> Tensor:
        starts = [0, *torch.tensor(self.seq_lens).cumsum(0).tolist()]
        return ops.paged_attention_prefill(
            *(self.query.to(dtype), self.keys, self.values, self.tables, starts, self.seq_lens),
            *operator_options(scale=0.2, **scales_of(self.keys.shape[2])),
        )


@pytest.mark.parametrize("fp8", FP8_DTYPES)
@loop_over("dtype", DTYPES)
@loop_over(
    "num_heads, shape",
    [(1, (1, 33)), (4, (4, 20)), (7, (1, 128)), (12, (4, 64)), (8, (4, 32)), (6, (2, 100))],
)
def test_both_phases_read_what_the_reference_reads(isas, num_heads, shape, dtype, fp8):
    launch = Launch([1, 300, 64, 129], num_heads, shape, fp8)
    for phase in (Launch.decode, Launch.prefill):
        want = phase(launch, NATIVE, dtype)
        for _ in isas:
            torch.testing.assert_close(phase(launch, CPUOps(), dtype), want, **TOLERANCES[dtype])


@pytest.mark.parametrize("fp8", FP8_DTYPES)
def test_the_reference_reads_numbers_times_their_scales(fp8):
    launch = Launch([1, 70, 33], 4, (2, 64), fp8)
    wide = Launch([1, 70, 33], 4, (2, 64), fp8)
    wide.tables, wide.query = launch.tables, launch.query
    keys, values = (scales[:, None] for scales in scales_of(2).values())
    wide.keys, wide.values = launch.keys.float() * keys, launch.values.float() * values
    for phase in (Launch.decode, Launch.prefill):
        torch.testing.assert_close(
            phase(launch, NATIVE, torch.float32), phase(wide, NATIVE, torch.float32)
        )


@pytest.mark.parametrize("fp8", FP8_DTYPES)
def test_each_head_is_stored_with_its_scale(ops, fp8):
    new = torch.randn(5, 3, 20)
    scales = torch.tensor([0.1, 1.0, 3.0])
    for implementation in (NATIVE, ops):
        caches = torch.zeros(2, 1, 8, 3, 20, dtype=torch.uint8).view(fp8)
        slots = torch.arange(5)
        implementation.reshape_and_cache(new, new, *caches, slots, scales, scales.flip(0))
        for cache, by_head in zip(caches, (scales, scales.flip(0)), strict=True):
            largest = torch.finfo(fp8).max
            want = (new / by_head[:, None]).clamp(-largest, largest).to(fp8)
            assert torch.equal(bits(cache[0, :5]), bits(want))


def test_scales_of_other_heads_are_refused(ops):
    launch = Launch([40], 4, (2, 32), torch.float8_e4m3fn)
    lens = torch.tensor([40], dtype=torch.int32)
    query = launch.query[:1].bfloat16()
    with pytest.raises(ValueError, match=r"scales of a cache are torch.float32 \[3\] on cpu"):
        ops.paged_attention_decode(
            query,
            launch.keys,
            launch.values,
            launch.tables,
            lens,
            *operator_options(scale=1.0, key_scales=torch.ones(3)),
        )


@pytest.mark.parametrize("fp8", FP8_DTYPES)
@loop_over("dtype", DTYPES)
@loop_over("head_size", [None, 64, 192])  # None: all numbers at once
def test_all_numbers_are_read_as_torch_reads_them(ops, head_size, dtype, fp8):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(fp8).float().isfinite()]
    if head_size:
        for first in range(0, len(codes), head_size):
            check_numbers(ops, codes.roll(-first)[:head_size].view(fp8), dtype)
    else:
        check_numbers(ops, codes.view(fp8), dtype)


def check_numbers(ops, numbers, dtype):
    fp8 = numbers.dtype
    values = numbers[None, None, None]  # there is only one key, so its value is the result
    keys = torch.zeros_like(values, dtype=torch.uint8).view(fp8)
    query, tables = torch.ones(1, 1, len(numbers), dtype=dtype), torch.zeros(1, 1).int()
    options = operator_options(scale=1.0)
    got = ops.paged_attention_decode(query, keys, values, tables, torch.ones(1).int(), *options)
    assert torch.equal(got[0, 0], numbers.to(dtype))
    got = ops.paged_attention_prefill(query, keys, values, tables, [0, 1], [1], *options)
    assert torch.equal(got[0, 0], numbers.to(dtype))


def test_not_a_number_is_not_hidden(ops):
    for fp8, head_size in product(FP8_DTYPES, (32, 64)):
        launch = Launch([40], 2, (1, head_size), fp8)
        bits(launch.keys)[launch.tables[0, 0], 3] = 0x7F
        for dtype in DTYPES:
            assert launch.decode(ops, dtype).isnan().all()
            assert launch.prefill(ops, dtype)[3:].isnan().all()


def test_a_query_has_the_same_bits_in_any_batch(ops):
    launch = Launch([5, 1000, 300], 8, (2, 64), torch.float8_e4m3fn)
    together = launch.decode(ops, torch.bfloat16)
    for row, seq_len in enumerate(launch.seq_lens):
        alone = Launch([seq_len], 8, (2, 64), torch.float8_e4m3fn)
        end = sum(launch.seq_lens[: row + 1])
        alone.keys, alone.values = launch.keys, launch.values
        alone.tables, alone.query = launch.tables[row : row + 1], launch.query[end - seq_len : end]
        assert torch.equal(alone.decode(ops, torch.bfloat16)[0], together[row])
