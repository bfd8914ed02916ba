"""Test the simulated card as `habana_frameworks`, as other libraries see it."""

import importlib
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.card import SimulationError
from gaudi_sim.vendor import install_vendor, uninstall_vendor
from gaudi_sim.vendor.graphs import HPUGraph, graph, wrap_in_hpu_graph
from gaudi_sim.vendor.kernels import FusedSDPA, apply_rotary_pos_emb
from gaudi_sim.vendor.metrics import MetricNotFound, metric_global, metric_localcontext

NAMES = [
    "torch.core.mark_step",
    "torch.core.hpu_inference_set_env",
    "torch.core.hpu_initialize",
    "torch.hpu.Stream",
    "torch.hpu.graphs.input_hash",
    "torch.hpu.random.default_generators",
    "torch.hpu.metrics.metric_localcontext",
    "torch.utils.internal.is_lazy",
    "torch.utils.experimental._get_device_type",
]


def on_card(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).to("hpu")


def test_the_package_is_there_only_when_it_is_asked_for():
    SimBridge("gaudi2")
    assert find_spec("habana_frameworks") is None
    SimBridge("gaudi2", is_vendor=True)
    try:
        assert find_spec("habana_frameworks.torch.hpex.kernels") is not None
    finally:
        uninstall_vendor()
    assert find_spec("habana_frameworks") is None
    uninstall_vendor()  # uninstalling again does nothing


@pytest.mark.parametrize("name", NAMES)
def test_importing_the_package_brings_what_users_reach_through_it(eager, facade, name):
    found = importlib.import_module("habana_frameworks.torch")
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found is not None


def test_the_device_module_is_that_of_torch(eager, facade):
    import habana_frameworks.torch as htorch

    assert htorch.hpu is torch.hpu


def test_what_is_not_documented_is_not_there(eager, facade):
    import habana_frameworks.torch as htorch

    with pytest.raises(AttributeError):
        htorch.hpu.empty_cache()  # only torch.cuda has this function
    with pytest.raises(AttributeError):
        htorch.core.active_card  # noqa: B018  # imported there, but not public
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("habana_frameworks.torch.dynamo")


def test_an_installed_package_goes_before_the_simulation(vendor, facade):
    import habana_frameworks

    assert habana_frameworks is vendor
    importlib.import_module("habana_frameworks.torch.core")
    with pytest.raises(ModuleNotFoundError):  # the stand-in adds nothing to this package
        importlib.import_module("habana_frameworks.torch.utils.experimental")


def test_installing_twice_is_installing_once(eager, facade):
    install_vendor()
    uninstall_vendor()
    assert find_spec("habana_frameworks") is None


def test_a_quantization_library_learns_which_card_it_is(facade):
    import habana_frameworks.torch.utils.experimental as htexp

    kinds = htexp.synDeviceType
    for model, kind in [("gaudi2", kinds.synDeviceGaudi2), ("gaudi3", kinds.synDeviceGaudi3)]:
        SimBridge(model)
        assert htexp._get_device_type() is kind
    x = on_card(2)
    assert htexp._data_ptr(x) == htexp._data_ptr(x[:1]) != htexp._data_ptr(x + 1)


def test_preparing_a_model_for_inference_changes_no_result(lazy, facade):
    import habana_frameworks.torch.core as htcore

    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        expected = module(torch.ones(1, 3))
        assert htcore.hpu_inference_set_env(module) is module
        module.to("hpu")
        htcore.hpu_initialize(module, mark_only_scales_as_const=True)
        torch.testing.assert_close(module(on_card(1, 3)).cpu(), expected)
    htcore.hpu_reset_env()


def test_memory_is_asked_of_device_0_only(eager):
    x = on_card(256)
    assert torch.hpu.memory_allocated() == torch.hpu.max_memory_allocated("hpu:0") == x.nbytes
    free, total = torch.hpu.mem_get_info(torch.device("hpu"))
    assert total - free == x.nbytes and total == torch.hpu.memory_reserved(0)
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.hpu.mem_get_info(1)


def test_a_stream_is_empty_when_the_card_has_done_its_work(lazy):
    copies = torch.hpu.Stream()
    x = on_card(1024, 1024)
    lazy.synchronize()
    assert copies.query()
    for _ in range(50):
        x = x @ x
    done = copies.record_event()
    assert not copies.query() and not done.query()
    done.synchronize()
    assert copies.query() and done.query()


@pytest.mark.parametrize("name", ["graph_compilation", "cpu_fallback"])
def test_a_metric_counts_inside_its_block_and_is_read_after_it(lazy, name):
    def work(size: int) -> None:
        on_card(2, size).int().topk(1)
        torch.hpu.synchronize()

    work(1)
    with metric_localcontext(name) as metric:
        work(2)
    work(3)
    counted, overall = dict(metric.stats()), dict(metric_global(name).stats())
    assert overall["TotalNumber"] == 3 * counted["TotalNumber"] > 0
    if name == "cpu_fallback":
        assert counted["FallbackOps"] == {"aten::topk": 1}
    else:
        assert [tag for tag, _ in metric.stats()] == ["TotalNumber", "TotalTime", "AvgTime"]
        assert counted["AvgTime"] == counted["TotalTime"] // counted["TotalNumber"] > 0


def test_a_metric_goes_on_after_a_pause_and_begins_anew_after_a_reset(lazy):
    def step(size: int) -> None:
        on_card(size).exp()
        lazy.mark_step()

    metric = metric_global("graph_compilation")
    step(1)
    metric.stop()
    step(2)
    assert metric.stats()[0] == ("TotalNumber", 1)
    metric.start()
    step(3)
    assert metric_global("graph_compilation").stats()[0] == ("TotalNumber", 2)
    metric.reset()
    step(4)
    assert metric.stats()[0] == ("TotalNumber", 1)


def test_a_metric_that_does_not_exist(eager):
    assert metric_global("power") is None
    with pytest.raises(MetricNotFound), metric_localcontext("power"):
        pass


def test_a_graph_by_hand_replays_on_what_its_inputs_hold_now(lazy):
    x, weight = on_card(2, 3), on_card(3, 4)
    by_hand = HPUGraph()
    with torch.no_grad(), graph(by_hand):
        y = (x @ weight).add_(1)
        lazy.mark_step()
        rows = y[0] * 2
    for value in (2.0, 5.0):
        x.fill_(value)
        by_hand.replay()
        assert y.cpu().eq(3 * value + 1).all() and rows.cpu().eq(6 * value + 2).all()
    assert (lazy.counters().graph_captures, lazy.counters().graph_replays) == (1, 2)


def test_a_graph_by_hand_keeps_its_memory_until_it_is_reset(lazy):
    x, pool = on_card(1024), lazy.card.memory
    before = pool.in_use_bytes
    by_hand = HPUGraph()
    by_hand.capture_begin()
    x.exp().sum()
    by_hand.capture_end()
    assert pool.in_use_bytes > before + x.nbytes
    by_hand.reset()
    assert pool.in_use_bytes - pool.workspace_bytes == before
    for call in (by_hand.replay, by_hand.capture_end):
        with pytest.raises(RuntimeError, match="capture"):
            call()


def test_a_capture_by_hand_that_fails_leaves_nothing_behind(lazy):
    by_hand = HPUGraph()
    with pytest.raises(SimulationError, match="not possible during hpu graph"), graph(by_hand):
        on_card(2).exp().sum().item()
    assert not torch.hpu.is_current_stream_capturing()
    with graph(by_hand):
        assert torch.hpu.is_current_stream_capturing()


def test_signatures_beyond_the_limit_run_without_a_graph(lazy):
    wrapped = wrap_in_hpu_graph(torch.nn.ReLU(), max_graphs=1)
    for size in (1, 2, 1, 2):
        assert wrapped(on_card(size)).shape == (size,)
    assert (lazy.counters().graph_captures, lazy.counters().graph_replays) == (1, 1)


def test_graphs_are_refused_in_eager_mode(eager):
    with pytest.raises(RuntimeError, match="PT_HPU_LAZY_MODE=1"):
        wrap_in_hpu_graph(torch.nn.ReLU())


@pytest.mark.parametrize("is_lazy", [False, True])
def test_compiling_only_takes_no_time_of_the_card(is_lazy):
    bridge = SimBridge("gaudi2", is_lazy=is_lazy)
    x, clock = on_card(64, 64), bridge.card.clock
    bridge.synchronize()
    compiled_s, computed_s = clock.compile_s, clock.compute_s
    with bridge.compile_only():
        x @ x
        bridge.mark_step()
    assert clock.compile_s > compiled_s and clock.compute_s == computed_s
    compiled_s = clock.compile_s
    x @ x
    bridge.mark_step()
    assert clock.compile_s == compiled_s and clock.compute_s > computed_s


def test_a_flag_that_the_simulation_does_not_follow_is_refused(eager, facade):
    import habana_frameworks.torch.internal.bridge_config as bridge_config

    assert bridge_config.get_pt_compile_only_mode() is False
    with pytest.raises(ValueError, match="PT_HPU_PLACE_ON_CPU"):
        bridge_config.env_setting("PT_HPU_PLACE_ON_CPU", True).__enter__()


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_skips_padding_on_either_side(eager, side):
    x, lengths = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(1)), [4, 6]
    valid = torch.tensor(lengths, dtype=torch.int32).to("hpu")
    y = x.to("hpu")
    out = FusedSDPA.apply(y, y, y, None, 0.0, True, None, "None", True, valid, side).cpu()
    assert out.isfinite().all()
    for row, length in enumerate(lengths):
        kept = slice(6 - length, None) if side == "left" else slice(length)
        part = x[row, :, kept]
        expected = functional.scaled_dot_product_attention(part, part, part, is_causal=True)
        torch.testing.assert_close(out[row, :, kept], expected)


def test_attention_refuses_what_the_simulation_does_not_compute(eager):
    x = on_card(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="neither dropout"):
        FusedSDPA.apply(x, x, x, None, 0.1)


@pytest.mark.parametrize("layout", ["tokens", "batch"])
def test_rotary_takes_the_rows_of_its_positions(eager, layout):
    generator = torch.Generator().manual_seed(2)
    cos, sin = (torch.randn(10, 8, generator=generator).to("hpu") for _ in range(2))
    positions = torch.tensor([[7, 0, 3], [1, 9, 9]]).to("hpu")
    x = torch.randn(6, 2, 8, generator=generator).to("hpu")
    rows = positions.flatten()
    expected = apply_rotary_pos_emb(x, cos[rows][:, None], sin[rows][:, None])
    if layout == "tokens":
        out = apply_rotary_pos_emb(x, cos, sin, rows)
    else:
        heads_first = x.view(2, 3, 2, 8).transpose(1, 2)
        tables = (table[None, None] for table in (cos, sin))
        out = apply_rotary_pos_emb(heads_first, *tables, positions).transpose(1, 2)
    torch.testing.assert_close(out.cpu().reshape(6, 2, 8), expected.cpu())
