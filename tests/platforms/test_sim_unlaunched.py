"""Test the compile-only mode of the simulated card: everything is counted, nothing is computed."""

from contextlib import nullcontext

import psutil
import pytest
import torch
from torch import nn

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.card import SimulationError
from gaudi_sim.vendor.graphs import HPUGraph
from gaudi_sim.vendor.graphs import graph as capture

GIB = 2**30
MODES = [
    pytest.param({"is_lazy": True}, id="lazy"),
    pytest.param({"is_lazy": False}, id="eager"),
    pytest.param({"is_lazy": True, "is_strict": True}, id="strict"),
]
E4M3 = torch.float8_e4m3fn
OPERATORS = [
    lambda x, i: x + 1,
    lambda x, i: x.t() * 2,
    lambda x, i: x[:, ::2] > 0,
    lambda x, i: x @ x.t(),
    lambda x, i: x.to(torch.bfloat16),
    lambda x, i: x.t().clone(),
    lambda x, i: x.t().contiguous(),
    lambda x, i: x.index_select(0, i),
    lambda x, i: x[i],
    lambda x, i: x.sort(dim=-1, descending=True),
    lambda x, i: x.topk(3),
    lambda x, i: x.sum(0, keepdim=True),
    lambda x, i: x.softmax(-1),
    lambda x, i: torch.cat([x, x], 1),
    lambda x, i: torch.stack([x, x]),
    lambda x, i: torch.arange(5, device="hpu"),
    lambda x, i: torch.full((2, 3), 7, device="hpu"),
    lambda x, i: torch.empty_strided((2, 3), (1, 4), device="hpu"),
    lambda x, i: torch.randn(4, 5, device="hpu"),
    lambda x, i: torch.ops.hpu.rms_norm(x, x[0], 1e-6),
    lambda x, i: torch.ops.hpu.cast_to_fp8_v2(x, 2.0, False, False, E4M3, None),
    lambda x, i: nn.functional.scaled_dot_product_attention(*[x.view(1, 2, 2, 8)] * 3),
]


class Layer(nn.Module):
    """Writes rows into a cache, then reads them, sorts and reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        cache.index_copy_(0, rows, self.linear(x))
        out = cache.index_select(0, rows).mul_(2).sort(dim=-1).values
        out[:, :2] = 1
        return out.softmax(-1)


def make_layer() -> Layer:
    torch.manual_seed(5)
    return Layer().to("hpu").requires_grad_(False)


def numbers(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to("hpu")


def layouts(result: object) -> list[object]:
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return [(type(result), x.shape, x.stride(), x.dtype, x.raw.untyped_storage().nbytes())
            for x in tensors]  # fmt: skip


@pytest.fixture(params=MODES)
def mode(request):
    with torch.inference_mode():
        yield request.param


@pytest.mark.parametrize("number", range(len(OPERATORS)))
def test_results_have_the_layout_of_computed_ones(eager, number):
    run = OPERATORS[number]
    with torch.inference_mode():
        x, index = numbers(4), torch.tensor([2, 0]).to("hpu")
        computed = layouts(run(x, index))
        with eager.compile_only():
            assert layouts(run(x, index)) == layouts(run(x, index)) == computed


def test_nothing_is_computed_and_nothing_is_written(mode):
    bridge = SimBridge("gaudi2", **mode)
    x = numbers(4)
    before, out, mask = x.cpu(), torch.ones(4, 8).to("hpu"), x > 0
    with bridge.compile_only():
        assert not (x * 2 + 1).cpu().any()
        x.mul_(3)
        x[mask] = 9.0
        x[1:].zero_()
        torch.sub(x, 1, out=out)
        assert x.add_(1) is x
    assert x.cpu().equal(before)
    assert out.cpu().eq(1).all()


def test_copies_and_views_are_as_ever(mode):
    bridge = SimBridge("gaudi2", **mode)
    with bridge.compile_only():
        x = torch.arange(6.0).to("hpu")
        assert x.view(2, 3)[1].cpu().tolist() == [3, 4, 5]
        y = x + 1
        rows = y.view(2, 3)
        in_use = bridge.card.memory.in_use_bytes
        del y
    assert bridge.card.memory.in_use_bytes == in_use
    rows.add_(2)
    assert rows.cpu().eq(2).all()


def test_garbage_is_a_valid_index_count_and_mask(mode):
    bridge = SimBridge("gaudi2", **mode)
    x, outside = numbers(4), torch.tensor([9, -9]).to("hpu")
    with bridge.compile_only():
        index = (x * 100)[:, 0].long()
        assert index.sum().item() == 0
        assert x.index_select(0, outside).shape == x[outside].shape == (2, 8)
        assert x[index].shape == (4, 8)
        assert (x > 0).nonzero().shape == (0, 2)
        assert x.masked_select(x > 0).shape == (0,)
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(4x8 and 4x8\)"):
            x @ x


def test_large_results_take_no_memory_of_the_host(lazy):
    pool, before = lazy.card.memory, psutil.Process().memory_info().rss
    pool.limit_bytes = 4 * GIB
    with torch.inference_mode(), lazy.compile_only():
        x = torch.zeros(GIB, dtype=torch.uint8, device="hpu")
        y = (x + 1).view(-1, 1024).t() * 2
        assert pool.max_in_use_bytes == 3 * GIB
        with pytest.raises(RuntimeError, match=f"Allocation failed for size::{3 * GIB}"):
            torch.cat([x] * 3)
    assert psutil.Process().memory_info().rss - before < GIB // 4
    assert y.stride() == (1, 1024)


def warm_up_and_run(mode: dict[str, bool], block: str) -> tuple[object, ...]:
    """Warm up two sizes inside `block` of the bridge, then run. Return everything that can be
    compared.
    """
    bridge = SimBridge("gaudi2", **mode)
    layer, cache, peaks = make_layer(), bridge.zeros((8, 8), torch.float32), []
    wrapped = bridge.wrap_in_hpu_graph(layer) if bridge.is_lazy else layer
    for rows in (4, 2, 4):
        x = numbers(rows)
        bridge.reset_peak()
        with getattr(bridge, block)():
            wrapped(x, cache).cpu()
            x.int().topk(1)[0].sum().item()
        peaks.append(bridge.peak_bytes())
    cache.zero_()
    x = numbers(4, seed=7)
    bridge.mark_step()
    computed_s, warm = bridge.card.clock.compute_s, bridge.counters()
    with bridge.warmed_section():
        out = wrapped(x, cache)
    counted = warm, bridge.counters(), bridge.card.memory.stats()
    return (peaks, counted, out.cpu().tolist(), cache.cpu().tolist()), computed_s


@pytest.fixture
def computed(mode, monkeypatch):
    """Return the results of a warm-up that computes."""
    monkeypatch.setattr(SimBridge, "computed", lambda bridge: nullcontext(), raising=False)
    return warm_up_and_run(mode, "computed")


def test_counts_peaks_and_times_of_a_dry_run_are_those_of_a_computed_warm_up(mode, computed):
    assert computed[0][1][0].cpu_fallbacks == {"aten::topk": 3}
    assert warm_up_and_run(mode, "dry_run") == computed


def test_a_graph_that_was_not_recorded_is_not_replayed_with_values():
    bridge = SimBridge("gaudi2", is_lazy=True, records_graphs=False)
    layer = bridge.wrap_in_hpu_graph(nn.ReLU())
    x = numbers(4)
    with bridge.dry_run():
        layer(x)
        layer(x)
    with pytest.raises(SimulationError, match="cannot be replayed, because its operators"):
        layer(x)


def test_compile_only_compiles_the_same_recipes_and_launches_none(mode, computed):
    (_, counted, *results), seconds = computed
    (_, found, *its_results), its_seconds = warm_up_and_run(mode, "compile_only")
    assert its_results == results
    warm, launched = found[0], counted[0]
    assert (warm.compilations, warm.compile_s) == (launched.compilations, launched.compile_s)
    assert found[1].compilations == warm.compilations
    assert warm.launches < launched.launches and its_seconds < seconds


def test_what_a_recipe_drops_stays_in_use_as_workspace_and_serves_the_next(lazy):
    x = numbers(64)
    lazy.synchronize()
    resident = lazy.card.memory.in_use_bytes

    def launch() -> int:
        total = ((x + 1) * 2).exp().sum()
        lazy.reset_peak()
        return total.nbytes

    with lazy.compile_only():
        launch()
    assert lazy.card.memory.workspace_bytes == 0
    for _ in range(2):
        launch()
        assert x.nbytes <= lazy.card.memory.workspace_bytes <= 3 * x.nbytes
        in_use = lazy.card.memory.in_use_bytes
        assert in_use == resident + lazy.card.memory.workspace_bytes
    kept = in_use - resident
    assert lazy.memory_info().free_bytes == lazy.memory_info().total_bytes - in_use
    with pytest.raises(MemoryError):
        lazy.zeros((lazy.memory_info().free_bytes + kept,), torch.uint8)


def test_a_replay_computes_nothing_either(lazy):
    with torch.inference_mode():
        layer, cache = lazy.wrap_in_hpu_graph(make_layer()), torch.zeros(8, 8, device="hpu")
        before = layer(numbers(4), cache).cpu()
        with lazy.compile_only():
            assert layer(numbers(4, seed=1), cache).cpu().equal(before)
        assert lazy.counters().graph_replays == 1
        assert not layer(numbers(4, seed=1), cache).cpu().equal(before)


def test_a_graph_captured_by_hand_replays_on_real_data(lazy):
    x, graph = torch.zeros(2, 8, device="hpu"), HPUGraph()
    with lazy.compile_only():
        with capture(graph):
            y = x.view(16) * 2 + 1
        graph.replay()
    assert not y.cpu().any()
    x.fill_(3)
    graph.replay()
    assert y.cpu().eq(7).all()


def test_a_function_compiled_in_this_mode_computes_afterwards(eager):
    torch._dynamo.reset()
    layer = make_layer()
    compiled = torch.compile(layer, backend="hpu_backend", fullgraph=True, dynamic=False)
    caches = [torch.zeros(8, 8, device="hpu") for _ in range(2)]
    with torch.inference_mode():
        with eager.compile_only():
            assert not compiled(numbers(4), caches[0]).cpu().any()
        assert not caches[0].cpu().any()
        compilations = eager.counters().compilations
        with eager.warmed_section():
            out = compiled(numbers(4), caches[0])
        assert eager.counters().compilations == compilations
        assert out.cpu().equal(layer(numbers(4), caches[1]).cpu())
    assert caches[0].cpu().equal(caches[1].cpu())
