"""Test prompts that are concatenated to one sequence against each prompt in a batch of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gaudi_sim.bridge import SimBridge
from tests.attention.launches import UNUSED, Cache, StaticOnly, flat, padded_caches, random_cache
from tests.loops import loop_over
from vllm.attention.backends.alibi import alibi_slopes
from vllm.attention.backends.hpu_attn import derive_merged_blocks, prefill_attention
from vllm.attention.backends.hpu_metadata import build_prefill_metadata
from vllm.attention.backends.merged_prefill import (
    MergedPrefillMetadata,
    build_merged_prefill_metadata,
    derive_merged_positions,
)
from vllm.attention.backends.sdpa import SDPAKernel, bridge_sdpa, naive_sdpa, torch_sdpa
from vllm.messages import NULL_BLOCK_ID
from vllm.ops.attention_options import PLAIN_ATTENTION, AttentionOptions
from vllm.ops.native.operators import NativeOps

HEAD_SIZE = 16
SCALE = HEAD_SIZE**-0.5
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}
# (tokens in the cache, new tokens) of each prompt
PROMPTS = {
    "one": [(0, 7)],
    "without context": [(0, 16), (0, 1), (0, 37)],
    "with context": [(16, 5), (0, 20), (33, 1), (7, 20)],
}
KERNELS = {"torch": torch_sdpa, "naive": naive_sdpa}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@dataclass
class Merged:
    """A merged prefill with two caches: its own one, without the new tokens, and the one of the
    reference, with them.
    """

    arrays: MergedPrefillMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Cache
    full: Cache
    query_lens: np.ndarray

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the merged sequence, and its cache."""
        return self.query[None], self.key[None], self.value[None], *self.cache.flat

    def run(
        self,
        window: int | None = None,
        slopes: Tensor | None = None,
        kernel: SDPAKernel = torch_sdpa,
    ) -> Tensor:
        metadata, block_size = self.arrays.to("cpu"), self.cache.block_size
        with StaticOnly():
            options = AttentionOptions(SCALE, window)
            positions = derive_merged_positions(metadata, block_size)
            mask = positions.mask(options, slopes, self.query.dtype)
            blocks = derive_merged_blocks(metadata, block_size)
            out = prefill_attention(*self.tensors, blocks, mask, SCALE, kernel)[0]
        assert (out.shape, out.dtype) == (self.query.shape, self.query.dtype)
        assert out.isfinite().all(), "padding is finite"
        return out[: sum(self.query_lens)]

    def reference(self, window: int | None = None) -> Tensor:
        return NativeOps().paged_attention_prefill(
            self.query[: sum(self.query_lens)],
            self.full.keys,
            self.full.values,
            torch.from_numpy(self.full.tables),
            np.cumsum([0, *self.query_lens]),
            self.full.seq_lens,
            AttentionOptions(SCALE, window),
        )


def merged(
    prompts: list[tuple[int, int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    sizes: tuple[int, int, int] | None = None,
) -> Merged:
    """Make a merged forward pass of these prompts; `sizes` are its padded numbers of prompts,
    tokens and context blocks.
    """
    contexts, queries = np.array(prompts).T
    num_context = sum(-(-contexts // block_size))
    sizes = sizes or (len(prompts) + 1, sum(queries) + 3, num_context + 2 if num_context else 0)
    full = random_cache((contexts + queries).tolist(), block_size=block_size, dtype=dtype)
    arrays = build_merged_prefill_metadata(full.tables, contexts, queries, *sizes, block_size)
    cache = Cache(full.keys.clone(), full.values.clone(), full.tables, full.seq_lens)
    query = torch.randn(sizes[1], num_heads, HEAD_SIZE).to(dtype)
    new = torch.randn(2, sizes[1], 2, HEAD_SIZE).to(dtype)
    slots = torch.from_numpy(arrays.slot_mapping[: sum(queries)]).long()
    for part, emptied, source, unused in zip(
        new, (cache.keys, cache.values), (full.keys, full.values), UNUSED, strict=True
    ):
        part[: sum(queries)] = source.flatten(0, 1)[slots]
        emptied.flatten(0, 1)[slots] = unused
    return Merged(arrays, query, *new, cache, full, queries)


def test_worked_example():
    """The example in the docstring of the module that is tested."""
    launch = build_merged_prefill_metadata([[7, 3, 5], [9, 0, 0]], [4, 0], [5, 2], 3, 9, 2, 4)
    assert launch.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, -1, -1]
    assert launch.positions.tolist() == [4, 5, 6, 7, 8, 0, 1, 0, 0]
    assert launch.slot_mapping.tolist() == [12, 13, 14, 15, 20, 36, 37, 3, 0]
    assert launch.last_token_indices.tolist() == [4, 6, 0]
    assert launch.context_blocks.tolist() == [7, NULL_BLOCK_ID]
    assert launch.context_groups.tolist() == [0, -1]
    assert launch.context_starts.tolist() == [0, 0]
    assert launch.context_usage.tolist() == [4, 0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (1, 7, 1),
            "2 prompts with 7 new tokens and 1 context blocks do not fit a bucket of 1 prompts",
        ),
        ((2, 6, 1), "a bucket of 2 prompts, 6 tokens and 1"),
        ((2, 7, 0), "a bucket of 2 prompts, 7 tokens and 0"),
    ],
)
def test_launch_that_is_too_small_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        build_merged_prefill_metadata([[7, 3, 5], [9, 0, 0]], [4, 0], [5, 2], *sizes, 4)


def test_prompts_that_make_no_launch_are_refused():
    with pytest.raises(ValueError, match="block_tables must be"):
        build_merged_prefill_metadata([[7, 3]], [4], [5], 1, 5, 1, 4)
    with pytest.raises(ValueError, match="needs at least one new token"):
        build_merged_prefill_metadata([[7, 3]], [4], [0], 1, 5, 1, 4)


@pytest.mark.parametrize("kernel", KERNELS)
@loop_over("dtype", TOLERANCES)
@loop_over("window", [None, 1, 10, 1000])
@pytest.mark.parametrize("prompts", PROMPTS)
def test_agrees_with_reference(prompts, window, dtype, kernel):
    launch = merged(PROMPTS[prompts], dtype=dtype)
    got = launch.run(window, kernel=KERNELS[kernel])
    torch.testing.assert_close(got, launch.reference(window), **TOLERANCES[dtype])
    torch.testing.assert_close(launch.cache.keys[1:], launch.full.keys[1:], equal_nan=True)
    torch.testing.assert_close(launch.cache.values[1:], launch.full.values[1:], equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from([1, 4, 16]),
    st.none() | st.integers(1, 50),
)
def test_any_prompts_equal_themselves_one_by_one(prompts, block_size, window):
    launch = merged(prompts, block_size)
    torch.testing.assert_close(launch.run(window), launch.reference(window), rtol=1e-5, atol=1e-5)
    contexts, queries = np.array(prompts).T
    rows = build_prefill_metadata(
        launch.full.tables,
        contexts,
        queries,
        len(prompts),
        max(queries),
        max(-(-contexts // block_size)),
        block_size,
    )
    is_real = np.arange(max(queries)) < queries[:, None]
    slots = launch.arrays.slot_mapping
    assert slots[: sum(queries)].tolist() == rows.slot_mapping[is_real].tolist()
    assert (slots[sum(queries) :] // block_size == NULL_BLOCK_ID).all()
    last = launch.arrays.last_token_indices[: len(prompts)]
    assert launch.arrays.positions[last].tolist() == (contexts + queries - 1).tolist()
    assert launch.arrays.sequence_ids[last].tolist() == list(range(len(prompts)))


def test_context_that_another_prompt_of_the_launch_writes():
    """Two prompts share a prefix: the second reads it from the cache in the same forward pass in
    which the first computes it.
    """
    tables = np.array([[1, 2], [1, 3]])
    metadata = build_merged_prefill_metadata(tables, [0, 16], [20, 4], 2, 30, 1, 16).to("cpu")
    query, new = torch.randn(30, 4, HEAD_SIZE), torch.randn(2, 30, 2, HEAD_SIZE)
    caches = [torch.full((4, 16, 2, HEAD_SIZE), unused) for unused in UNUSED]
    mask, blocks = (
        derive_merged_positions(metadata, 16).mask(PLAIN_ATTENTION),
        derive_merged_blocks(metadata, 16),
    )
    one_row = (x[None] for x in (query, *new))
    out = prefill_attention(*one_row, *map(flat, caches), blocks, mask, SCALE)[0]
    want = NativeOps().paged_attention_prefill(
        query[:24],
        *caches,
        torch.from_numpy(tables),
        [0, 20, 24],
        [20, 20],
        AttentionOptions(SCALE),
    )
    torch.testing.assert_close(out[:24], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("window", [None, 10])
def test_alibi(prompts, window):
    """A prompt gives the same result in a forward pass of its own and with others, and the result
    of the formula.
    """
    slopes, launch = alibi_slopes(4), merged(PROMPTS[prompts])
    got = launch.run(window, slopes).split(launch.query_lens.tolist())
    for row, (context, count) in enumerate(PROMPTS[prompts]):
        length = context + count
        slots = launch.full.tables[row].repeat(16)[:length] * 16 + np.arange(length) % 16
        keys, values = (
            x.flatten(0, 1)[slots].repeat_interleave(2, 1)
            for x in (launch.full.keys, launch.full.values)
        )
        start = sum(launch.query_lens[:row])
        scores = torch.einsum("qhd,khd->hqk", launch.query[start : start + count], keys) * SCALE
        age = torch.arange(context, length)[:, None] - torch.arange(length)
        scores -= slopes[:, None, None] * age
        scores[:, (age < 0) | (age >= (window or length + 1))] = float("-inf")
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_every_query_sees_something(window):
    metadata = merged(PROMPTS["without context"]).arrays.to("cpu")
    assert derive_merged_positions(metadata, 16).mask(AttentionOptions(SCALE, window)).any(-1).all()


class Attention(nn.Module):
    """A module that computes attention from the fields of a forward pass, as in a captured
    graph.
    """

    def __init__(self, kernel: SDPAKernel, window: int | None) -> None:
        super().__init__()
        self.kernel, self.options = kernel, AttentionOptions(SCALE, window)

    def forward(self, tensors: tuple[Tensor, ...], metadata: MergedPrefillMetadata) -> Tensor:
        mask = derive_merged_positions(metadata, 16).mask(self.options)
        blocks = derive_merged_blocks(metadata, 16)
        return prefill_attention(*tensors, blocks, mask, SCALE, self.kernel)[0]


@pytest.fixture
def strict_card() -> Iterator[SimBridge]:
    with torch.inference_mode():
        yield SimBridge("gaudi2", is_lazy=True, is_strict=True)


@pytest.mark.parametrize("window", [None, 25])
def test_one_graph_of_a_bucket_serves_every_step_on_a_strict_card(strict_card, window):
    graph = strict_card.wrap_in_hpu_graph(Attention(bridge_sdpa(strict_card.kernels), window))
    for prompts in ([(7, 20), (33, 4)], [(48, 1)], [(0, 3), (20, 20), (9, 9)]):
        launch = merged(prompts, sizes=(4, 48, 6))
        caches = padded_caches(launch.cache.keys, launch.cache.values, 16)
        tensors = tuple(x.to("hpu") for x in (*launch.tensors[:3], *map(flat, caches)))
        metadata = launch.arrays.to("hpu")
        if strict_card.counters().graph_captures == 0:
            graph(tensors, metadata)
        with strict_card.warmed_section():
            out = graph(tensors, metadata)
        got = out.cpu()[: sum(launch.query_lens)]
        torch.testing.assert_close(got, launch.reference(window), rtol=1e-5, atol=1e-5)
    counters = strict_card.counters()
    assert (counters.graph_captures, counters.graph_replays, counters.cpu_fallbacks) == (1, 3, {})
