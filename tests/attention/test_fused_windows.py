"""Test sliding windows and sinks of prompts on the simulated card against plain matmuls. No mask is
made if the kernel supports windows.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from gaudi_sim.bridge import SimBridge
from tests.attention.launches import random_cache
from tests.hpu import needs_simulated_device
from vllm.attention.backends import padded
from vllm.attention.backends.hpu_metadata import build_prefill_metadata
from vllm.attention.backends.metadata import AttentionLayer
from vllm.attention.backends.padded import PaddedPrefill, fit_kernel, layer_kinds
from vllm.attention.backends.sdpa import FusedSDPA, SDPAKernel, bridge_sdpa, naive_sdpa
from vllm.ops.attention_options import AttentionOptions
from vllm.platforms.habana.trials import TRIALS

pytestmark = needs_simulated_device

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, SCALE = 4, 2, 16, 16, 0.25
QUERY_LENS = np.array([256, 130, 3], np.int32)
WINDOW, SINKS = 40, torch.tensor([2.0, -1.0, 0.5, 4.0])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Layer:
    """The attributes of an attention layer that the forward pass reads."""

    def __init__(self, cache, device: str, window: int | None, sinks: Tensor | None) -> None:
        self.key_cache, self.value_cache = (x.to(device) for x in cache.flat)
        self.options = AttentionOptions(SCALE, window)
        self.sinks = None if sinks is None else sinks.to(device)
        self.alibi_slopes = self.cache_scales = self.prompt_scales = None


def attend(
    kernel: SDPAKernel,
    device: str,
    window: int | None,
    sinks: Tensor | None,
    context: int = 0,
    query_len: int = 256,
) -> tuple[PaddedPrefill, Tensor]:
    """Return the forward pass, and its result for the real tokens in float32."""
    torch.manual_seed(0)
    lens = np.minimum(QUERY_LENS, query_len)
    contexts = np.full(len(lens), context, np.int32)
    cache = random_cache((contexts + lens).tolist(), KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    layer: AttentionLayer = Layer(cache, device, window, sinks)
    metadata = build_prefill_metadata(
        *(cache.tables, contexts, lens, len(lens), query_len, -(-context // BLOCK_SIZE)),
        BLOCK_SIZE,
    ).to(device)
    kinds = layer_kinds([layer])
    launch = PaddedPrefill.derive(metadata, kinds, BLOCK_SIZE, fit_kernel(kernel, kinds))
    tokens = len(lens) * query_len
    query = torch.randn(tokens, HEADS, HEAD_SIZE) * 2
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_SIZE)
    out = launch.attend(layer, *(x.to(device) for x in (query, key, value))).cpu().float()
    rows = out.unflatten(0, (len(lens), query_len))
    return launch, torch.cat([row[:n] for row, n in zip(rows, lens.tolist(), strict=True)])


CASES = {
    "window": (WINDOW, None),
    "sinks": (None, SINKS),
    "window and sinks": (WINDOW, SINKS),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("context", [0, 48])
def test_they_give_what_plain_products_give(case, context, monkeypatch):
    window, sinks = CASES[case]
    _, want = attend(naive_sdpa, "cpu", window, sinks, context)
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    used = []

    def never(*args, **kwargs):
        raise AssertionError("plain products on the card")

    monkeypatch.setattr(padded, "naive_sdpa", never)
    sdpa = bridge.kernels.sdpa
    monkeypatch.setattr(
        bridge.kernels, "sdpa", lambda *a, **kw: used.append((*a[3:4], kw)) or sdpa(*a, **kw)
    )
    launch, got = attend(bridge_sdpa(bridge.kernels), "hpu", window, sinks, context)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    mask, options = used[-1]
    assert (mask is None) == (context == 0)
    assert [mask is None for mask in launch.masks.values()] == [context == 0]
    assert options.get("window") == (window if context == 0 else None)
    assert (options.get("sinks") is None) == (sinks is None)


@pytest.mark.parametrize(
    ("release", "query_len"), [((1, 21), 256), ((1, 24), 200), ((1, 22), 256)], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_what_the_kernel_does_not_know_is_masked_or_computed_plainly(case, release, query_len):
    window, sinks = CASES[case]
    _, want = attend(naive_sdpa, "cpu", window, sinks, query_len=query_len)
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True, release=release)
    launch, got = attend(bridge_sdpa(bridge.kernels), "hpu", window, sinks, query_len=query_len)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    # The kernel of 1.22 accepts windows but no sinks.
    is_taken = release == (1, 22) and sinks is None
    assert [mask is None for mask in launch.masks.values()] == [window is None or is_taken]


def test_a_model_without_them_needs_no_trial(monkeypatch):
    for name in TRIALS:
        monkeypatch.setitem(TRIALS, name, lambda *_, name=name: pytest.fail(f"{name} was tried"))
    kernels = SimBridge("gaudi2", is_lazy=True).kernels
    kernel = bridge_sdpa(kernels)
    cache = random_cache([20], KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    assert fit_kernel(kernel, layer_kinds([Layer(cache, "cpu", None, None)])) == FusedSDPA(kernels)
