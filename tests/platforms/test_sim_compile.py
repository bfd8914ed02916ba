"""Test when the simulated card compiles, and the time that it reports for it."""

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.card import SimulationError


def on_card(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype).to("hpu")


def step(bridge: SimBridge, run) -> int:
    """Return the number of compilations of one step."""
    before = bridge.counters().compilations
    run()
    bridge.mark_step()
    return bridge.counters().compilations - before


def test_a_step_compiles_once_per_shape_type_scalar_and_order(lazy):
    a, b, half = on_card(4, 8), on_card(5, 8), on_card(4, 8, dtype=torch.bfloat16)
    assert step(lazy, lambda: a + 1) == 1
    assert step(lazy, lambda: a + 1) == 0
    assert step(lazy, lambda: b + 1) == 1
    assert step(lazy, lambda: half + 1) == 1
    assert step(lazy, lambda: a + 2) == 1  # the recipe contains the Python number
    assert step(lazy, lambda: a * 2) == 1
    assert step(lazy, lambda: (a + 2.0, a + True)) == 1
    # Numbers of other types make other recipes: 2 is not 2.0, and 1 is not True.
    assert step(lazy, lambda: (a + 2, a + 1)) == 1
    assert step(lazy, lambda: (a.view(2, 16) + 1, a)) == step(lazy, lambda: a.view(16, 2) + 1) == 1
    assert step(lazy, lambda: (a.exp(), a.sin())) == 1
    assert step(lazy, lambda: (a.sin(), a.exp())) == 1
    assert step(lazy, lambda: (b + 1, None)) == 0


def test_a_number_in_a_tensor_does_not_compile_anew(lazy):
    a, number = on_card(4), on_card(1)
    assert step(lazy, lambda: a + number) == 1
    number.fill_(3)
    lazy.mark_step()
    assert step(lazy, lambda: a + number) == 0


def test_each_offset_of_a_slice_is_another_recipe(lazy):
    a = on_card(8)
    assert [step(lazy, lambda i=i: a[i : i + 2] + 1) for i in (0, 2, 0)] == [1, 1, 0]


def test_an_empty_step_compiles_nothing(lazy):
    assert step(lazy, lambda: None) == 0


def test_reading_back_ends_the_step(lazy):
    a = on_card(4)
    (a + 1).sum().item()
    assert lazy.counters().compilations == 1
    assert step(lazy, lambda: None) == 0


def test_single_operators_of_eager_mode_are_no_compilations_of_the_metric(eager):
    a = on_card(4)
    assert step(eager, lambda: a + 1) == 0
    assert eager.card.clock.compile_s > 0


def test_torch_compile_makes_one_recipe_per_shape(eager):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()).to("hpu")
    compiled = torch.compile(module, backend="hpu_backend", dynamic=False)
    counts = []
    with torch.no_grad():
        for batch in (4, 4, 8, 8, 4):
            x = on_card(batch, 8)
            counts.append(step(eager, lambda x=x: compiled(x)))
            torch.testing.assert_close(compiled(x).cpu(), module(x).cpu())
    assert counts == [1, 0, 1, 0, 0]


def test_an_empty_tensor_can_be_an_input_of_what_is_compiled(eager):
    compiled = torch.compile(lambda x, y: x + y.shape[1], backend="hpu_backend", dynamic=False)
    assert compiled(on_card(2), on_card(2, 0)).tolist() == [1, 1]


def test_what_dynamo_traces_costs_the_card_nothing(eager):
    x = on_card(1024)
    compiled = torch.compile(lambda x: (x * 3).exp(), backend="hpu_backend", dynamic=False)
    clock, pool = eager.card.clock, eager.card.memory
    before, taken = clock.compute_s, pool.in_use_bytes
    pool.reset_peak()
    compiled(x)
    first = clock.compute_s - before
    assert 0 < pool.max_in_use_bytes - taken <= 2 * x.nbytes
    compiled(x)
    assert clock.compute_s - before == pytest.approx(2 * first)


def test_fused_kernels_are_part_of_a_compiled_graph(eager):
    def attend(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q = eager.kernels.rms_norm(q, weight, 1e-6)
        return eager.kernels.sdpa(q, q, q, is_causal=True)

    q, weight = on_card(1, 2, 4, 8), on_card(8)
    compiled = torch.compile(attend, backend="hpu_backend", dynamic=False, fullgraph=True)
    with torch.no_grad():
        assert step(eager, lambda: compiled(q, weight)) == 1
        torch.testing.assert_close(compiled(q, weight).cpu(), attend(q, weight).cpu())


def test_torch_compile_is_refused_in_lazy_mode(lazy):
    compiled = torch.compile(torch.sin, backend="hpu_backend", dynamic=False)
    with pytest.raises(RuntimeError, match="hpu_backend needs eager mode"):
        compiled(on_card(3))


def test_strict_refuses_a_compilation_in_a_warmed_section(strict):
    a, b = on_card(4), on_card(5)
    step(strict, lambda: a + 1)
    with strict.warmed_section():
        a + 1
    with (
        pytest.raises(SimulationError, match="compilation of a graph of 1 operators"),
        strict.warmed_section(),
    ):
        b + 1
    assert step(strict, lambda: a + 1) == 0


def test_the_clock_is_the_same_in_every_run():
    def run() -> tuple[float, ...]:
        bridge = SimBridge("gaudi2", is_lazy=True)
        x = on_card(64, 64)
        for _ in range(3):
            (x @ x).sum()
            bridge.mark_step()
        bridge.synchronize()
        clock = bridge.card.clock
        return clock.host_s, clock.compile_s, clock.launch_s, clock.compute_s, clock.copy_s

    assert run() == run()


def test_a_matrix_product_takes_the_time_of_its_flops():
    seconds = {}
    for model in ("gaudi2", "gaudi3"):
        bridge = SimBridge(model)
        x = bridge.zeros((1024, 1024), torch.bfloat16)
        bridge.card.clock.compute_s = 0
        x @ x
        seconds[model] = bridge.card.clock.compute_s
    assert seconds["gaudi2"] == pytest.approx(2 * 1024**3 / (0.85 * 432e12))
    assert seconds["gaudi3"] < seconds["gaudi2"]


def test_the_host_runs_ahead_until_it_waits(lazy):
    x = on_card(512, 512)
    lazy.synchronize()
    clock = lazy.card.clock
    for _ in range(100):
        x = x @ x
    lazy.mark_step()
    assert clock.device_s > clock.host_s
    lazy.synchronize()
    assert clock.device_s == clock.host_s


def test_a_copy_takes_the_time_of_its_bytes(eager):
    torch.zeros(2**20, dtype=torch.int8).to("hpu")
    assert eager.card.clock.copy_s == pytest.approx(2**20 / 32e9)


def write_through_a_view(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor):
    cache.view(-1, 8).index_copy_(0, slots, rows)
    return cache.view(-1, 8)[:2] + 1


def write_in_place(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor):
    cache.index_copy_(0, slots, rows)
    return cache.view(-1, 8)[:2] + 1


@pytest.mark.parametrize("mode", ["torch.compile", "lazy", "HPU graph"])
def test_a_write_through_a_view_is_charged_a_copy_of_the_whole_tensor(mode):
    """A write to the tensor itself costs no copy, so its cost does not depend on the size of the
    cache.
    """
    bridge = SimBridge("gaudi2", is_lazy=mode != "torch.compile")
    slots, rows = torch.tensor([3, 1]).to("hpu"), on_card(2, 8)
    copies, peaks, outputs = [], [], []
    for function in (write_in_place, write_through_a_view):
        run = function
        if mode == "torch.compile":
            run = torch.compile(function, backend="hpu_backend", dynamic=False, fullgraph=True)
        elif mode == "HPU graph":
            module = torch.nn.Module()
            module.forward = function
            run = bridge.wrap_in_hpu_graph(module)
        with torch.inference_mode():
            shape = (4096, 8) if function is write_in_place else (1024, 4, 8)
            cache = bridge.zeros(shape, torch.float32)
            bridge.reset_peak()
            taken = bridge.peak_bytes()
            run(cache, slots, rows)
            before = bridge.counters()
            run(cache, slots, rows)
            bridge.mark_step()
            after = bridge.counters()
            outputs.append((cache.cpu().view(-1, 8)[:4], run(cache, slots, rows).cpu()))
        peaks.append(bridge.peak_bytes() - taken >= cache.nbytes)
        copies.append(
            (after.cache_copies - before.cache_copies, after.copied_bytes - before.copied_bytes)
        )
    assert copies == [(0, 0), (1, cache.nbytes)]
    assert peaks == [False, True]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert outputs[0][0].sum().item() == 16


def test_values_read_before_a_write_in_place_are_the_old_ones(eager):
    @torch.compile(backend="hpu_backend", dynamic=False)
    def run(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        old = cache + 0
        cache.index_copy_(0, slots, rows)
        return old.sum() + cache.sum()

    cache = eager.zeros((4, 2), torch.float32)
    with torch.inference_mode():
        total = run(cache, torch.tensor([1]).to("hpu"), on_card(1, 2))
    assert total.item() == 2
    assert eager.counters().cache_copies == 0


def test_dynamic_shapes_are_compiled_statically_for_each_shape(eager):
    compiled = torch.compile(lambda x: x * x.shape[0], backend="hpu_backend", dynamic=True)
    for size in (3, 4, 5, 4):
        assert compiled(on_card(size)).tolist() == [size] * size
    assert eager.counters().compilations == 3
