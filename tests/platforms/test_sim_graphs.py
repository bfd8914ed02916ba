"""Test HPU graphs of the simulated card."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.card import SimulationError
from gaudi_sim.graphs.graphs import CapturedGraph, input_hash


class Layer(nn.Module):
    """Writes its input into a cache and returns something computed from both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.extra = 0.0
        self.num_calls = 0

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        self.num_calls += 1
        out = self.linear(x) + self.extra
        if cache is not None:
            cache.index_copy_(0, torch.arange(x.shape[0], device=x.device), x)
            out = out + cache.sum()
        return out


@pytest.fixture
def layer(lazy):
    with torch.inference_mode():
        yield Layer().to("hpu")


def filled(value: float, rows: int = 2) -> torch.Tensor:
    return torch.full((rows, 4), float(value)).to("hpu")


def test_a_replay_computes_on_the_new_input_without_running_python(lazy, layer):
    expected = [layer(filled(i)).cpu() for i in range(3)]
    layer.num_calls = 0
    wrapped = lazy.wrap_in_hpu_graph(layer)
    for i in range(3):
        assert wrapped(filled(i)).cpu().equal(expected[i])
    assert layer.num_calls == 1
    counters = lazy.counters()
    assert (counters.graph_captures, counters.graph_replays) == (1, 2)


def test_outputs_are_static_and_overwritten(lazy, layer):
    wrapped = lazy.wrap_in_hpu_graph(layer)
    first = wrapped(filled(1))
    before = first.cpu()
    second = wrapped(filled(2))
    assert second is first and not first.cpu().equal(before)


def test_each_shape_is_a_graph_and_each_number_too(lazy, layer):
    wrapped = lazy.wrap_in_hpu_graph(layer)
    for rows in (2, 3, 2, 3):
        wrapped(filled(1, rows))
    assert lazy.counters().graph_captures == 2
    assert input_hash(((filled(1),), {"n": 2})) != input_hash(((filled(1),), {"n": 3}))
    assert input_hash((filled(1),)) != input_hash((filled(1).bfloat16(),))
    assert input_hash((filled(1),)) == input_hash((filled(2),))


def test_a_warmup_call_does_not_replay(lazy, layer):
    wrapped = lazy.wrap_in_hpu_graph(layer)
    first = wrapped(filled(1), warmup_mode=True).cpu()
    # nothing ran: the tensor still has the output of the first call
    assert wrapped(filled(2), warmup_mode=True).cpu().equal(first)
    assert lazy.counters().graph_replays == 0


def test_writes_to_a_cache_reach_the_cache_that_is_passed(lazy, layer):
    wrapped = lazy.wrap_in_hpu_graph(layer)
    caches = [torch.zeros(3, 4, device="hpu") for _ in range(2)]
    wrapped(filled(1), caches[0])
    out = wrapped(filled(2), caches[1]).cpu()
    assert [cache.cpu().sum().item() for cache in caches] == [8, 16]
    layer.clear_cache()
    assert wrapped(filled(2), torch.zeros(3, 4, device="hpu")).cpu().equal(out)


def test_an_attribute_is_baked_in_but_weights_changed_in_place_are_seen(lazy, layer):
    wrapped = lazy.wrap_in_hpu_graph(layer)
    before = wrapped(filled(1)).cpu()
    layer.extra = 100.0
    assert wrapped(filled(1)).cpu().equal(before)
    layer.linear.weight.zero_()
    layer.linear.bias.zero_()
    assert not wrapped(filled(1)).cpu().any()


def test_a_captured_graph_refuses_another_shape_or_type(lazy, layer):
    graph = CapturedGraph(lazy.card, layer.forward, (filled(1),), {})
    graph.replay(filled(2))
    with pytest.raises(RuntimeError, match=r"captured for .*\(2, 4\).* cannot run .*\(3, 4\)"):
        graph.replay(filled(1, rows=3))
    with pytest.raises(RuntimeError, match="bfloat16"):
        graph.replay(filled(1).bfloat16())


def test_a_graph_holds_memory_until_it_is_cleared(lazy, layer):
    x = filled(1)
    pool = lazy.card.memory
    before = pool.in_use_bytes - pool.workspace_bytes
    wrapped = lazy.wrap_in_hpu_graph(layer)
    wrapped(x)
    assert pool.in_use_bytes - pool.workspace_bytes > before
    wrapped.clear_cache()
    assert pool.in_use_bytes - pool.workspace_bytes == before
    graph = CapturedGraph(lazy.card, lambda y: y + 1, (x,), {})
    assert graph.num_bytes == pool.in_use_bytes - pool.workspace_bytes - before


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense is not possible during hpu graph"),
        (lambda x: x.cpu(), "a copy to the host is not possible"),
        (lambda x: x.nonzero(), "aten::nonzero is not possible"),
        (lambda x: x.int().topk(1), "cpu fallback is not supported during hpu graph capturing"),
        (lambda x: torch.hpu.synchronize(), "synchronize is not possible"),
    ],
)
def test_a_capture_refuses_what_needs_the_host(lazy, layer, run, reason):
    layer.linear.forward = run
    wrapped = lazy.wrap_in_hpu_graph(layer)
    with pytest.raises(SimulationError, match=reason):
        wrapped(filled(1))
    assert lazy.counters().graph_captures == 0
    del layer.linear.forward
    wrapped(filled(1))  # the failed capture has no effect on later ones
    assert lazy.counters().graph_captures == 1


def test_a_capture_cannot_begin_inside_another(lazy, layer):
    inner = lazy.wrap_in_hpu_graph(Layer().to("hpu"))
    layer.linear.forward = inner.forward
    with pytest.raises(SimulationError, match="inside another"):
        lazy.wrap_in_hpu_graph(layer)(filled(1))


def test_a_step_inside_a_capture_splits_the_graph(lazy, layer):
    def two_steps(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        lazy.mark_step()
        return y + 1

    layer.forward = two_steps
    wrapped = lazy.wrap_in_hpu_graph(layer)
    before = lazy.counters().compilations
    wrapped(filled(1))
    assert lazy.counters().compilations - before == 2
    assert wrapped(filled(2)).cpu().eq(5).all()


def test_random_numbers_differ_between_replays(lazy, layer):
    layer.forward = lambda x: torch.empty_like(x).exponential_()
    wrapped = lazy.wrap_in_hpu_graph(layer)
    assert not wrapped(filled(1)).cpu().equal(wrapped(filled(1)).cpu())


def test_host_data_inside_a_capture_stays_that_of_the_capture(lazy, layer):
    host = torch.ones(2, 4)
    layer.forward = lambda x: x + host.to("hpu")
    wrapped = lazy.wrap_in_hpu_graph(layer)
    wrapped(filled(1))
    host = torch.full((2, 4), 9.0)
    assert wrapped(filled(2)).cpu().eq(3).all()


def test_strict_lets_a_known_graph_run_and_refuses_a_new_one(strict):
    with torch.inference_mode():
        wrapped = strict.wrap_in_hpu_graph(Layer().to("hpu"))
        wrapped(filled(1))
        with strict.warmed_section():
            wrapped(filled(2))
        with (
            pytest.raises(SimulationError, match="graph capture inside a warmed section"),
            strict.warmed_section(),
        ):
            wrapped(filled(1, rows=3))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (1, True, r"would replay the graph of .*\('int', 1\).* for .*\('bool', True\)"),
        (2, 2.0, "would replay"),
        (-1, -2, "would replay"),
        (
            lambda: filled(1).bfloat16(),
            lambda: filled(1).half(),
            "must differ in more than a dtype",
        ),
    ],
)
def test_strict_refuses_inputs_that_a_card_confuses(strict, first, second, reason):
    class Fill(nn.Module):
        def forward(self, x: torch.Tensor, value: object) -> torch.Tensor:
            return x * 2

    wrapped = strict.wrap_in_hpu_graph(Fill())
    values = [value() if callable(value) else value for value in (first, first, second)]
    with pytest.raises(SimulationError, match=reason):
        for value in values:
            wrapped(filled(1), value)
    assert (strict.counters().graph_captures, strict.counters().graph_replays) == (1, 1)


def test_dataclasses_and_named_inputs_are_told_apart_by_their_fields():
    @dataclass
    class Metadata:
        length: int

    assert input_hash(Metadata(1)) == input_hash(Metadata(1)) != input_hash(Metadata(2))
    assert input_hash({"a": 1, "b": 2}) != input_hash({"b": 2, "a": 1})
    assert input_hash((None, [1])) == input_hash([None, (1,)])


def test_with_the_tensor_cache_a_graph_keeps_all_that_it_makes():
    held = []
    for keeps in (False, True):
        bridge = SimBridge("gaudi2", is_lazy=True, keeps_graph_tensors=keeps)
        with torch.inference_mode():
            x, layer = filled(1, rows=1000), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))
            wrapped = bridge.wrap_in_hpu_graph(layer.to("hpu"))
            before = bridge.memory_info().free_bytes
            kept = wrapped(x)
            held.append(before - bridge.memory_info().free_bytes)
        assert kept.shape == (1000, 1)
    inputs, middle = 1000 * 4 * 4, 1000 * 64 * 4
    assert held[1] - held[0] >= inputs + middle
