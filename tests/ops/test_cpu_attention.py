"""Test attention of the C++ kernels against the formula in float64, with soft cap and ALiBi, and
that chunks and batches do not change a bit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.options import operator_options
from tests.exhaustive import exhaustive
from tests.isas import InstructionSets
from tests.loops import loop_over
from vllm.ops.attention_options import FP8_DTYPES
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps

DTYPES = [torch.float32, torch.bfloat16]
# Weights are rounded to bf16 (2^-9 relative). The result is rounded too, and is as large as a
# value.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-6},
}
NO_OPTIONS: dict[str, Any] = {"sliding_window": None}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops(isa: str) -> NativeOps:
    """Use the C++ kernels, with each instruction set of this machine, one after another."""
    return CPUOps()


class OpsOfISAs:
    """Can be iterated over again and again, as random examples of a test do."""

    def __init__(self, isas: InstructionSets) -> None:
        self._isas = isas

    def __iter__(self) -> Iterator[NativeOps]:
        return (CPUOps() for _ in self._isas)


@pytest.fixture
def all_ops(isas: InstructionSets) -> OpsOfISAs:
    """Run the C++ kernels on one instruction set after the other."""
    return OpsOfISAs(isas)


@dataclass
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


class Prompts:
    """Requests of `seq_lens` random tokens in shuffled blocks; slots without a token contain
    NaN.
    """

    def __init__(self, seq_lens: list[int], heads: Heads) -> None:
        self.seq_lens, self.heads = seq_lens, heads
        block_size = heads.block_size
        max_blocks = -(-max(seq_lens) // block_size)
        num_blocks = len(seq_lens) * max_blocks
        shape = (num_blocks, block_size, heads.num_kv_heads, heads.size)
        self.keys = torch.full(shape, float("nan"), dtype=heads.dtype)
        self.values = self.keys.clone()
        self.tables = torch.randperm(num_blocks).view(len(seq_lens), max_blocks).int()
        for b, seq_len in enumerate(seq_lens):
            for cache in (self.keys, self.values):
                row_shape = (seq_len, heads.num_kv_heads, heads.size)
                cache.flatten(0, 1)[self.slots(b)] = torch.randn(row_shape).to(heads.dtype)
        # The queries are a slice of the tensor with q, k and v.
        packed = heads.num_heads + 2 * heads.num_kv_heads
        self.queries = [
            torch.randn(seq_len, packed, heads.size).to(heads.dtype)[:, : heads.num_heads]
            for seq_len in seq_lens
        ]

    def slots(self, b: int) -> Tensor:
        block_size = self.heads.block_size
        slots = self.tables[b].long()[:, None] * block_size + torch.arange(block_size)
        return slots.flatten()[: self.seq_lens[b]]

    def prefill(
        self,
        ops: NativeOps,
        chunks: list[tuple[int, int, int]],
        options: dict[str, Any] = NO_OPTIONS,
        last_keys: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Run one forward pass; return [tokens, H, D] for each chunk.

        chunks: (request, first token, end). last_keys: for each request, the last key that each of
        its tokens sees.
        """
        lens = [end - begin for _, begin, end in chunks]
        starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
        padding = torch.full_like(self.queries[0][:1], float("nan"))
        query = torch.cat([*(self.queries[b][begin:end] for b, begin, end in chunks), padding])
        out = ops.paged_attention_prefill(
            query,
            self.keys,
            self.values,
            self.tables[[b for b, _, _ in chunks]],
            starts,
            [end for _, _, end in chunks],
            *operator_options(**options),
            None if last_keys is None else last_keys_of(chunks, last_keys),
        )
        assert not out[starts[-1] :].any(), "padding rows are zero"
        return list(out[: starts[-1]].split(lens))

    def decode(self, ops: NativeOps, options: dict[str, Any]) -> Tensor:
        """Return the result [requests, H, D] of the last token of each request."""
        return ops.paged_attention_decode(
            torch.stack([query[-1] for query in self.queries]),
            self.keys,
            self.values,
            self.tables,
            torch.tensor(self.seq_lens, dtype=torch.int32),
            *operator_options(**options),
        )

    def last_of_formula(self, options: dict[str, Any]) -> Tensor:
        """Return the result that `decode` must return."""
        rows = [self.formula(b, n - 1, n, **options) for b, n in enumerate(self.seq_lens)]
        return torch.cat(rows)

    def formula(
        self,
        b: int,
        begin: int,
        end: int,
        sliding_window: int | None = None,
        alibi_slopes: Tensor | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        chunk_size: int | None = None,
        last_keys: Tensor | None = None,
    ) -> Tensor:
        """Return the formula for these tokens of request b, [end - begin, H, D]."""
        heads = self.heads
        keys, values = (
            cache.flatten(0, 1)[self.slots(b)[:end]]
            .double()
            .repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1)
            for cache in (self.keys, self.values)
        )
        scores = (
            torch.einsum("qhd,khd->hqk", self.queries[b][begin:end].double(), keys)
            / heads.size**0.5
        )
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        position = torch.arange(end)
        distance = position[begin:, None] - position
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * distance
        last_keys = position if last_keys is None else last_keys[:end]
        is_seen = position <= last_keys[begin:, None]
        is_seen &= distance < (sliding_window or 10**9)
        if chunk_size is not None:
            is_seen &= position // chunk_size == (position[begin:] // chunk_size)[:, None]
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if sinks is not None:
            sinks = sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., :end]
        return torch.einsum("hqk,khd->qhd", weights, values).to(heads.dtype)


def assert_is_formula(
    prompts: Prompts,
    implementations: Iterable[NativeOps],
    chunks: list[tuple[int, int, int]],
    options: dict[str, Any],
    last_keys: list[Tensor] | None = None,
) -> None:
    expected = [
        prompts.formula(
            *chunk, **options, last_keys=None if last_keys is None else last_keys[chunk[0]]
        )
        for chunk in chunks
    ]
    for ops in implementations:
        parts = prompts.prefill(ops, chunks, options, last_keys)
        for got, want in zip(parts, expected, strict=True):
            torch.testing.assert_close(got, want, **TOLERANCES[got.dtype])


def options_of(name: str, num_heads: int) -> dict[str, Any]:
    slopes = 2.0 ** -torch.arange(1, num_heads + 1)
    sinks = torch.linspace(-8, 8, num_heads)
    sinks[-1] = 300.0  # this sink takes all of the weight
    return {
        "plain": {"sliding_window": None},
        "window of 1": {"sliding_window": 1},
        "window of 70": {"sliding_window": 70},
        "endless window": {"sliding_window": 2**40},
        "soft cap": {"sliding_window": None, "logits_soft_cap": 0.7},
        "wide soft cap": {"sliding_window": None, "logits_soft_cap": 50.0},
        "alibi": {"sliding_window": None, "alibi_slopes": slopes},
        "all": {"sliding_window": 50, "logits_soft_cap": 2.0, "alibi_slopes": slopes},
        "sinks": {"sliding_window": None, "sinks": sinks},
        "sinks and a window": {"sliding_window": 50, "sinks": sinks},
        "chunks of 48": {"sliding_window": None, "chunk_size": 48},
        "chunks of 128, a window": {"sliding_window": 100, "chunk_size": 128},
    }[name]


OPTIONS = [
    *("plain", "window of 1", "window of 70", "endless window"),
    *("soft cap", "wide soft cap", "alibi", "all"),
    *("sinks", "sinks and a window", "chunks of 48", "chunks of 128, a window"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("option", "block_size"), [("plain", 16), ("window of 70", 32), ("plain", 128)]
)
def test_prefill_is_the_formula_for_all_head_sizes_and_groups(all_ops, option, block_size, dtype):
    sizes = [20, 32, 33, 64, 80, 96, 112, 127, 128, 256]
    groups = [(1, 1), (4, 4), (6, 2), (7, 1), (12, 4)]
    for i, size in enumerate(sizes):
        num_heads, num_kv_heads = groups[i % len(groups)]
        heads = Heads(num_heads, num_kv_heads, size, block_size, dtype)
        prompts = Prompts([1, 150, 64], heads)
        chunks = [(0, 0, 1), (1, 90, 150), (2, 0, 64)]
        assert_is_formula(prompts, all_ops, chunks, options_of(option, num_heads))


@loop_over("dtype", DTYPES)
@loop_over("option", OPTIONS)
def test_prefill_is_the_formula_for_all_options(all_ops, option, dtype):
    prompts = Prompts([300, 65, 7, 129], Heads(6, 2, 40, 16, dtype))
    chunks = [(0, 0, 300), (1, 64, 65), (2, 3, 3), (3, 1, 129)]
    assert_is_formula(prompts, all_ops, chunks, options_of(option, 6))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_prefill_is_the_formula_for_any_batch(all_ops, data):
    group, num_kv_heads = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    heads = Heads(
        group * num_kv_heads,
        num_kv_heads,
        data.draw(st.integers(1, 140)),
        data.draw(st.sampled_from([1, 5, 16, 128])),
        data.draw(st.sampled_from(DTYPES)),
    )
    seq_lens = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    ends = [data.draw(st.integers(1, n)) for n in seq_lens]
    chunks = [(b, data.draw(st.integers(0, end)), end) for b, end in enumerate(ends)]
    options = options_of(data.draw(st.sampled_from(OPTIONS)), heads.num_heads)
    assert_is_formula(Prompts(seq_lens, heads), all_ops, chunks, options)


@loop_over("dtype", DTYPES)
@loop_over("group, option", [(1, "plain"), (3, "window of 70"), (3, "all")])
def test_prefill_has_the_same_bits_in_any_chunks_in_any_batch_on_any_threads(
    ops, group, option, dtype, restore_threads
):
    prompts = Prompts([300, 40], Heads(2 * group, 2, 64, 16, dtype))
    options = options_of(option, 2 * group)
    (whole,) = prompts.prefill(ops, [(0, 0, 300)], options)
    uneven, long, short = [1, 64, 65, 129, 200], [37, 100, 299], list(range(10, 90, 10))
    for num_threads, cuts in [(1, uneven), (2, uneven), (2, long), (3, short)]:
        torch.set_num_threads(num_threads)
        edges = [0, *cuts, 300]
        chunks = [(0, *edge) for edge in pairwise(edges)]
        alone = [prompts.prefill(ops, [chunk], options)[0] for chunk in chunks]
        assert torch.equal(torch.cat(alone), whole)
        together = prompts.prefill(ops, [(1, 3, 40), *chunks, (1, 0, 3)], options)
        assert torch.equal(torch.cat(together[1:-1]), whole)


def last_keys_of(chunks: list[tuple[int, int, int]], last_keys: list[Tensor]) -> np.ndarray:
    parts = [last_keys[b][begin:end] for b, begin, end in chunks]
    return torch.cat([*parts, torch.zeros(1)]).int().numpy()  # and a zero for a row of padding


WITH_IMAGES = [
    option
    if option in ("plain", "window of 70", "all", "sinks and a window")
    else exhaustive(option)
    for option in OPTIONS[:-2]
]
"""One of each kind of option, and all together; the exhaustive run has the others."""


def with_images(num_tokens: int, *images: tuple[int, int]) -> Tensor:
    """Return the last key that each token sees, where the tokens of each image (first, end) see
    each other."""
    last_keys = torch.arange(num_tokens)
    for first, end in images:
        last_keys[first:end] = end - 1
    return last_keys


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", WITH_IMAGES)
def test_tokens_of_images_see_all_of_their_image_and_no_more(all_ops, option, dtype):
    assert_images_are_seen(all_ops, option, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", WITH_IMAGES)
def test_the_reference_lets_tokens_of_images_see_all_of_their_image(option, dtype):
    assert_images_are_seen([NativeOps()], option, dtype)


def assert_images_are_seen(all_ops: Iterable[NativeOps], option: str, dtype: torch.dtype) -> None:
    prompts = Prompts([300, 65, 7, 129], Heads(6, 2, 40, 16, dtype))
    images = [[(5, 70), (72, 90), (130, 299)], [(0, 65)], [], [(100, 101), (101, 129)]]
    last_keys = [with_images(n, *of) for n, of in zip(prompts.seq_lens, images, strict=True)]
    options = options_of(option, 6)
    for cuts in ([300], [72, 130, 299, 300]):
        chunks = [(0, begin, end) for begin, end in pairwise([0, *cuts])]
        chunks += [(1, 40, 65), (2, 0, 7), (3, 115, 129)]
        assert_is_formula(prompts, all_ops, chunks, options, last_keys)


@loop_over("dtype", DTYPES)
@loop_over("group", [1, 3])
def test_tokens_of_images_have_the_same_bits_in_any_chunks(ops, group, dtype, restore_threads):
    prompts = Prompts([300, 40], Heads(2 * group, 2, 64, 16, dtype))
    last_keys = [with_images(300, (60, 200)), torch.arange(40)]
    (whole,) = prompts.prefill(ops, [(0, 0, 300)], NO_OPTIONS, last_keys)
    for num_threads, begin in [(1, 0), (2, 61), (3, 130), (1, 199)]:
        torch.set_num_threads(num_threads)
        chunks = [(1, 3, 40), (0, begin, 210), (0, 210, 300)]
        got = prompts.prefill(ops, chunks, NO_OPTIONS, last_keys)
        assert torch.equal(torch.cat(got[1:]), whole[begin:])


def test_last_keys_that_do_not_fit_are_refused(ops):
    prompts = Prompts([20, 20], Heads())
    chunks = [(0, 0, 20), (1, 10, 20)]
    for implementation in (ops, NativeOps()):
        for token, last in [(0, -1), (3, 20), (5, 4)]:
            last_keys = [torch.arange(20), torch.arange(20)]
            last_keys[1][10 + token] = last
            with pytest.raises(ValueError, match="last keys of the tokens 10 to 19 of request 1"):
                prompts.prefill(implementation, chunks, NO_OPTIONS, last_keys)
    arguments = (torch.randn(20, 4, 64), prompts.keys, prompts.values, prompts.tables[:1], [0, 20])
    for last_keys, message in [
        (np.arange(20), r"last_keys is int64 \[20\]"),
        (np.arange(19, dtype=np.int32), r"last_keys is int32 \[19\]"),
        (np.arange(40, dtype=np.int32)[::2], "last_keys is not dense"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.paged_attention_prefill(*arguments, [20], *operator_options(), last_keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_tokens_that_see_a_bad_key_are_bad(ops, dtype):
    prompts = Prompts([100], Heads(2, 1, 16, 16, dtype))
    prompts.keys.flatten(0, 1)[prompts.slots(0)[70]] = float("nan")
    (got,) = prompts.prefill(ops, [(0, 0, 100)])
    assert got[70:].isnan().all()
    assert not got[:70].isnan().any()


def test_prefill_survives_large_scores(ops):
    prompts = Prompts([200], Heads())
    prompts.queries[0] *= 1e4
    (got,) = prompts.prefill(ops, [(0, 0, 200)])
    # Float32 scores of this size are rounded to multiples of 1/256: where two keys have nearly the
    # same score, the weights change.
    torch.testing.assert_close(got, prompts.formula(0, 0, 200), rtol=0, atol=0.03)


@loop_over("dtype", DTYPES)
@loop_over("group, size, block_size", [(7, 40, 16), (7, 64, 20), (3, 64, 20), (20, 64, 20)])
@loop_over("option", OPTIONS[4:])
def test_decode_is_the_formula_for_all_options(all_ops, option, group, size, block_size, dtype):
    prompts = Prompts([300, 1, 65, 256, 31], Heads(2 * group, 2, size, block_size, dtype))
    options = options_of(option, 2 * group)
    want = prompts.last_of_formula(options)
    for implementation in chain(all_ops, [NativeOps()]):
        got = prompts.decode(implementation, options)
        torch.testing.assert_close(got, want, **TOLERANCES[dtype])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_decode_is_the_formula_for_any_batch(all_ops, data):
    group, num_kv_heads = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 5))
    heads = Heads(
        group * num_kv_heads,
        num_kv_heads,
        data.draw(st.sampled_from([32, 64, 128]) | st.integers(1, 140)),
        data.draw(st.integers(1, 128)),
        data.draw(st.sampled_from(DTYPES)),
    )
    seq_lens = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=4))
    options = options_of(data.draw(st.sampled_from(OPTIONS)), heads.num_heads)
    prompts = Prompts(seq_lens, heads)
    want = prompts.last_of_formula(options)
    for ops in all_ops:
        torch.testing.assert_close(prompts.decode(ops, options), want, **TOLERANCES[heads.dtype])


def test_other_dtypes_run_on_the_reference(ops):
    prompts = Prompts([20], Heads(dtype=torch.float16))
    (got,) = prompts.prefill(ops, [(0, 3, 20)])
    assert torch.equal(got, prompts.prefill(NativeOps(), [(0, 3, 20)])[0])


def test_the_reference_is_the_formula_for_all_options():
    prompts = Prompts([90, 40], Heads(6, 2, 32))
    for option in OPTIONS:
        assert_is_formula(prompts, [NativeOps()], [(0, 0, 90), (1, 17, 40)], options_of(option, 6))


def test_what_does_not_fit_is_refused(ops):
    prompts = Prompts([20, 20], Heads())

    def prefill(**changes: Any) -> Tensor:
        arguments = {
            "query": torch.randn(30, 4, 64),
            "key_cache": prompts.keys,
            "value_cache": prompts.values,
            "block_tables": prompts.tables,
            "query_start_loc": [0, 10, 30],
            "seq_lens": [20, 20],
        }
        known = {name: changes.pop(name) for name in arguments.keys() & changes.keys()}
        options = operator_options(scale=1.0, **changes)
        return ops.paged_attention_prefill(*(arguments | known).values(), *options)

    assert not prefill().isnan().any()
    for changes, message in [
        (
            {"seq_lens": [20, 19]},
            r"request 1: its new tokens must not be more than its tokens \(19\)",
        ),
        ({"seq_lens": [33, 20]}, "request 0: .* 2 blocks of 16"),
        ({"query_start_loc": [0, 10, 31], "seq_lens": [20, 31]}, "tokens 10 to 31 of request 1"),
        ({"query_start_loc": [0, 10, 9]}, "tokens 10 to 9 of request 1 must be within the 30"),
        ({"query_start_loc": [2, 10, 30]}, "query_start_loc must begin with 0, got 2"),
        ({"query_start_loc": [0, 10]}, "query_start_loc must have one entry more than seq_lens"),
        ({"block_tables": prompts.tables.long()}, "block_tables is torch.int64"),
        ({"query": torch.randn(30, 64, 4).transpose(1, 2)}, "query is not dense"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0; it must be positive"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be .*, got torch.float32 \[3\]"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            prefill(**changes)
    for block_id in (-1, len(prompts.keys)):
        tables = prompts.tables.clone()
        tables[1, 1] = block_id
        with pytest.raises(IndexError, match=rf"request 1 .*{block_id}"):
            prefill(block_tables=tables)


@loop_over("dtype", DTYPES)
@loop_over("size, value_size, num_heads", [(576, 512, 5), (96, 32, 19), (23, 9, 16)])
def test_values_that_are_the_first_numbers_of_the_keys(ops, size, value_size, num_heads, dtype):
    """As in a latent cache, decodes have several partitions and prompts run in chunks."""
    prompts = Prompts([300, 1, 70], Heads(num_heads, 1, size, 16, dtype))
    prompts.values = prompts.keys
    options = {"sliding_window": None}
    want = prompts.last_of_formula(options)[..., :value_size]
    chunks = [(0, 200, 300), (2, 0, 70), (1, 0, 1)]
    whole = [prompts.formula(b, begin, end)[..., :value_size] for b, begin, end in chunks]
    prompts.values = prompts.keys[..., :value_size]
    for implementation in (ops, NativeOps()):
        got = prompts.decode(implementation, options)
        torch.testing.assert_close(got, want, **TOLERANCES[dtype])
        for part, expected in zip(prompts.prefill(implementation, chunks), whole, strict=True):
            torch.testing.assert_close(part, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES])
def test_keys_alone_are_stored(ops, cache_dtype):
    """Attention over such a cache in FP8 is the same as with a separate cache of the values."""
    heads = Heads(4, 1, 40, 16, torch.bfloat16)
    prompts = Prompts([100], heads)
    keys = prompts.keys.flatten(0, 1)[prompts.slots(0)]
    cache = torch.zeros(prompts.keys.shape, dtype=torch.bfloat16).to(cache_dtype)
    ops.reshape_and_cache(keys, None, cache, None, prompts.slots(0), torch.tensor([0.5]))
    both = []
    for values in (cache.clone(), cache[..., :24]):
        prompts.keys, prompts.values = cache, values
        scales = {"key_scales": torch.tensor([0.5]), "value_scales": torch.tensor([0.5])}
        out = prompts.decode(ops, NO_OPTIONS | scales)
        (chunk,) = prompts.prefill(ops, [(0, 40, 100)], NO_OPTIONS | scales)
        both.append((out[..., :24], chunk[..., :24]))
    assert both[0][0].abs().max() > 0.1
    for wide, narrow in zip(*both, strict=True):
        assert torch.equal(wide, narrow)


@loop_over("dtype", DTYPES)
@loop_over(
    "shape",
    [(1, 1, 1, 1, 16), (2, 3, 5, 7, 64), (1, 2, 577, 577, 64), (3, 2, 49, 49, 72), (1, 4, 9, 3, 8)],
)
def test_full_attention_sees_all_keys(
    shape: tuple[int, ...], dtype: torch.dtype, ops: NativeOps
) -> None:
    num_images, num_heads, num_queries, num_keys, size = shape
    query = torch.randn(num_images, num_queries, num_heads, size).to(dtype).transpose(1, 2)
    key, value = (
        torch.randn(num_images, num_keys, num_heads, size).to(dtype).transpose(1, 2)
        for _ in range(2)
    )
    if num_images == 1:  # the image is part of a larger tensor, so its stride must not be used
        value = value.as_strided(value.shape, (1, *value.stride()[1:]))
    mask = torch.arange(num_keys)[None] < max(1, num_keys - 2)
    for scale, some in ((None, None), (0.3, None), (0.3, mask)):
        out = ops.full_attention(query, key, value, some, scale)
        scores = query.double() @ key.double().mT * (scale or size**-0.5)
        if some is not None:
            scores = scores.masked_fill(~some, float("-inf"))
        expected = scores.softmax(-1) @ value.double()
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, **TOLERANCES[dtype])


def test_full_attention_of_one_head_reads_parts_of_a_tensor(ops: NativeOps) -> None:
    query, key, value = torch.randn(2, 9, 3, 1, 16).permute(2, 0, 3, 1, 4)
    out = ops.full_attention(query, key, value)
    expected = (query @ key.mT / 4).softmax(-1) @ value
    torch.testing.assert_close(out, expected)
