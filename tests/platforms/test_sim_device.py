"""Test tensors of the simulated device: their memory, their cost, and refused operations."""

import gc

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.card import SimulationError

MIB = 2**20


def test_a_tensor_says_that_it_is_on_the_card_and_computes_as_on_the_cpu(eager):
    x = torch.arange(12.0).view(3, 4)
    y = x.to("hpu")
    assert y.device == torch.device("hpu", 0) and not y.is_cpu
    assert (y @ y.t() + 1).device == y.device
    assert (y @ y.t() + 1).cpu().equal(x @ x.t() + 1)


def test_views_and_writes_in_place_share_memory(eager):
    cache = torch.zeros(10, 4, device="hpu")
    cache[5:7].fill_(7.0)
    cache.index_copy_(0, torch.tensor([1, 2]).to("hpu"), torch.ones(2, 4).to("hpu"))
    assert cache.cpu().sum(1).tolist() == [0, 4, 4, 0, 0, 28, 28, 0, 0, 0]


def test_inference_may_view_what_was_made_outside_of_it(eager):
    cache = torch.zeros(4, 6, device="hpu")
    with torch.inference_mode():
        cache.view(8, 3)[2:3].fill_(5)
    assert not cache.is_inference() and cache.cpu().sum() == 15


@pytest.mark.parametrize("inference", [False, True])
def test_a_module_moves_and_runs(eager, inference):
    module = torch.nn.Linear(4, 3)
    expected = module(torch.ones(2, 4)).detach()
    with torch.inference_mode(inference), torch.no_grad():
        out = module.to("hpu")(torch.ones(2, 4).to("hpu"))
    torch.testing.assert_close(out.cpu(), expected)


def test_mixing_devices_is_refused(eager):
    x = torch.ones(3).to("hpu")
    with pytest.raises(RuntimeError, match=r"expected all tensors on one device.*hpu:0 and cpu"):
        x + torch.ones(3)
    # A tensor of the host may be used if it is a scalar.
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="Invalid device id 1"):
        torch.zeros(3, device="hpu:1")


def test_copies_are_counted_in_bytes(eager):
    x = torch.zeros(256, dtype=torch.float32).to("hpu")
    assert (eager.counters().h2d_bytes, eager.counters().d2h_bytes) == (1024, 0)
    x.to(torch.bfloat16).cpu()
    assert (eager.counters().h2d_bytes, eager.counters().d2h_bytes) == (1024, 512)
    x.copy_(torch.ones(256))
    target = torch.empty(256)
    target.copy_(x)
    assert target.sum() == 256
    assert (eager.counters().h2d_bytes, eager.counters().d2h_bytes) == (2048, 1536)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: repr(x),
        lambda x: f"{x[0]:.2f}",
        lambda x: x.equal(x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 2]).to("hpu")),
    ],
)
def test_what_the_host_must_see_is_one_host_sync(eager, read):
    read(torch.tensor([1.0, -1.0]).to("hpu"))
    assert eager.counters().host_syncs == 1


def test_a_copy_that_does_not_wait_is_no_sync(eager):
    x = torch.ones(4).to("hpu")
    done = torch.hpu.Event()
    host = x.to("cpu", non_blocking=True)
    done.record()
    assert eager.counters().host_syncs == 0
    done.synchronize()
    assert host.sum() == 4 and eager.counters().host_syncs == 1


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("aten::sort.stable", lambda x: x.sort(stable=True, dim=1)),
        ("aten::topk", lambda x: x.int().topk(2)),
        ("aten::index_reduce_", lambda x: x.index_reduce_(0, index(0), x[:1].clone(), "amin")),
        ("aten::index_select", lambda x: x.view(1, 1, 1, 1, 3, 64).index_select(0, index(0))),
        ("aten::exponential_", lambda x: x.half().exponential_()),
        ("aten::index_put_", lambda x: x.half().index_put_((index(0),), x[:1].half())),
        ("aten::gather", lambda x: x.long().gather(1, torch.zeros_like(x).long())),
    ],
)
def test_what_has_no_kernel_runs_on_the_host(eager, name, run):
    run(torch.ones(3, 64).to("hpu"))
    assert eager.counters().cpu_fallbacks == {name: 1}


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values).to("hpu")


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_what_has_a_kernel_does_not(eager):
    x = torch.ones(3, 64).to("hpu")
    x.sort(dim=1)
    x.topk(2)
    x[:, :8].sort(stable=True, dim=1)
    x.index_reduce_(0, index(0), x[:1].clone(), "amax")
    x.index_select(0, index(0))
    assert eager.counters().cpu_fallbacks == {}


def test_lazy_mode_keeps_int64_as_int32(lazy):
    ids = torch.zeros(MIB, dtype=torch.int64).to("hpu")
    assert ids.dtype == torch.int64
    assert lazy.card.memory.in_use_bytes == 4 * MIB
    assert lazy.counters().h2d_bytes == 4 * MIB
    with pytest.raises(RuntimeError, match="Input values range exceeds Int range"):
        torch.tensor([2**31]).to("hpu")


def test_double_is_computed_on_the_host(eager):
    torch.ones(2, dtype=torch.float64).to("hpu").exp()
    assert eager.counters().cpu_fallbacks == {"aten::exp": 1}


def test_memory_counts_each_storage_once_and_until_it_is_dropped(eager):
    pool = eager.card.memory
    x = torch.empty(MIB, device="hpu")
    y = x.view(-1, 2)[:5]
    assert pool.in_use_bytes == 4 * MIB
    del x
    assert pool.in_use_bytes == 4 * MIB  # the view keeps the memory
    del y
    gc.collect()
    assert pool.in_use_bytes == 0
    stats = torch.hpu.memory_stats()
    assert stats["MaxInUse"] == stats["MaxAllocSize"] == 4 * MIB
    assert stats["NumAllocs"] == stats["NumFrees"] == 1 and len(stats) == 10


def test_a_result_that_shares_memory_takes_none(eager):
    pool = eager.card.memory
    x = torch.ones(2, 3, 4, device="hpu")
    taken = pool.in_use_bytes
    assert torch.ops.aten._unsafe_view(x, [6, 4]).shape == (6, 4)
    y = torch.ops.aten._unsafe_view(x, [6, 4])
    assert pool.in_use_bytes == taken and y.lease is x.lease
    y = y + 1
    assert pool.in_use_bytes == 2 * taken
    del x, y
    assert pool.in_use_bytes == 0


def test_too_much_memory_fails_as_on_a_card_before_the_host_takes_it(eager):
    with pytest.raises(
        RuntimeError, match=r"Allocation failed for size::107374182400 \(102400\)MB"
    ):
        torch.zeros(100 * 2**30, dtype=torch.int8, device="hpu")
    assert torch.hpu.mem_get_info() == (eager.card.memory.limit_bytes,) * 2


def test_another_card_takes_the_place_of_the_first(eager):
    old = torch.ones(4).to("hpu")
    other = SimBridge("gaudi3")
    assert torch.hpu.get_device_name() == "GAUDI3"
    assert other.counters().h2d_bytes == 0
    assert (old + 1).sum().item() == 8


def test_the_same_seed_gives_the_same_numbers(eager):
    def draw() -> list[float]:
        eager.manual_seed(5)
        return torch.empty(4, device="hpu").exponential_().tolist()

    assert draw() == draw()


def test_strict_refuses_stalls_in_a_warmed_section_only(strict):
    x = torch.ones(4).to("hpu")
    x.sum().item()
    for stall, reason in [
        (lambda: x.sum().item(), "host sync by aten::_local_scalar_dense"),
        (lambda: x.cpu(), "host sync by a copy to the host"),
        (lambda: x.nonzero(), "dynamic shape of aten::nonzero"),
        (lambda: x[x > 0], "dynamic shape of aten::index.Tensor"),
        (lambda: x.int().topk(1), "cpu fallback of aten::topk"),
    ]:
        with pytest.raises(SimulationError, match=reason), strict.warmed_section():
            stall()
        strict.mark_step()
    x.cpu()


def test_without_strict_the_same_is_only_counted(lazy):
    x = torch.ones(4).to("hpu")
    with lazy.warmed_section():
        x.sum().item()
    assert lazy.counters().host_syncs == 1
