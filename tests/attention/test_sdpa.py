"""Test every attention kernel against the naive one."""

import sys

import pytest
import torch
from torch import Tensor, nn

from gaudi_sim.bridge import SimBridge
from tests.loops import loop_over
from vllm.attention.backends.sdpa import (
    FusedSDPA,
    PromptInputs,
    bridge_sdpa,
    flex_sdpa,
    naive_sdpa,
    require_flex,
    torch_sdpa,
)
from vllm.errors import ConfigError

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}
UNCOMPILED_FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
VALID_LENS = torch.tensor([20, 7, 0], dtype=torch.int32)
SEEN = torch.rand(3, 1, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.5
SEEN |= torch.eye(20, dtype=torch.bool)
SEEN_BY_HEAD = SEEN.expand(3, 4, 20, 20) & ~(torch.arange(20) % 4 == torch.arange(4)[:, None, None])
SEEN_BY_HEAD |= torch.eye(20, dtype=torch.bool)
BIAS = torch.arange(20) * torch.tensor([0.5, 0.1, -0.1, 0])[:, None, None]  # [H, 1, K]
MASKS = {
    "causal": (None, None),
    "lengths": (None, VALID_LENS),
    "bool": (SEEN, None),
    "bool of each head": (SEEN_BY_HEAD, None),
    "added": (torch.where(SEEN, BIAS, -torch.inf), None),
}


def operands(num_kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, heads, 20, 16).to(dtype) for heads in (4, num_kv_heads, num_kv_heads)]


@loop_over("masking", MASKS)
@loop_over("dtype", TOLERANCES)
@loop_over("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["torch", "flex", "bridge"])
@UNCOMPILED_FLEX
def test_agrees_with_the_naive_kernel(name, num_kv_heads, dtype, masking):
    qkv, (mask, lens) = operands(num_kv_heads, dtype), MASKS[masking]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    want = naive_sdpa(PromptInputs(*qkv, mask, 0.3, lens))
    if name == "bridge":
        kernel = bridge_sdpa(SimBridge("gaudi2", is_lazy=True).kernels)
        qkv, mask, lens = (
            [x.to("hpu") for x in qkv],
            *(x if x is None else x.to("hpu") for x in (mask, lens)),
        )
    else:
        kernel = {"torch": torch_sdpa, "flex": flex_sdpa}[name]
    got = kernel(PromptInputs(*qkv, mask, 0.3, lens)).cpu()
    assert got.isfinite().all(), "padding is finite"
    assert got.dtype == dtype
    if lens is not None:
        is_real = (torch.arange(20) < VALID_LENS[:, None])[:, None, :, None]
        got, want = got * is_real, want * is_real
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


@pytest.mark.parametrize(("dtype", "mode"), [(torch.float32, "None"), (torch.bfloat16, "fast")])
@pytest.mark.parametrize("masking", ["causal", "lengths", "bool"])
def test_the_fused_kernel_is_called_by_its_rules(masking, dtype, mode):
    calls = []

    class Recorded:
        def sdpa(self, query, key, value, attn_mask=None, **options):
            calls.append((attn_mask, options))
            return query

    qkv, (mask, lens) = operands(2, dtype), MASKS[masking]
    FusedSDPA(Recorded())(PromptInputs(*qkv, mask, 0.3, lens))
    [(attn_mask, options)] = calls
    assert attn_mask is mask
    assert options.pop("valid_seq_len", None) is lens
    assert options == {"is_causal": mask is None, "scale": 0.3, "softmax_mode": mode}


def test_a_graph_of_the_fused_kernel_serves_other_lengths():
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    kernel = bridge_sdpa(bridge.kernels)

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, lens: Tensor) -> Tensor:
            return kernel(PromptInputs(query, key, value, None, 0.3, lens))

    qkv = operands(2, torch.float32)
    with torch.inference_mode():
        graph = bridge.wrap_in_hpu_graph(Attention())
        inputs = [x.to("hpu") for x in qkv]
        graph(*inputs, VALID_LENS.to("hpu"))
        lens = torch.tensor([3, 20, 1], dtype=torch.int32)
        on_card = lens.to("hpu")
        with bridge.warmed_section():
            out = graph(*inputs, on_card)
        want = kernel(PromptInputs(*inputs, None, 0.3, on_card)).cpu()
        torch.testing.assert_close(out.cpu(), want)
    assert bridge.counters().cpu_fallbacks == {}


@UNCOMPILED_FLEX
def test_flex_runs_on_the_host_and_is_refused_where_it_does_not(monkeypatch):
    require_flex(torch.device("cpu"))
    SimBridge("gaudi2")
    for device in ("hpu", "meta"):
        with pytest.raises(ConfigError, match=f"does not run on device '{device}'; unset VLLM_PRO"):
            require_flex(torch.device(device))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    with pytest.raises(ConfigError, match="does not run on device 'cpu'"):
        require_flex(torch.device("cpu"))
