"""Test padded prefills with each kernel against the torch reference of the operators."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.attention.launches import (
    HUGE,
    NAN,
    UNUSED,
    Cache,
    StaticOnly,
    flat,
    padded_caches,
    random_cache,
)
from tests.loops import loop_over
from vllm.attention.backends.flat_pa import derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    SDPAKernel,
    decode_attention,
    derive_prefill_blocks,
    naive_sdpa,
    prefill_attention,
    prefill_mask,
    torch_sdpa,
    write_kv_cache,
)
from vllm.attention.backends.hpu_metadata import (
    HPUPrefillMetadata,
    build_decode_metadata,
    build_prefill_metadata,
)
from vllm.attention.backends.sdpa import PromptInputs
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.native.operators import NativeOps

HEAD_SIZE = 16
SCALE = HEAD_SIZE**-0.5
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}
# (tokens in the cache, new tokens) of each request
ROWS = {
    "prompts": [(0, 1), (0, 16), (0, 37), (0, 0)],
    "prefix hits": [(16, 5), (32, 30), (48, 1)],
    "chunks": [(0, 20), (7, 20), (33, 20), (100, 3), (0, 0)],
}
KERNELS = {"torch": torch_sdpa, "naive": naive_sdpa}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Prefill:
    """A padded prefill with two caches: its own one, without the new tokens, and the one of the
    reference, with them.
    """

    def __init__(
        self,
        rows: list[tuple[int, int]],
        num_heads: int = 4,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        spare: int = 2,
    ) -> None:
        contexts, queries = np.array(rows).T
        self.full = random_cache((contexts + queries).tolist(), block_size=block_size, dtype=dtype)
        num_context = max(-(-contexts // block_size))
        launch = build_prefill_metadata(
            self.full.tables,
            contexts,
            queries,
            len(rows) + spare,
            max(queries) + spare,
            num_context + (spare if num_context else 0),
            block_size,
        )
        self.metadata = launch.to("cpu")
        self.blocks = derive_prefill_blocks(self.metadata, block_size)
        self.query_lens = queries
        self.cache = Cache(
            self.full.keys.clone(), self.full.values.clone(), self.full.tables, self.full.seq_lens
        )
        batch, query_len = launch.slot_mapping.shape
        self.query = torch.randn(batch, query_len, num_heads, HEAD_SIZE).to(dtype)
        new = torch.randn(2, batch, query_len, 2, HEAD_SIZE).to(dtype)
        is_new = torch.arange(query_len) < self.metadata.query_lens[:, None]
        slots = self.metadata.slot_mapping[is_new].long()
        for tensor, cache, full, unused in (
            (new[0], self.cache.keys, self.full.keys, NAN),
            (new[1], self.cache.values, self.full.values, HUGE),
        ):
            tensor[is_new] = full.flatten(0, 1)[slots]
            cache.flatten(0, 1)[slots] = unused
        self.key, self.value = new

    def run(self, mask: Tensor | None, kernel: SDPAKernel = torch_sdpa) -> Tensor:
        out = prefill_attention(
            self.query,
            self.key,
            self.value,
            *self.cache.flat,
            self.blocks,
            mask,
            SCALE,
            kernel,
        )
        assert (out.shape, out.dtype) == (self.query.shape, self.query.dtype)
        assert out.isfinite().all(), "padding is finite"
        return self.ragged(out)

    def ragged(self, padded: Tensor) -> Tensor:
        return torch.cat([row[:n] for row, n in zip(padded, self.query_lens, strict=False)])

    def reference(self, window: int | None = None) -> Tensor:
        return NativeOps().paged_attention_prefill(
            self.ragged(self.query),
            self.full.keys,
            self.full.values,
            torch.from_numpy(self.full.tables),
            np.cumsum([0, *self.query_lens]),
            self.full.seq_lens,
            AttentionOptions(SCALE, window),
        )


@pytest.mark.parametrize("kernel", KERNELS)
@loop_over("dtype", TOLERANCES)
@loop_over("window", [None, 1, 10, 50, 1000])
@pytest.mark.parametrize("rows", ROWS)
def test_prefill_agrees_with_reference(rows, window, dtype, kernel):
    for num_heads, block_size in product((2, 8), (16, 128)):
        prefill = Prefill(ROWS[rows], num_heads, block_size, dtype)
        mask = prefill_mask(prefill.metadata, block_size, AttentionOptions(sliding_window=window))
        assert (mask is None) == (rows == "prompts" and window is None)
        got = prefill.run(mask, KERNELS[kernel])
        torch.testing.assert_close(got, prefill.reference(window), **TOLERANCES[dtype])
        for part in ("keys", "values"):
            stored, want = (getattr(each, part)[1:] for each in (prefill.cache, prefill.full))
            torch.testing.assert_close(stored, want, equal_nan=True)


def test_context_that_another_row_of_the_launch_writes():
    """Two prompts share a prefix: the second reads it from the cache in the same forward pass in
    which the first computes it.
    """
    tables = np.array([[1, 2], [1, 3]])
    launch = build_prefill_metadata(tables, [0, 16], [20, 4], 2, 20, 1, 16).to("cpu")
    new = torch.randn(2, 2, 20, 2, HEAD_SIZE)
    caches = [torch.full((4, 16, 2, HEAD_SIZE), unused) for unused in UNUSED]
    query = torch.randn(2, 20, 4, HEAD_SIZE)
    blocks, mask = derive_prefill_blocks(launch, 16), prefill_mask(launch, 16)
    out = prefill_attention(query, *new, *map(flat, caches), blocks, mask, SCALE)
    want = NativeOps().paged_attention_prefill(
        torch.cat((query[0], query[1, :4])),
        *caches,
        torch.from_numpy(tables),
        [0, 20, 24],
        [20, 20],
        AttentionOptions(SCALE),
    )
    torch.testing.assert_close(torch.cat((out[0], out[1, :4])), want, rtol=1e-5, atol=1e-5)


def test_lengths_reach_the_kernel_only_without_a_mask():
    calls: list[tuple[bool, bool]] = []

    def kernel(inputs: PromptInputs) -> Tensor:
        calls.append((inputs.mask is not None, inputs.valid_lens is not None))
        return torch_sdpa(inputs)

    for rows in ("prompts", "chunks"):
        prefill = Prefill(ROWS[rows])
        prefill.run(prefill_mask(prefill.metadata, 16), kernel)
    assert calls == [(False, True), (True, False)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("rows", ROWS)
def test_alibi(rows, window, kernel):
    prefill = Prefill(ROWS[rows])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    got = prefill.run(
        prefill_mask(prefill.metadata, 16, AttentionOptions(sliding_window=window), slopes),
        KERNELS[kernel],
    )
    wants = []
    for row, (context, count) in enumerate(ROWS[rows]):
        length = context + count
        slots = prefill.full.tables[row].repeat(16)[:length] * 16 + np.arange(length) % 16
        keys, values = (
            x.flatten(0, 1)[slots].repeat_interleave(2, 1)
            for x in (prefill.full.keys, prefill.full.values)
        )
        scores = torch.einsum("qhd,khd->hqk", prefill.query[row, :count], keys) * SCALE
        age = torch.arange(context, length)[:, None] - torch.arange(length)
        scores -= slopes[:, None, None] * age
        scores[:, (age < 0) | (age >= (window or length + 1))] = float("-inf")
        wants.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    torch.testing.assert_close(got, torch.cat(wants), rtol=1e-5, atol=1e-5)


def test_padding_is_stored_in_the_null_block():
    """There may be more padding than slots in the null block; then slots repeat."""
    launch = build_prefill_metadata([[2, 1]], [3], [4], 3, 9, 1, 4).to("cpu")
    caches = torch.zeros(2, 4, 4, 2, HEAD_SIZE)
    new = torch.randn(2, 3, 9, 2, HEAD_SIZE)
    write_kv_cache(*new, *map(flat, caches), launch.slot_mapping.long())
    assert (caches[:, 2, :3] == 0).all()
    torch.testing.assert_close(caches[:, 2, 3], new[:, 0, 0])
    torch.testing.assert_close(caches[:, 1, :3], new[:, 0, 1:4])
    assert (caches[:, 1, 3] == 0).all()
    assert (caches[:, 3] == 0).all()


@pytest.mark.parametrize("is_prefill", [True, False])
def test_caches_are_written_as_they_are_and_not_through_a_view(is_prefill):
    """The compiler restores writes in place only if they are to the input itself, not to a view of
    it.
    """
    launch = build_decode_metadata([[1], [2]], [3, 5], 2, 4, 16).to("cpu")
    prefill = Prefill(ROWS["chunks"])

    def forward(query: Tensor, key: Tensor, value: Tensor, *caches: Tensor) -> Tensor:
        if is_prefill:
            mask = prefill_mask(prefill.metadata, 16)
            return prefill_attention(query, key, value, *caches, prefill.blocks, mask, SCALE)
        blocks = derive_decode_blocks(launch, 16, query.dtype)
        return decode_attention(query, key, value, *caches, blocks, AttentionOptions(SCALE))

    new = (prefill.query, prefill.key, prefill.value)
    if not is_prefill:
        new = tuple(x[:2, 0] for x in new)
    functional = torch.func.functionalize(forward)
    nodes = list(make_fx(functional)(*new, *prefill.cache.flat).graph.nodes)
    copies = [n for n in nodes if n.target is torch.ops.aten.index_copy.default]
    caches = [n for n in nodes if n.op == "placeholder"][3:]
    assert [n.args[0] for n in copies] == caches
    written = [n.args for n in nodes if n.target is torch.ops.aten.copy_.default]
    assert written == list(zip(caches, copies, strict=True))


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_happens_on_the_host_and_shapes_are_static(rows):
    prefill = Prefill(ROWS[rows])
    arguments = (prefill.query, prefill.key, prefill.value, *prefill.cache.flat)
    for kernel in KERNELS.values():
        for window, slopes in [(None, None), (10, None), (10, torch.ones(4))]:
            with StaticOnly():
                blocks = derive_prefill_blocks(prefill.metadata, 16)
                mask = prefill_mask(
                    prefill.metadata, 16, AttentionOptions(sliding_window=window), slopes
                )
                prefill_attention(*arguments, blocks, mask, SCALE, kernel)


@pytest.mark.parametrize("rows", ROWS)
def test_runs_without_content(rows):
    """It runs on the meta device, so no operator depends on the values of a tensor."""
    prefill = Prefill(ROWS[rows], dtype=torch.bfloat16)
    tensors = vars(prefill.metadata).items()
    metadata = HPUPrefillMetadata(**{name: x.to("meta") for name, x in tensors})
    query, key, value = (x.to("meta") for x in (prefill.query, prefill.key, prefill.value))
    caches = [x.to("meta") for x in prefill.cache.flat]
    blocks = derive_prefill_blocks(metadata, 16)
    for kernel in KERNELS.values():
        for slopes in (None, torch.ones(4, device="meta")):
            mask = prefill_mask(
                metadata, 16, AttentionOptions(sliding_window=10), slopes, query.dtype
            )
            out = prefill_attention(query, key, value, *caches, blocks, mask, SCALE, kernel)
            assert (out.shape, out.dtype) == (query.shape, query.dtype)


def test_one_graph_of_a_bucket_serves_every_step():
    """The graph is recorded with one step and replayed with others: it contains no values of a
    step."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        metadata = HPUPrefillMetadata(*rest[2:])
        mask = prefill_mask(metadata, 16, AttentionOptions(sliding_window=25))
        blocks = derive_prefill_blocks(metadata, 16)
        return prefill_attention(query, key, value, *rest[:2], blocks, mask, SCALE)

    graph = None
    for rows in ([(7, 20), (33, 4)], [(48, 1), (0, 20)], [(33, 15), (20, 20)]):
        prefill = Prefill(rows)
        caches = map(flat, padded_caches(prefill.cache.keys, prefill.cache.values, 12))
        inputs = (prefill.query, prefill.key, prefill.value, *caches)
        inputs += tuple(vars(prefill.metadata).values())
        graph = graph or make_fx(forward)(*inputs)
        got = prefill.ragged(graph(*inputs))
        torch.testing.assert_close(got, prefill.reference(25), rtol=1e-5, atol=1e-5)
