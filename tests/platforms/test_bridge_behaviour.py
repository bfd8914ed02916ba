"""Test the properties of every bridge: of the simulated ones, and of the real one over a simulated
card.

The real bridge runs on the stand-in package and on the card's own `habana_frameworks`.
"""

import pytest
import torch
from torch.nn import functional

from gaudi_sim.bridge import SimBridge
from vllm.platforms.habana.real import RealBridge

MIB, GIB = 2**20, 2**30


@pytest.fixture(params=["lazy", "eager"])
def is_lazy(request):
    return request.param == "lazy"


@pytest.fixture(params=["sim", "real-on-stub", "real-on-facade"])
def bridge(request, is_lazy):
    if request.param == "real-on-stub":
        request.getfixturevalue("vendor")
    elif request.param == "real-on-facade":
        request.getfixturevalue("facade")
    simulated = SimBridge("gaudi2", is_lazy=is_lazy)
    return simulated if request.param == "sim" else RealBridge()


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator)


def test_the_device_is_the_one_card_of_the_process(bridge):
    assert bridge.device == torch.device("hpu", 0)
    assert bridge.device_name == "GAUDI2"


def test_memory_is_what_the_pool_has_left(bridge):
    info = bridge.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes
    assert 90 * GIB < info.total_bytes < 101 * GIB


def test_a_tensor_of_zeros_lives_on_the_device(bridge):
    cache = bridge.zeros((3, 5), torch.bfloat16)
    assert cache.device == bridge.device and cache.dtype == torch.bfloat16
    assert not cache.cpu().any()


def test_what_does_not_fit_is_a_memory_error(bridge):
    with pytest.raises(MemoryError, match="Allocation failed for size::"):
        bridge.zeros((2**40,), torch.int8)


def test_the_peak_is_the_largest_use_since_it_was_reset(bridge):
    kept = bridge.zeros((MIB,), torch.int8)
    bridge.zeros((2 * MIB,), torch.int8)
    assert bridge.peak_bytes() == 3 * MIB
    bridge.reset_peak()
    assert bridge.peak_bytes() == kept.nbytes


def test_steps_and_waits_stall_nothing_in_any_mode(bridge):
    before = bridge.counters()
    bridge.mark_step()
    bridge.synchronize()
    bridge.manual_seed(3)
    with bridge.warmed_section(), bridge.compile_only():
        bridge.mark_step()
    after = bridge.counters()
    assert after.host_syncs == before.host_syncs
    assert after.compilations == before.compilations


def test_a_wrapped_module_takes_the_keywords_of_a_graph(bridge):
    module = torch.nn.Linear(4, 2).to("hpu")
    if not bridge.is_lazy:
        with pytest.raises(RuntimeError, match="lazy mode"):
            bridge.wrap_in_hpu_graph(module)
        return
    with torch.inference_mode():
        x = randn(3, 4).to("hpu")
        expected = module(x).cpu()
        wrapped = bridge.wrap_in_hpu_graph(module)
        assert wrapped is module
        for flags in ({}, {"warmup_mode": True}, {"bypass_hpu_graphs": True}, {}):
            torch.testing.assert_close(wrapped(x, **flags).cpu(), expected)
    wrapped.clear_cache()


def test_compilations_and_fallbacks_are_counted(bridge):
    x = randn(3, 4).to("hpu")
    bridge.synchronize()
    before = bridge.counters()
    with bridge.compile_only():
        x.mul(2.5).int().topk(2)
        bridge.synchronize()
    after = bridge.counters()
    assert after.compilations - before.compilations == (2 if bridge.is_lazy else 0)
    assert (after.compile_s > before.compile_s) == bridge.is_lazy
    assert after.cpu_fallbacks == {"aten::topk": 1}


@pytest.mark.parametrize("is_lazy", [True])
def test_details_of_compilations_name_each_recipe(bridge, environment):
    environment(PT_HPU_METRICS_GC_DETAILS="1")
    before = bridge.counters()
    for length in (3, 4):
        randn(3, length).to("hpu").mul(2.5)
        bridge.mark_step()
    after = bridge.counters()
    recipes = after.recipes[len(before.recipes) :]
    assert len({name for name, _ in recipes}) == after.compilations - before.compilations == 2
    times = sum(micros for _, micros in recipes)
    assert times == pytest.approx((after.compile_s - before.compile_s) * 1e6, abs=2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_causal_attention_with_shared_heads(bridge, num_kv_heads):
    q, k, v = randn(2, 4, 6, 8), randn(2, num_kv_heads, 6, 8), randn(2, num_kv_heads, 6, 8)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = bridge.kernels.sdpa(q.to("hpu"), k.to("hpu"), v.to("hpu"), is_causal=True)
    torch.testing.assert_close(out.cpu(), expected)


def test_attention_to_the_valid_part_of_padded_rows(bridge):
    q, lengths = randn(2, 2, 6, 8), [4, 6]
    valid = torch.tensor(lengths, dtype=torch.int32).to("hpu")
    x = q.to("hpu")
    out = bridge.kernels.sdpa(x, x, x, is_causal=True, valid_seq_len=valid).cpu()
    for row, length in enumerate(lengths):
        part = q[row : row + 1, :, :length]
        expected = functional.scaled_dot_product_attention(part, part, part, is_causal=True)
        torch.testing.assert_close(out[row : row + 1, :, :length], expected)


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_attention_with_a_mask(bridge, kind):
    q = randn(1, 2, 5, 8)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    if kind == "added":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    expected = functional.scaled_dot_product_attention(q, q, q, mask, scale=0.25)
    x = q.to("hpu")
    out = bridge.kernels.sdpa(x, x, x, mask.to("hpu"), scale=0.25)
    torch.testing.assert_close(out.cpu(), expected)


def test_attention_refuses_what_the_kernel_cannot(bridge):
    x = randn(1, 2, 5, 8).to("hpu")
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).to("hpu")
    lengths = torch.tensor([5], dtype=torch.int32).to("hpu")
    with pytest.raises(RuntimeError, match="not supported"):
        bridge.kernels.sdpa(x, x, x, mask, is_causal=True)
    with pytest.raises(RuntimeError, match="valid_seq_len"):
        bridge.kernels.sdpa(x, x, x, valid_seq_len=lengths)


def test_rms_norm(bridge):
    x, weight = randn(2, 3, 16), randn(16)
    expected = functional.rms_norm(x, (16,), weight, 1e-5)
    out = bridge.kernels.rms_norm(x.to("hpu"), weight.to("hpu"), 1e-5)
    torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_each_pair_by_its_angle(bridge, interleaved):
    x, angles = randn(5, 2, 8), randn(5, 1, 4)
    pairs = x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles)
    turned = torch.view_as_real(turned)
    expected = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    wide = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    cos, sin = wide.cos().to("hpu"), wide.sin().to("hpu")
    out = bridge.kernels.rotary(x.to("hpu"), cos, sin, interleaved=interleaved)
    torch.testing.assert_close(out.cpu(), expected)
