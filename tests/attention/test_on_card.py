"""Test padded forward passes on a strict simulated card: no CPU fallback, recompilation or host
sync.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gaudi_sim.bridge import SimBridge
from tests.attention.launches import flat, padded_caches, random_cache
from vllm.attention.backends.flat_pa import derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    decode_attention,
    derive_prefill_blocks,
    prefill_attention,
    prefill_mask,
)
from vllm.attention.backends.hpu_metadata import (
    HPUDecodeMetadata,
    HPUPrefillMetadata,
    build_decode_metadata,
    build_prefill_metadata,
)
from vllm.attention.backends.normalisers import NORMALISERS
from vllm.attention.backends.sdpa import bridge_sdpa
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import COMPILE_BACKEND

SCALE = 0.25
VARIANTS: dict[str, dict[str, Any]] = {
    "pipelined": {},
    "constant": {"normaliser": 1.0},
    **{name: {"normaliser": normaliser} for name, normaliser in NORMALISERS.items()},
}


@pytest.fixture(autouse=True)
def card() -> Iterator[SimBridge]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield SimBridge("gaudi2", is_lazy=True, is_strict=True)


def on_card(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to("hpu") for x in tensors)


class Decode(nn.Module):
    def __init__(self, window: int | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.options, self.variant = AttentionOptions(SCALE, window), options

    def forward(self, tensors: tuple[Tensor, ...], metadata: HPUDecodeMetadata) -> Tensor:
        blocks = derive_decode_blocks(metadata, 16, tensors[0].dtype, self.options)
        return decode_attention(*tensors, blocks, self.options, **self.variant)


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_graph_of_a_decode_serves_every_step(card, variant, window, is_contiguous):
    graph = card.wrap_in_hpu_graph(Decode(window, VARIANTS[variant]))
    for lengths in ([15, 40, 7], [33, 1, 20], [5, 0, 48]):
        cache = random_cache(lengths)
        launch = build_decode_metadata(
            cache.tables,
            cache.seq_lens,
            4,
            16,
            16,
            padded_shared=2 if is_contiguous else None,
        )
        query, new = torch.randn(4, 4, 16), torch.randn(2, 4, 2, 16)
        caches = padded_caches(cache.keys, cache.values, 16)
        tensors, metadata = on_card(query, *new, *map(flat, caches)), launch.to("hpu")
        if card.counters().graph_captures == 0:
            graph(tensors, metadata)
        with card.warmed_section():
            out = graph(tensors, metadata)
        for tensor, full in zip(new, caches, strict=True):
            full.flatten(0, 1)[torch.from_numpy(launch.slot_mapping).long()] = tensor
        want = NativeOps().paged_attention_decode(
            query[:3],
            *caches,
            torch.from_numpy(cache.tables),
            torch.from_numpy(cache.seq_lens),
            AttentionOptions(SCALE, window),
        )
        torch.testing.assert_close(out.cpu()[:3], want, rtol=1e-5, atol=1e-5)
    counters = card.counters()
    assert (counters.graph_captures, counters.graph_replays, counters.cpu_fallbacks) == (1, 3, {})


class Prefill(nn.Module):
    def __init__(self, card: SimBridge, window: int | None) -> None:
        super().__init__()
        self.kernel, self.options = bridge_sdpa(card.kernels), AttentionOptions(SCALE, window)

    def forward(self, tensors: tuple[Tensor, ...], metadata: HPUPrefillMetadata) -> Tensor:
        mask = prefill_mask(metadata, 16, self.options)
        blocks = derive_prefill_blocks(metadata, 16)
        return prefill_attention(*tensors, blocks, mask, SCALE, self.kernel)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_context", [0, 3])
def test_one_graph_of_a_prefill_serves_every_step(card, num_context, window):
    graph = card.wrap_in_hpu_graph(Prefill(card, window))
    for rows in ([(7, 20), (33, 4)], [(48, 1), (0, 20)], [(33, 15), (20, 20)]):
        contexts, queries = np.array(rows).T
        contexts = contexts if num_context else np.zeros_like(contexts)
        cache = random_cache((contexts + queries).tolist())
        launch = build_prefill_metadata(cache.tables, contexts, queries, 3, 20, num_context, 16)
        query, new = torch.randn(3, 20, 4, 16), torch.randn(2, 3, 20, 2, 16)
        caches = padded_caches(cache.keys, cache.values, 16)
        tensors, metadata = on_card(query, *new, *map(flat, caches)), launch.to("hpu")
        if card.counters().graph_captures == 0:
            graph(tensors, metadata)
        with card.warmed_section():
            out = graph(tensors, metadata)
        slots = torch.from_numpy(launch.slot_mapping).flatten().long()
        for tensor, full in zip(new, caches, strict=True):
            full.flatten(0, 1)[slots] = tensor.flatten(0, 1)
        is_real = torch.from_numpy(np.arange(20) < launch.query_lens[:, None])
        want = NativeOps().paged_attention_prefill(
            query[is_real],
            *caches,
            torch.from_numpy(cache.tables),
            np.cumsum([0, *queries]),
            cache.seq_lens,
            AttentionOptions(SCALE, window),
        )
        got = out.cpu()
        assert got.isfinite().all(), "padding is finite"
        torch.testing.assert_close(got[is_real], want, rtol=1e-5, atol=1e-5)
    counters = card.counters()
    assert (counters.graph_captures, counters.graph_replays, counters.cpu_fallbacks) == (1, 3, {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_operator_of_a_decode_falls_back_in_eager_mode(variant):
    """In eager mode a card keeps int64, which fewer operators support."""
    eager = SimBridge("gaudi2")
    cache = random_cache([15, 40, 7])
    launch = build_decode_metadata(cache.tables, cache.seq_lens, 4, 16, 16).to("hpu")
    tensors = on_card(torch.randn(4, 4, 16), *torch.randn(2, 4, 2, 16), *cache.flat)
    Decode(20, VARIANTS[variant])(tensors, launch)
    assert eager.counters().cpu_fallbacks == {}


@pytest.mark.parametrize("variant", ["pipelined", "wsum_head_amax"])
def test_a_compiled_decode_is_one_graph(variant):
    """In eager mode, `torch.compile` replaces captured graphs."""
    eager = SimBridge("gaudi2")
    decode = Decode(20, VARIANTS[variant])
    compiled = torch.compile(decode, backend=COMPILE_BACKEND, fullgraph=True, dynamic=False)
    for lengths in ([15, 40, 7], [33, 1, 20]):
        cache = random_cache(lengths)
        launch = build_decode_metadata(cache.tables, cache.seq_lens, 4, 16, 16).to("hpu")
        caches = padded_caches(cache.keys, cache.values, 16)
        tensors = on_card(torch.randn(4, 4, 16), *torch.randn(2, 4, 2, 16), *map(flat, caches))
        got = compiled(tensors, launch).cpu()
        torch.testing.assert_close(got, decode(tensors, launch).cpu())
    assert eager.counters().compilations == 1
