"""Prompts that attend in slices of their queries, on the simulated card: the results equal
the results of all queries at once, and a mask never has more queries than a slice."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gaudi_sim.bridge import SimBridge
from tests.attention.launches import random_cache
from tests.attention.options import split_options
from tests.hpu import needs_simulated_device
from tests.loops import loop_over
from vllm.attention.backends.hpu_metadata import HPUPrefillMetadata, build_prefill_metadata
from vllm.attention.backends.merged_prefill import build_merged_prefill_metadata
from vllm.attention.backends.padded import PaddedPrefill, fit_kernel, layer_kinds
from vllm.attention.backends.prompt_masks import MaskPositions, SlicedMask
from vllm.attention.backends.sdpa import FusedSDPA, bridge_sdpa
from vllm.config.hpu import UNSLICED, HPUConfig, PromptSlicing
from vllm.ops.attention_options import AttentionTensors
from vllm.ops.native.operators import NativeOps

pytestmark = needs_simulated_device

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 16, 16
LENS, QUERY_LEN, SLICE = np.array([150, 97, 3], np.int32), 160, 48
SLICING = PromptSlicing(max_keys=100, num_queries=SLICE)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 40},
    "short window": {"sliding_window": 1},
    "chunks": {"chunk_size": 37},
    "window and chunks": {"sliding_window": 60, "chunk_size": 64},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "soft cap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 0.5, 4.0]), "sliding_window": 40},
}


class Layer:
    """The options that a forward pass reads from an attention layer."""

    alibi_slopes = sinks = cache_scales = prompt_scales = None

    def __init__(self, cache, **options) -> None:
        self.key_cache, self.value_cache = (x.to("hpu") for x in cache.flat)
        self.options, tensors = split_options({"scale": 0.25} | options)
        for name, value in tensors.items():
            setattr(self, name, value.to("hpu"))


class Launch:
    """A prefill with random tokens."""

    def __init__(
        self,
        context: int,
        options: dict[str, Any],
        *,
        is_merged: bool = False,
        image: tuple[int, int] | None = None,
    ) -> None:
        torch.manual_seed(0)
        contexts = np.array([context, context // 2, context], np.int32)
        cache = random_cache((contexts + LENS).tolist(), KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
        self.layer, self.is_merged = Layer(cache, **options), is_merged
        if is_merged:
            num_context, num_tokens = int((-(-contexts // BLOCK_SIZE)).sum()), 256
            build: Any = build_merged_prefill_metadata
            sizes = (len(LENS), num_tokens, num_context and num_context + 2)
            self.is_real = np.arange(num_tokens) < LENS.sum()
        else:
            build, num_tokens = build_prefill_metadata, len(LENS) * QUERY_LEN
            sizes = (len(LENS), QUERY_LEN, -(-context // BLOCK_SIZE))
            self.is_real = (np.arange(QUERY_LEN) < LENS[:, None]).ravel()
        self.cache, self.last_keys, later_keys = cache, None, None
        if image is not None:
            self.last_keys = last_keys_of(contexts, image)
            later_keys = np.zeros_like(self.is_real, np.int32)
            later_keys[self.is_real] = self.last_keys
            later_keys = later_keys.reshape(1 if is_merged else len(LENS), -1)
        self.metadata = build(cache.tables, contexts, LENS, *sizes, BLOCK_SIZE, later_keys)
        self.metadata = self.metadata.to("hpu")
        query = torch.randn(num_tokens, HEADS, HEAD_SIZE) * 2
        self.inputs = [x.to("hpu") for x in (query, *torch.randn(2, num_tokens, 2, HEAD_SIZE))]

    def run(self, bridge: SimBridge, slicing: PromptSlicing) -> tuple[PaddedPrefill, Tensor]:
        """Return the forward pass, and its result for the real tokens."""
        kinds = layer_kinds([self.layer])
        kernel = fit_kernel(bridge_sdpa(bridge.kernels, slicing), kinds)
        derive = PaddedPrefill.derive_merged if self.is_merged else PaddedPrefill.derive
        launch = derive(self.metadata, kinds, BLOCK_SIZE, kernel)
        return launch, launch.attend(self.layer, *self.inputs).cpu()[self.is_real]


def last_keys_of(contexts: np.ndarray, image: tuple[int, int]) -> np.ndarray:
    """Return the last key that each new token sees. If a prompt is long enough, its tokens between
    the two indices of `image` see each other.
    """
    found = []
    for context, num_new in zip(contexts, LENS, strict=True):
        last_keys = np.arange(context, context + num_new, dtype=np.int32)
        first, end = image
        if end <= context + num_new:
            last_keys[max(first - context, 0) : max(end - context, 0)] = end - 1
        found.append(last_keys)
    return np.concatenate(found)


@pytest.fixture
def masks(monkeypatch) -> list[torch.Size]:
    """List the shapes of the masks that are made."""
    shapes = []

    def spy(self, *args, **kwargs):
        mask = MASK(self, *args, **kwargs)
        shapes.append(mask.shape)
        return mask

    monkeypatch.setattr(MaskPositions, "mask", spy)
    return shapes


MASK = MaskPositions.mask


@loop_over("is_merged", [False, True])
@loop_over("context", [0, 200])
@loop_over("name", LAYERS)
def test_slices_give_what_all_queries_give_at_once(name, context, is_merged, masks):
    # Use a release whose kernel does not support windows, so that layers with windows need masks
    # even without a context.
    release = (1, 24) if name == "sinks" else (1, 21)
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True, release=release)
    launch = Launch(context, LAYERS[name], is_merged=is_merged)
    _, want = launch.run(bridge, UNSLICED)
    masks.clear()
    prefill, got = launch.run(bridge, SLICING)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    [mask] = prefill.masks.values()
    is_causal = context == 0 and not is_merged
    if name == "plain" and is_causal:
        assert mask is None, "the kernel needs no mask, so that slices would save nothing"
        return
    assert isinstance(mask, SlicedMask)
    num_queries = 256 if is_merged else QUERY_LEN
    assert [shape[2] for shape in masks] == [
        min(SLICE, num_queries - start) for start in range(0, num_queries, SLICE)
    ]
    widths = [shape[3] for shape in masks]
    num_context = prefill.masks[next(iter(prefill.masks))].positions.key_positions.shape[1]
    num_context -= num_queries
    if name == "window" and (context == 0 or not is_merged):
        # The last slices see neither the context nor the first tokens.
        assert max(widths[1:] if not context else widths[2:]) <= SLICE + 40 - 1
    else:
        assert widths[0] == num_context + SLICE


@pytest.mark.parametrize("is_merged", [False, True], ids=["rows", "merged"])
@pytest.mark.parametrize(("context", "image"), [(0, (20, 90)), (200, (150, 290))])
@pytest.mark.parametrize("name", ["plain", "window", "short window", "sinks"])
def test_tokens_see_all_of_their_image(name, context, image, is_merged):
    """The prompts attend at once and in slices, and the image may begin in the context."""
    release = (1, 24) if name == "sinks" else (1, 21)
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True, release=release)
    launch = Launch(context, LAYERS[name], is_merged=is_merged, image=image)
    found = [launch.run(bridge, slicing)[1] for slicing in (UNSLICED, SLICING)]
    # Compute the expected result from all tokens of each prompt. The tokens of the context are in
    # the cache.
    assert launch.last_keys is not None
    layer, cache = launch.layer, launch.cache
    query, key, value = (x.cpu()[launch.is_real] for x in launch.inputs)
    slots = [
        slot
        for table, seq_len, num_new in zip(cache.tables, cache.seq_lens, LENS, strict=True)
        for position in range(seq_len - num_new, seq_len)
        for slot in [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE]
    ]
    for new, stored in ((key, cache.keys), (value, cache.values)):
        stored.flatten(0, 1)[slots] = new
    sinks = None if layer.sinks is None else layer.sinks.cpu()
    want = NativeOps().paged_attention_prefill(
        query,
        cache.keys,
        cache.values,
        torch.from_numpy(cache.tables),
        np.cumsum([0, *LENS]),
        cache.seq_lens,
        layer.options,
        AttentionTensors(sinks=sinks),
        launch.last_keys,
    )
    causal = Launch(context, LAYERS[name], is_merged=is_merged).run(bridge, UNSLICED)[1]
    assert not torch.allclose(causal, want, rtol=1e-3, atol=1e-3)
    for got in found:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_short_prompts_are_not_sliced(masks):
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    for slicing in (PromptSlicing(QUERY_LEN + 208, SLICE), PromptSlicing(1, QUERY_LEN)):
        prefill, _ = Launch(200, {}).run(bridge, slicing)
        assert all(isinstance(mask, Tensor) for mask in prefill.masks.values())


def replay(slicing: PromptSlicing) -> tuple[Tensor, int]:
    """Return the result of a graph that was captured with one forward pass and replayed with
    another, and its workspace.
    """
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    first, second = (Launch(context, {}) for context in (200, 193))
    layer = first.layer

    class Attention(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            kinds, kernel = layer_kinds([layer]), FusedSDPA(bridge.kernels, slicing=slicing)
            metadata = HPUPrefillMetadata(*given[3:])
            launch = PaddedPrefill.derive(metadata, kinds, BLOCK_SIZE, kernel)
            return launch.attend(layer, *given[:3])

    with torch.inference_mode():
        graph = bridge.wrap_in_hpu_graph(Attention())
        inputs = [(*x.inputs, *vars(x.metadata).values()) for x in (first, second)]
        graph(*inputs[0])
        with bridge.warmed_section():
            got = graph(*inputs[1])
        out = got.cpu()[second.is_real]
    assert bridge.counters().cpu_fallbacks == {}
    return out, bridge.card.memory.workspace_bytes


def test_one_graph_in_slices_serves_other_lengths_and_takes_less_workspace():
    (want, most), (got, taken) = replay(UNSLICED), replay(SLICING)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert taken < most


@pytest.mark.parametrize(
    ("settings", "budget", "want"),
    [
        ({}, 8192, UNSLICED),
        ({"bucketing_strategy": "pad"}, 8192, PromptSlicing(8192, 4096)),
        ({"bucketing_strategy": "pad"}, 3000, PromptSlicing(3000, 2048)),
        ({"bucketing_strategy": "pad"}, 32768, PromptSlicing(8192, 4096)),
        ({"bucketing_strategy": "pad", "merged_prefill": True}, 8192, UNSLICED),
        ({"bucketing_strategy": "pad", "slices_prompts": False}, 8192, UNSLICED),
        ({"slices_prompts": True, "prompt_attention": "naive"}, 8192, UNSLICED),
        ({"slices_prompts": True, "max_unsliced_keys": 5000}, 8192, PromptSlicing(5000, 3072)),
        ({"slices_prompts": True, "queries_of_slice": 100}, 512, PromptSlicing(512, 100)),
    ],
    ids=str,
)
def test_the_sizes_are_those_of_the_documents(settings, budget, want):
    assert replace(HPUConfig(), **settings).prompt_slicing(budget) == want
