"""Test ALiBi from the slopes to the outputs: a prompt and the decodes after it give the same as one
pass.
"""

import numpy as np
import pytest
import torch
from torch import nn

from tests.attention.launches import UNUSED, random_cache
from tests.attention.options import split_options
from tests.loops import loop_over
from vllm.attention import Attention, LaunchContext
from vllm.attention.backends.alibi import alibi_slopes
from vllm.attention.backends.flat_pa import derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    decode_attention,
    derive_prefill_blocks,
    prefill_attention,
    prefill_mask,
)
from vllm.attention.backends.hpu_metadata import build_decode_metadata, build_prefill_metadata
from vllm.attention.backends.merged_prefill import build_merged_prefill_metadata
from vllm.attention.backends.padded import PaddedDecode, PaddedPrefill, layer_kinds
from vllm.attention.backends.sdpa import torch_sdpa
from vllm.errors import ConfigError
from vllm.ops.attention_options import AttentionOptions


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
    ],
)
def test_slopes_of_the_paper(num_heads, exponents):
    slopes = alibi_slopes(num_heads)
    assert (slopes.shape, slopes.dtype) == ((num_heads,), torch.float32)
    torch.testing.assert_close(slopes, 2.0 ** torch.tensor(exponents))


def test_no_heads_have_no_slopes():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        alibi_slopes(0)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_heads", [4, 6])
def test_decode_continues_what_a_prompt_began(num_heads, window):
    """Two chunks of a prompt, and then its last tokens one by one, give the same as the prompt in
    one piece.
    """
    torch.manual_seed(0)
    length, slopes, options = 43, alibi_slopes(num_heads), AttentionOptions(0.25, window)
    query = torch.randn(1, length, num_heads, 16)
    key, value = torch.randn(2, 1, length, 2, 16)
    tables = np.array([[3, 1, 2]])

    age = torch.arange(length)[:, None] - torch.arange(length)
    heads = [x[0].repeat_interleave(num_heads // 2, 1) for x in (key, value)]
    scores = torch.einsum("qhd,khd->hqk", query[0], heads[0]) * 0.25
    scores -= slopes[:, None, None] * age
    scores[:, (age < 0) | (age >= (window or length))] = float("-inf")
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), heads[1])

    caches = [torch.full((4 * 16, 2, 16), unused) for unused in UNUSED]
    outputs = []
    for start, stop in ((0, 20), (20, 39)):
        part = slice(start, stop)
        launch = build_prefill_metadata(tables, [start], [stop - start], 1, stop - start, 2, 16)
        metadata = launch.to("cpu")
        mask = prefill_mask(metadata, 16, options, slopes)
        new = (query[:, part], key[:, part], value[:, part])
        blocks = derive_prefill_blocks(metadata, 16)
        outputs.append(prefill_attention(*new, *caches, blocks, mask, 0.25)[0])
    for position in range(39, length):
        metadata = build_decode_metadata(tables, [position + 1], 1, 4, 16).to("cpu")
        blocks = derive_decode_blocks(metadata, 16, torch.float32, options)
        new = (query[:, position], key[:, position], value[:, position])
        outputs.append(decode_attention(*new, *caches, blocks, options, alibi_slopes=slopes))
    torch.testing.assert_close(torch.cat(outputs), want, rtol=1e-5, atol=1e-5)


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("is_merged", [False, True])
@loop_over("window", [None, 9])
@loop_over("soft_cap", [None, 0.6])
@loop_over("slopes", [None, alibi_slopes(6)])
def test_padded_launches_of_a_layer_are_the_prompt_in_one_piece(
    slopes, soft_cap, window, is_merged, dtype
):
    torch.manual_seed(0)
    length, tables = 43, np.array([[3, 1, 2]])
    options = AttentionOptions(sliding_window=window, logits_soft_cap=soft_cap)
    layer = Attention(6, 16, 2, options, alibi_slopes=slopes)
    query, key, value = torch.randn(length, 10, 16).to(dtype).split([6, 2, 2], dim=1)
    want = layer(query.float(), key.float(), value.float())
    layer.bind_kv_cache(*(torch.full((4 * 16, 2, 16), unused, dtype=dtype) for unused in UNUSED))
    kinds = layer_kinds([layer])

    def launch(start: int, stop: int):
        if stop - start == 1:
            decode = build_decode_metadata(tables, [stop], 1, 4, 16).to("cpu")
            return PaddedDecode.derive(decode, kinds, 16, dtype)
        sizes = (tables, [start], [stop - start], 1, stop - start, 2, 16)
        if is_merged:
            merged = build_merged_prefill_metadata(*sizes).to("cpu")
            return PaddedPrefill.derive_merged(merged, kinds, 16, torch_sdpa)
        prefill = build_prefill_metadata(*sizes).to("cpu")
        return PaddedPrefill.derive(prefill, kinds, 16, torch_sdpa)

    outputs = []
    for start, stop in ((0, 20), (20, 39), *((i, i + 1) for i in range(39, length))):
        part = slice(start, stop)
        with layer.launch.running(LaunchContext(launch(start, stop), torch.arange(start, stop))):
            outputs.append(layer(query[part], key[part], value[part]))
    atol = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(torch.cat(outputs).float(), want, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": nn.Parameter(torch.tensor([-3.0, 0, 1, 2, 5, 300])), "sliding_window": 9},
        {"chunk_size": 12},
        {"chunk_size": 12, "sliding_window": 7},
    ],
    ids=["sinks", "chunks", "chunks and a window"],
)
@pytest.mark.parametrize("kind", ["rows", "merged", "two queries"])
def test_sinks_and_chunks_are_those_of_the_prompt_in_one_piece(options, kind):
    torch.manual_seed(0)
    static, tensors = split_options(options)
    tables, layer = np.array([[3, 1, 2]]), Attention(6, 16, 2, static, **tensors)
    query, key, value = torch.randn(43, 10, 16).split([6, 2, 2], dim=1)
    want = layer(query, key, value)
    layer.bind_kv_cache(*(torch.full((4 * 16, 2, 16), unused) for unused in UNUSED))
    kinds, num_new = layer_kinds([layer]), 2 if kind == "two queries" else 1
    outputs = []
    for start, stop in ((0, 20), (20, 37), *((i, i + num_new) for i in range(37, 43, num_new))):
        sizes = (tables, [start], [stop - start], 1, stop - start, 2, 16)
        positions = torch.arange(start, stop, dtype=torch.int32)
        if stop - start <= 2:
            lens = {"query_lens": np.array([num_new]), "padded_query_len": num_new}
            decode = build_decode_metadata(tables, [stop], 1, 4, 16, **lens).to("cpu")
            launch = PaddedDecode.derive(decode, kinds, 16, torch.float32, indices=positions[None])
        elif kind == "merged":
            merged = build_merged_prefill_metadata(*sizes).to("cpu")
            launch = PaddedPrefill.derive_merged(merged, kinds, 16, torch_sdpa)
        else:
            prefill = build_prefill_metadata(*sizes).to("cpu")
            launch = PaddedPrefill.derive(prefill, kinds, 16, torch_sdpa)
        part = slice(start, stop)
        with layer.launch.running(LaunchContext(launch, positions)):
            outputs.append(layer(query[part], key[part], value[part]))
    torch.testing.assert_close(torch.cat(outputs), want, rtol=1e-5, atol=1e-5)


def test_layers_with_slopes_of_their_own_are_refused():
    layers = [Attention(4, 16, 4, alibi_slopes=alibi_slopes(4) * factor) for factor in (1, 2)]
    assert list(layer_kinds(layers[:1])) == [((None, None), False, True, False)]
    with pytest.raises(ConfigError, match=r"different ALiBi slopes.*run it on cpu"):
        layer_kinds(layers)


def test_random_caches_of_alibi_rows_do_not_see_each_other():
    """A request gives the same result in a batch of its own and in a batch with others."""
    torch.manual_seed(0)
    cache, slopes = random_cache([40, 7, 130]), alibi_slopes(4)
    query, new = torch.randn(3, 4, 16), torch.randn(2, 3, 2, 16)

    def decode(rows: slice) -> torch.Tensor:
        lengths = cache.seq_lens[rows]
        metadata = build_decode_metadata(cache.tables[rows], lengths, len(lengths), 16, 16)
        metadata = metadata.to("cpu")
        blocks = derive_decode_blocks(metadata, 16, torch.float32)
        caches = [x.clone() for x in cache.flat]
        return decode_attention(
            query[rows], *new[:, rows], *caches, blocks, AttentionOptions(0.25), alibi_slopes=slopes
        )

    together = decode(slice(0, 3))
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], decode(slice(row, row + 1)))
