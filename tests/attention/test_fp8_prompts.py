"""Test prompt attention in FP8 on the simulated card against float32 on the host."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from gaudi_sim.bridge import SimBridge
from tests.attention.launches import random_cache
from tests.hpu import needs_simulated_device
from vllm.attention import Attention
from vllm.attention.backends.hpu_metadata import build_prefill_metadata
from vllm.attention.backends.padded import PaddedPrefill, fit_kernel, layer_kinds
from vllm.attention.backends.sdpa import bridge_sdpa, naive_sdpa
from vllm.config.hpu import UNSLICED, PromptSlicing
from vllm.ops import get_ops, set_ops
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.native.operators import NativeOps

pytestmark = needs_simulated_device

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, FP8 = 4, 2, 64, 16, torch.float8_e4m3fn
LENS, QUERY_LEN = np.array([128, 65], np.int32), 128
SCALES = {"query": 2**-4, "key": 2**-5, "value": 2**-5, "weights": 2**-4}
SLICED = PromptSlicing(100, 48)


@pytest.fixture(autouse=True)
def ops():
    before = get_ops()
    yield
    set_ops(before)


def attend(device: str, kernel, context: int, cached: torch.dtype, is_measured=True, **options):
    """Return the result of a prefill for the real tokens, in float32."""
    torch.manual_seed(0)
    contexts = np.full(len(LENS), context, np.int32)
    cache = random_cache((contexts + LENS).tolist(), KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    keys, values = (x.nan_to_num(0).clamp(-6, 6) for x in cache.flat)
    layer = Attention(HEADS, HEAD_SIZE, KV_HEADS, AttentionOptions(**options))
    layer.set_cache_scales(SCALES["key"], SCALES["value"])
    layer.measured_scales = (SCALES["query"], SCALES["weights"]) if is_measured else None
    if cached == FP8:
        keys, values = keys / SCALES["key"], values / SCALES["value"]
    layer.bind_kv_cache(*(x.to(cached).to(device) for x in (keys, values)))
    sizes = (len(LENS), QUERY_LEN, -(-context // BLOCK_SIZE), BLOCK_SIZE)
    metadata = build_prefill_metadata(cache.tables, contexts, LENS, *sizes).to(device)
    kinds = layer_kinds([layer])
    launch = PaddedPrefill.derive(metadata, kinds, BLOCK_SIZE, fit_kernel(kernel, kinds))
    query = torch.randn(len(LENS) * QUERY_LEN, HEADS, HEAD_SIZE) * 2
    key, value = torch.randn(2, len(LENS) * QUERY_LEN, KV_HEADS, HEAD_SIZE)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    out = launch.attend(layer, *(x.to(dtype).to(device) for x in (query, key, value)))
    assert out.dtype == dtype
    return out.cpu().float()[(np.arange(QUERY_LEN) < LENS[:, None]).ravel()]


def on_card(context: int, slicing=UNSLICED, wants_fp8=True, **options) -> tuple[Tensor, list]:
    """Return the same result on the card, and the dtype of the inputs of the kernels."""
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    set_ops(HPUOps(bridge))
    kernel = bridge_sdpa(bridge.kernels, slicing, wants_fp8=wants_fp8)
    kernels, given = bridge.kernels, []

    def spy(call, *args, **more):
        given.append({x.dtype for x in args if isinstance(x, Tensor) and x.dim() == 4})
        return call(*args, **more)

    for name in ("sdpa", "fp8_sdpa"):
        setattr(kernels, name, partial(spy, getattr(kernels, name)))
    out = attend("hpu", kernel, context, FP8, **options)
    assert bridge.counters().cpu_fallbacks == {}
    return out, given


@pytest.mark.parametrize("slicing", [UNSLICED, SLICED], ids=["whole", "sliced"])
@pytest.mark.parametrize("context", [0, 70])
def test_the_result_is_within_the_error_of_fp8(context, slicing):
    set_ops(NativeOps())
    want = attend("cpu", naive_sdpa, context, torch.float32)
    plain, given = on_card(context, slicing, wants_fp8=False)
    assert all(FP8 not in types for types in given)
    got, given = on_card(context, slicing)
    assert all(FP8 in types and torch.bfloat16 not in types for types in given)
    assert len(given) == (3 if slicing is SLICED and context else 1)
    errors = [float((x - want).norm() / want.norm()) for x in (plain, got)]
    assert errors[0] < errors[1] < 0.08, errors


@pytest.mark.parametrize(
    "options", [{"is_measured": False}, {"sliding_window": 40}, {"logits_soft_cap": 3.0}], ids=str
)
def test_other_layers_stay_in_bfloat16(options):
    _, given = on_card(0, **options)
    assert all(FP8 not in types for types in given)


def test_scales_of_single_heads_and_other_caches_stay_in_bfloat16():
    for dtype, scales in ((torch.float8_e5m2, 0.5), (FP8, torch.tensor([0.5, 0.25]))):
        layer = Attention(HEADS, HEAD_SIZE, KV_HEADS)
        layer.measured_scales = (0.5, 0.5)
        layer.set_cache_scales(scales, scales)
        layer.bind_kv_cache(*torch.zeros(2, 32, KV_HEADS, HEAD_SIZE).to(dtype))
        assert layer.prompt_scales is None


def test_the_kernel_is_asked_for_only_where_it_is_wanted():
    asked = []
    kernels = SimpleNamespace(has=lambda name: asked.append(name) or True)
    assert not bridge_sdpa(kernels).has_fp8
    assert bridge_sdpa(kernels, wants_fp8=True).has_fp8
    assert asked == ["FusedSDPA", "FusedSDPA", "fp8_fused_sdpa"]
