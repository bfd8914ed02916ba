"""Test flat paged attention against the torch reference of the operators."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gaudi_sim.bridge import SimulatedKernels
from tests.attention.cache_traffic import CacheTraffic
from tests.attention.launches import HUGE, NAN, Cache, StaticOnly, random_cache
from tests.loops import loop_over
from vllm.attention.backends.flat_pa import (
    FusedBlocks,
    derive_decode_blocks,
    flat_paged_attention,
)
from vllm.attention.backends.hpu_attn import decode_attention, write_kv_cache
from vllm.attention.backends.hpu_metadata import (
    HPUDecodeMetadata,
    build_decode_metadata,
    count_decode_blocks,
)
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.native.operators import NativeOps

HEAD_SIZE = 16
SCALE = HEAD_SIZE**-0.5
OPTIONS = AttentionOptions(SCALE)
# Scores, weights and partial results are rounded to bf16; the reference rounds only at the end.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}
LENGTHS = {
    "one": [1],
    "one long": [1000],
    "mixed": [5, 128, 129, 17, 300],
    "with padded rows": [33, 0, 16, 0, 0],
}
# Kinds of softmax: in torch, and with kernels of Gaudi 3.
KERNELS = SimulatedKernels(card="GAUDI3")
MODES = {
    "pipelined": {},
    "fused adjustment": {"normaliser": FusedBlocks(KERNELS, has_softmax=False)},
    "fused softmax": {"normaliser": FusedBlocks(KERNELS, has_softmax=True)},
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def decode_launch(cache: Cache, is_contiguous: bool, spare: int = 3) -> HPUDecodeMetadata:
    """Return the decode batch of all requests of a cache, with padded rows and padded blocks after
    them."""
    counts = count_decode_blocks(cache.tables, cache.seq_lens, cache.block_size)
    num_blocks = min(counts.span + spare, len(cache.keys)) if is_contiguous else None
    return build_decode_metadata(
        cache.tables,
        cache.seq_lens,
        len(cache.seq_lens) + spare,
        num_blocks or counts.references + spare,
        cache.block_size,
        padded_shared=counts.shared + spare if is_contiguous else None,
    ).to("cpu")


def flat(
    query: Tensor,
    cache: Cache,
    launch: HPUDecodeMetadata,
    window: int | None = None,
    slopes: Tensor | None = None,
    mode: str = "pipelined",
    scale: float = SCALE,
) -> Tensor:
    """Return the flat attention of the query, followed by random padded rows."""
    num_padded = launch.slot_mapping.shape[0] - len(query)
    padded = torch.cat((query, torch.randn(num_padded, *query.shape[1:]).to(query.dtype)))
    options = AttentionOptions(scale, window)
    blocks = derive_decode_blocks(launch, cache.block_size, query.dtype, options)
    out = flat_paged_attention(
        padded,
        *cache.flat,
        blocks,
        options,
        alibi_slopes=slopes,
        **MODES[mode],
    )
    assert out.dtype == query.dtype
    assert (out[len(query) :] == 0).all(), "padded rows are zero"
    return out[: len(query)]


def reference(
    query: Tensor, cache: Cache, window: int | None = None, scale: float = SCALE
) -> Tensor:
    return NativeOps().paged_attention_decode(
        query,
        cache.keys,
        cache.values,
        torch.from_numpy(cache.tables),
        torch.from_numpy(cache.seq_lens),
        AttentionOptions(scale, window),
    )


def random_query(cache: Cache, num_heads: int) -> Tensor:
    return torch.randn(len(cache.seq_lens), num_heads, HEAD_SIZE).to(cache.keys.dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_agrees_with_reference(lengths, block_size, dtype):
    for num_heads, num_kv_heads in ((2, 2), (4, 2), (8, 1)):
        cache = random_cache(LENGTHS[lengths], num_kv_heads, HEAD_SIZE, block_size, dtype)
        query = random_query(cache, num_heads)
        want = reference(query, cache)
        for is_contiguous, mode in product((True, False), MODES):
            got = flat(query, cache, decode_launch(cache, is_contiguous), mode=mode)
            what = f"{num_heads} heads, {num_kv_heads} of keys, {is_contiguous=}, {mode=}"
            torch.testing.assert_close(
                got, want, **TOLERANCES[dtype], msg=lambda m, w=what: f"{w}: {m}"
            )


@pytest.mark.parametrize("window", [1, 15, 16, 17, 100, 5000])
def test_sliding_window(window):
    """The window is exact to the token; the block list contains the blocks before it."""
    cache = random_cache([1, 15, 16, 17, 31, 64, 250])
    query = random_query(cache, 4)
    want = reference(query, cache, window)
    for is_contiguous, mode in product((True, False), MODES):
        got = flat(query, cache, decode_launch(cache, is_contiguous), window, mode=mode)
        what = f"{is_contiguous=}, {mode=}"
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=1e-5, msg=lambda m, w=what: f"{w}: {m}"
        )


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
@pytest.mark.parametrize("window", [None, 40])
def test_blocks_shared_by_several_rows(window, is_contiguous):
    cache = random_cache([70, 64, 300, 65, 200], shared_blocks=4)
    counts = count_decode_blocks(cache.tables, cache.seq_lens, 16)
    assert counts.shared == 16
    query = random_query(cache, 4)
    got = flat(query, cache, decode_launch(cache, is_contiguous), window)
    torch.testing.assert_close(got, reference(query, cache, window), rtol=1e-5, atol=1e-5)


@loop_over("is_contiguous", [True, False])
@loop_over("mode", MODES)
@loop_over("factor", [1.0, 30.0, 1e4, 1e30])
def test_blocks_and_rows_with_very_different_scores(factor, mode, is_contiguous):
    """All scores of one request are far below the scores of another, and so are the blocks of one
    request.
    """
    cache = random_cache([400, 390, 30, 20])
    sign = torch.tensor([1.0, -1.0])
    for row in range(4):
        for index, block in enumerate(cache.tables[row]):
            cache.keys[block] = sign[index % 2] * (index + 1) * torch.ones(16, 2, HEAD_SIZE)
    cache.keys += torch.randn_like(cache.keys) * 1e-3
    query = torch.ones(4, 4, HEAD_SIZE)
    query[1] *= factor
    query[2] *= -factor
    got = flat(query, cache, decode_launch(cache, is_contiguous), mode=mode)
    assert got.isfinite().all()
    # Another order of the sum over the head changes a score by 1e-7 of its size. With a large
    # factor, this is too much for the queries of requests 1 and 2: compare requests 0 and 3.
    exact = slice(None) if factor < 100 else slice(0, None, 3)
    want = reference(query, cache)
    torch.testing.assert_close(got[exact], want[exact], rtol=1e-3, atol=1e-3)


def test_block_far_below_the_maximum_adds_nothing():
    """Relative to the maximum of request 0, the scores of request 1 would underflow."""
    cache = random_cache([16, 16], num_kv_heads=1)
    first, second = cache.tables[0, 0], cache.tables[1, 0]
    cache.keys[first], cache.keys[second] = 100.0, -100.0
    query = torch.ones(2, 1, HEAD_SIZE)
    for mode in MODES:
        got = flat(query, cache, decode_launch(cache, False), mode=mode)
        want = cache.values[[first, second]].mean(1)
        torch.testing.assert_close(got, want)


def test_worked_example_with_two_rows():
    """The example of the specification, with the queries 1 and 2."""
    keys = torch.tensor([[NAN, NAN], [1, 2], [3, 9.9], [0.5, 7]]).view(4, 2, 1, 1)
    values = torch.tensor([[HUGE, HUGE], [10, 20], [30, 99], [5, 77]]).view(4, 2, 1, 1)
    cache = Cache(keys, values, np.array([[1, 2], [3, 0]]), np.array([3, 1]))
    query = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    for is_contiguous in (True, False):
        launch = decode_launch(cache, is_contiguous)
        for mode in MODES:
            got = flat(query, cache, launch, mode=mode, scale=1.0)
            want = [25.752102, 5.0]
            assert got.flatten().tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
def test_alibi(is_contiguous):
    cache = random_cache([1, 40, 130])
    query = random_query(cache, 4)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    got = flat(query, cache, decode_launch(cache, is_contiguous), slopes=slopes)
    for row, length in enumerate(cache.seq_lens.tolist()):
        slots = cache.tables[row].repeat(16)[:length] * 16 + np.arange(length) % 16
        keys, values = (
            x.flatten(0, 1)[slots].repeat_interleave(2, 1) for x in (cache.keys, cache.values)
        )
        scores = torch.einsum("hd,khd->hk", query[row], keys) * SCALE
        scores += slopes[:, None] * (torch.arange(length) - (length - 1))
        want = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_launch_of_padding_alone_is_zero(mode):
    """The warm-up runs batches that contain only padding."""
    cache = random_cache([0, 0])
    query = random_query(cache, 4)
    got = flat(query, cache, decode_launch(cache, False), mode=mode)
    assert (got == 0).all()


def test_slice_beyond_the_cache_is_refused():
    cache = random_cache([5])
    launch = build_decode_metadata(
        cache.tables, cache.seq_lens, 1, len(cache.keys) + 1, 16, padded_shared=0
    ).to("cpu")
    with pytest.raises(ValueError, match="reads blocks 0 to 4, but the KV cache has only 4"):
        flat(random_query(cache, 2), cache, launch)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
def test_new_tokens_are_stored_and_seen(is_contiguous, dtype):
    """Run steps of a decode through the layer; padding is written to the null block."""
    cache = random_cache([15, 16, 0, 40], dtype=dtype)
    mirror = Cache(cache.keys.clone(), cache.values.clone(), cache.tables, cache.seq_lens)
    before = cache.keys.clone()
    launch = decode_launch(cache, is_contiguous)
    num_rows = launch.slot_mapping.shape[0]
    query = torch.randn(num_rows, 4, HEAD_SIZE).to(dtype)
    new = torch.randn(2, num_rows, 2, HEAD_SIZE).to(dtype)
    for row, length in enumerate(cache.seq_lens.tolist()):
        if length:
            slot = (cache.tables[row, (length - 1) // 16], (length - 1) % 16)
            mirror.keys[slot], mirror.values[slot] = new[0, row], new[1, row]
    blocks = derive_decode_blocks(launch, 16, dtype)
    got = decode_attention(query, *new, *cache.flat, blocks, OPTIONS)
    want = reference(query[:4], mirror)
    torch.testing.assert_close(got[:4], want, **TOLERANCES[dtype])
    torch.testing.assert_close(cache.keys[1:], mirror.keys[1:], equal_nan=True)
    torch.testing.assert_close(cache.values[1:], mirror.values[1:], equal_nan=True)
    assert not torch.equal(before[0].isnan(), cache.keys[0].isnan()), "padding is in block 0"


@pytest.mark.parametrize(("is_contiguous", "factor"), [(True, 1), (False, 3)])
def test_a_decode_reads_keys_and_values_once_and_writes_one_token(is_contiguous, factor):
    """A gather reads the blocks, writes a copy, and reads the copy again; a slice reads the blocks
    once.
    """
    lengths, num_kv_heads = np.full(4, 8 * 16, np.int32), 4
    cache = random_cache(lengths.tolist(), num_kv_heads)
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    launch = build_decode_metadata(
        tables,
        lengths,
        4,
        33 if is_contiguous else 32,
        16,
        padded_shared=0 if is_contiguous else None,
    ).to("cpu")
    blocks = derive_decode_blocks(launch, 16, torch.float32)
    query, new = torch.randn(4, 8, HEAD_SIZE), torch.randn(2, 4, num_kv_heads, HEAD_SIZE)
    with CacheTraffic(*cache.flat) as traffic:
        decode_attention(query, *new, *cache.flat, blocks, OPTIONS)
    ideal = (factor * lengths.sum() + 4) * cache.keys[0, 0].nbytes * 2
    assert ideal <= traffic.num_bytes <= 1.05 * ideal


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
def test_values_that_are_not_finite_stay_with_their_token(is_contiguous):
    """Values that are not finite are stored as 0, and keys unchanged.

    A later request that gets the block is not affected, but the request with this token is.
    """
    cache = random_cache([20, 40])
    launch = decode_launch(cache, is_contiguous)
    slots = int(cache.tables[0, 1]) * 16 + torch.arange(16)
    bad = torch.full((16, 2, HEAD_SIZE), NAN)
    values = torch.tensor([NAN, np.inf, -np.inf, 1e38]).repeat(4).view(-1, 1, 1).expand_as(bad)
    want = reference(query := random_query(cache, 4), cache)
    # The 21st and later tokens of the first request are bad.
    write_kv_cache(bad[4:], values[4:], *cache.flat, slots[4:])
    stored = cache.flat[1][slots[4:]]
    assert (stored == torch.tensor([0, 0, 0, 1e38]).repeat(3).view(-1, 1, 1)).all()
    torch.testing.assert_close(flat(query, cache, launch), want, rtol=1e-5, atol=1e-5)
    write_kv_cache(bad[3:4], values[3:4], *cache.flat, slots[3:4])
    blocks = derive_decode_blocks(launch, 16, query.dtype)
    padded = torch.cat((query, torch.zeros(3, 4, HEAD_SIZE)))
    assert flat_paged_attention(padded, *cache.flat, blocks, OPTIONS)[0].isnan().all()


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
        lambda x: x.unique(),
    ],
)
def test_the_guard_of_the_next_test_sees_what_it_should(act):
    with pytest.raises(AssertionError), StaticOnly():
        act(torch.randn(9))


def test_nothing_happens_on_the_host_and_shapes_are_static():
    cache = random_cache([15, 16, 0, 40], shared_blocks=1)
    slopes, options = torch.ones(4), AttentionOptions(SCALE, 20)
    for is_contiguous in (True, False):
        launch = decode_launch(cache, is_contiguous)
        query, new = torch.randn(7, 4, HEAD_SIZE), torch.randn(7, 2, HEAD_SIZE)
        for mode in MODES:
            with StaticOnly():
                blocks = derive_decode_blocks(launch, 16, query.dtype, options)
                decode_attention(
                    query,
                    new,
                    new,
                    *cache.flat,
                    blocks,
                    options,
                    alibi_slopes=slopes,
                    **MODES[mode],
                )


def test_runs_without_content():
    """It runs on the meta device, so no operator depends on the values of a tensor."""
    cache, options = random_cache([15, 40], shared_blocks=1), AttentionOptions(SCALE, 20)
    for is_contiguous in (True, False):
        on_cpu = decode_launch(cache, is_contiguous)
        launch = HPUDecodeMetadata(**{k: v.to("meta") for k, v in vars(on_cpu).items()})
        query = torch.empty(5, 4, HEAD_SIZE, device="meta", dtype=torch.bfloat16)
        new = torch.empty(5, 2, HEAD_SIZE, device="meta", dtype=torch.bfloat16)
        caches = (torch.empty(9 * 16, 2, HEAD_SIZE, device="meta", dtype=new.dtype),) * 2
        for mode in MODES:
            blocks = derive_decode_blocks(launch, 16, query.dtype, options)
            out = decode_attention(query, new, new, *caches, blocks, options, **MODES[mode])
            assert (out.shape, out.dtype) == (query.shape, query.dtype)


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_of_a_bucket_serves_every_step(mode):
    """The graph is recorded with one step and replayed with others: it contains no values of a
    step."""

    def forward(query: Tensor, keys: Tensor, values: Tensor, *fields: Tensor) -> Tensor:
        blocks = derive_decode_blocks(HPUDecodeMetadata(*fields), 16, query.dtype)
        return flat_paged_attention(query, keys, values, blocks, OPTIONS, **MODES[mode])

    query = torch.randn(4, 4, HEAD_SIZE)
    graph = None
    for lengths in ([15, 40, 7], [33, 1, 20], [5, 0, 48]):
        cache = random_cache(lengths)
        launch = build_decode_metadata(cache.tables, cache.seq_lens, 4, 8, 16).to("cpu")
        inputs = (query, *cache.flat, *vars(launch).values())
        graph = graph or make_fx(forward)(*inputs)
        want = reference(query[:3], cache)
        torch.testing.assert_close(graph(*inputs)[:3], want, rtol=1e-5, atol=1e-5)


@loop_over("mode", MODES)
@loop_over("is_contiguous", [True, False])
@loop_over("window", [None, 1, 17])
@loop_over("has_slopes", [False, True])
def test_several_tokens_of_a_row_see_what_each_sees_alone(has_slopes, window, is_contiguous, mode):
    """Decode the last tokens of each request together, as for drafts: some requests have fewer
    tokens, and some cross the edge of a block.
    """
    query_len, num_padded = 4, 2
    counts = np.array([4, 1, 3, 2, 4], np.int32)
    cache = random_cache([4, 16, 18, 33, 100])
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05]) if has_slopes else None
    options = AttentionOptions(SCALE, window)
    num_rows = len(counts)
    rows = decode_launch(cache, is_contiguous, spare=num_padded)
    launch = build_decode_metadata(
        cache.tables,
        cache.seq_lens,
        num_rows + num_padded,
        len(cache.keys) if is_contiguous else len(rows.block_groups),
        cache.block_size,
        padded_shared=num_padded if is_contiguous else None,
        query_lens=counts,
        padded_query_len=query_len,
    ).to("cpu")
    start = cache.seq_lens - counts
    column = np.minimum(np.arange(query_len), counts[:, None] - 1)
    positions = np.zeros((num_rows + num_padded, query_len), np.int32)
    positions[:num_rows] = start[:, None] + column
    blocks = derive_decode_blocks(
        launch, cache.block_size, torch.float32, options, torch.from_numpy(positions)
    )
    query = torch.randn(num_rows + num_padded, query_len, 4, HEAD_SIZE)
    with StaticOnly():
        got = flat_paged_attention(
            query.flatten(0, 1),
            *cache.flat,
            blocks,
            options,
            alibi_slopes=slopes,
            **MODES[mode],
        ).view(query.shape)
    assert (got[num_rows:] == 0).all()
    slots = launch.slot_mapping.view(-1, query_len).numpy()
    for j in range(query_len):
        real = np.flatnonzero(counts > j)
        alone = Cache(cache.keys, cache.values, cache.tables[real], (start + j + 1)[real])
        step = decode_launch(alone, is_contiguous)
        want = flat(query[real, j], alone, step, window, slopes, mode)
        torch.testing.assert_close(got[real, j], want, rtol=1e-5, atol=1e-5)
        assert slots[real, j].tolist() == step.slot_mapping[: len(real)].tolist()
        assert (slots[np.flatnonzero(counts <= j), j] < cache.block_size).all(), "the null block"


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_that_are_the_first_numbers_of_the_keys(is_contiguous, dtype):
    """In a latent cache the values are the first elements of the keys. The stored elements that are
    values are made finite.
    """
    cache, value_size = random_cache([70, 1, 33], 1, HEAD_SIZE, 16, dtype), 12
    cache.keys.nan_to_num_(0.0)
    key_cache, _ = cache.flat
    blocks = derive_decode_blocks(decode_launch(cache, is_contiguous), 16, dtype)
    slots = blocks.slots[:3]
    before = key_cache[slots]
    new = before.clone()
    new[1] = float("nan")
    write_kv_cache(new, None, key_cache, value_size, slots)
    assert torch.equal(key_cache[slots[[0, 2]]], new[[0, 2]])
    assert not key_cache[slots[1], 0, :value_size].any()
    assert key_cache[slots[1], 0, value_size:].isnan().all()
    write_kv_cache(before, None, key_cache, value_size, slots)
    assert torch.equal(key_cache[slots], before)

    query = random_query(cache, 4)
    padded = torch.cat((query, torch.zeros(len(blocks.slots) - 3, 4, HEAD_SIZE, dtype=dtype)))
    got = flat_paged_attention(padded, key_cache, value_size, blocks, OPTIONS)[:3]
    values = cache.keys[..., :value_size]
    want = NativeOps().paged_attention_decode(
        query,
        cache.keys,
        values,
        torch.from_numpy(cache.tables),
        torch.from_numpy(cache.seq_lens),
        OPTIONS,
    )
    assert got.shape == want.shape == (3, 4, value_size)
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


def test_drafts_over_a_latent_cache_are_those_over_two_caches():
    cache, query_len = random_cache([70, 4, 33], 1, HEAD_SIZE), 3
    query_lens = np.array([3, 2, 3], dtype=np.int32)
    launch = build_decode_metadata(
        cache.tables,
        cache.seq_lens,
        3,
        12,
        cache.block_size,
        query_lens=query_lens,
        padded_query_len=query_len,
    ).to("cpu")
    ends = torch.from_numpy(cache.seq_lens)[:, None]
    positions = ends - torch.tensor([[3, 2, 1], [2, 1, 1], [3, 2, 1]])
    blocks = derive_decode_blocks(launch, cache.block_size, torch.float32, indices=positions.int())
    query = torch.randn(3 * query_len, 4, HEAD_SIZE)
    keys, _ = cache.flat
    keys.nan_to_num_(0.0)
    both = [flat_paged_attention(query, keys, v, blocks, OPTIONS) for v in (keys[..., :12], 12)]
    assert both[1].shape == (9, 4, 12)
    assert torch.equal(*both)
