"""Test decodes whose softmax is computed relative to one value per request and head."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.attention.launches import HUGE, NAN, Cache, StaticOnly, random_cache
from tests.loops import loop_over
from vllm.attention.backends.flat_pa import (
    DecodeBlocks,
    derive_decode_blocks,
    flat_paged_attention,
)
from vllm.attention.backends.hpu_metadata import build_decode_metadata, count_decode_blocks
from vllm.attention.backends.normalisers import NORMALISERS, parse_normaliser
from vllm.config.hpu import NORMALISER_NAMES
from vllm.errors import ConfigError
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.native.operators import NativeOps

SCALE = 0.25
SETTINGS = [*NORMALISERS, "wsum,head_amax", 10.0, 0.0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def decode_blocks(
    cache: Cache, dtype: torch.dtype, is_contiguous: bool, window: int | None = None
) -> DecodeBlocks:
    """Return the decode of all requests of a cache, followed by two padded requests and two padded
    blocks.
    """
    counts = count_decode_blocks(cache.tables, cache.seq_lens, cache.block_size)
    return derive_decode_blocks(
        build_decode_metadata(
            cache.tables,
            cache.seq_lens,
            len(cache.seq_lens) + 2,
            counts.span if is_contiguous else counts.references + 2,
            cache.block_size,
            padded_shared=counts.shared if is_contiguous else None,
        ).to("cpu"),
        cache.block_size,
        dtype,
        AttentionOptions(SCALE, window),
    )


def attend(
    setting: str | float, query: Tensor, cache: Cache, blocks: DecodeBlocks, scale: float = SCALE
) -> Tensor:
    normaliser = setting if isinstance(setting, float) else parse_normaliser(setting)
    padded = torch.cat((query, torch.randn(2, *query.shape[1:]).to(query.dtype)))
    with StaticOnly():
        out = flat_paged_attention(
            padded, *cache.flat, blocks, AttentionOptions(scale), normaliser=normaliser
        )
    assert (out[len(query) :] == 0).all(), "padded rows are zero"
    return out[: len(query)]


def example() -> Cache:
    """Return the worked example of flat attention: the maxima of the blocks are 2, 3 and 1."""
    keys = torch.tensor([[NAN, NAN], [1, 2], [3, 9.9], [0.5, 7]]).view(4, 2, 1, 1)
    values = torch.tensor([[HUGE, HUGE], [10, 20], [30, 99], [5, 77]]).view(4, 2, 1, 1)
    return Cache(keys, values, np.array([[1, 2], [3, 0]]), np.array([3, 1]))


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_worked_example(setting, is_contiguous):
    cache = example()
    query = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    blocks = decode_blocks(cache, query.dtype, is_contiguous)
    got = attend(setting, query, cache, blocks, scale=1.0)
    assert got.flatten().tolist() == pytest.approx([25.752102, 5.0], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("amax", [3, 3, 3]),
        ("head_amax", [3, 3, 3]),
        ("wsum", [2.5, 2.5, 1]),
        ("wsum_head_amax", [3, 3, 1.5]),
        ("index_reduce", [3, 3, 1]),
        ("scatter_reduce", [3, 3, 1]),
    ],
)
def test_what_is_subtracted_in_the_worked_example(name, want):
    blocks = decode_blocks(example(), torch.float32, is_contiguous=False)
    hidden = torch.finfo(torch.float32).min
    block_max = torch.tensor([2, 3, 1, hidden, hidden]).view(5, 1, 1)
    got = parse_normaliser(name)(block_max, blocks)
    assert got.shape == block_max.shape
    assert got.flatten()[:3].tolist() == want


@pytest.mark.parametrize("setting", [None, 0.0, *NORMALISERS])
def test_a_soft_cap_keeps_scores_of_any_size_within_reach_of_every_normaliser(setting):
    """Without a soft cap these scores are in the thousands. Hidden keys must stay hidden."""
    cache = random_cache([70, 300, 5])
    query = torch.randn(3, 4, 16) * 3000
    blocks = decode_blocks(cache, torch.float32, is_contiguous=False, window=80)
    padded, options = torch.cat((query, torch.zeros(2, 4, 16))), AttentionOptions(SCALE, 80, 30.0)
    normaliser = parse_normaliser(setting) if isinstance(setting, str) else setting
    got = flat_paged_attention(padded, *cache.flat, blocks, options, normaliser=normaliser)
    want = NativeOps().paged_attention_decode(
        query,
        cache.keys,
        cache.values,
        torch.from_numpy(cache.tables).int(),
        torch.from_numpy(cache.seq_lens).int(),
        options,
    )
    torch.testing.assert_close(got[:3], want, rtol=1e-5, atol=1e-5)


@loop_over("is_contiguous", [True, False])
@loop_over("window", [None, 20])
@loop_over("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-5)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_ordinary_scores_give_the_exact_result(setting, dtype, tolerance, window, is_contiguous):
    """The window hides whole blocks of the longer requests."""
    cache = random_cache([70, 64, 300, 0, 65], dtype=dtype, shared_blocks=4)
    query = torch.randn(5, 4, 16).to(dtype)
    blocks = decode_blocks(cache, dtype, is_contiguous, window)
    got = attend(setting, query, cache, blocks)
    want = NativeOps().paged_attention_decode(
        query,
        cache.keys,
        cache.values,
        torch.from_numpy(cache.tables),
        torch.from_numpy(cache.seq_lens),
        AttentionOptions(SCALE, window),
    )
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("setting", "is_exact"),
    [("index_reduce", True), ("scatter_reduce", True), ("amax", False), (10.0, False)],
)
def test_a_row_far_below_becomes_zero_unless_its_own_maximum_is_taken(setting, is_exact):
    cache = random_cache([16, 16], num_kv_heads=1)
    cache.keys[cache.tables[0, 0]], cache.keys[cache.tables[1, 0]] = 1.0, -100.0
    query = torch.ones(2, 1, 16)
    got = attend(setting, query, cache, decode_blocks(cache, query.dtype, False))
    want = cache.values[cache.tables[:, 0]].mean(1)
    torch.testing.assert_close(got, want if is_exact else want * torch.tensor([[[1.0]], [[0]]]))


def test_unknown_name_is_refused():
    assert tuple(NORMALISERS) == NORMALISER_NAMES
    with pytest.raises(ConfigError, match="'rowmax' is unknown; accepted: amax, head_amax, wsum"):
        parse_normaliser("wsum,rowmax")
