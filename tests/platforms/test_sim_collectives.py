"""Test collectives of tensors on simulated cards, over gloo, with one process for each card."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.card import SimulationError
from tests.hpu import needs_simulated_device
from vllm.cost_model.fitted import CONSTANTS
from vllm.cost_model.links import empty_all_reduce_seconds
from vllm.cost_model.throughput import ModelFigures, ServingCost
from vllm.distributed import CardLink, Collectives, TorchCollectives
from vllm.distributed.groups import gather_function
from vllm.errors import CollectiveError
from vllm.platforms.habana.real import RealBridge

_EXCHANGE = """
import os
import sys
import torch
from torch import distributed as dist
from vllm.platforms.habana.real import RealBridge
from gaudi_sim.bridge import SimBridge

child = os.fork()  # both have imported everything
rank, store = int(child == 0), sys.argv[1]
bridge = SimBridge("gaudi2", is_lazy=True)
dist.init_process_group(
    bridge.collectives_backend, init_method=f"file://{store}", world_size=2, rank=rank
)
x = torch.full((3,), rank + 1.0).to(bridge.device)
dist.all_reduce(x)
gathered = [torch.zeros(3, device="hpu") for _ in range(2)]
dist.all_gather(gathered, x * (rank + 1))
dist.broadcast(x.mul_(rank + 1), src=1)
line = f"{rank} {x.tolist()} {torch.stack(gathered).tolist()}\\n"
os.write(1, line.encode())  # in one piece, beside that of the other
dist.destroy_process_group()
if child:
    os.waitpid(child, 0)
"""


@contextmanager
def group_of_one(backend: str, store: Path) -> Iterator[None]:
    dist.init_process_group(backend, init_method=f"file://{store}", world_size=1, rank=0)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make a group with only this process."""
    with group_of_one("gloo", tmp_path / "store"):
        yield


# Exhaustive: in every run, test_parallel_hpu_faults.py compares tokens of several cards and of one.
@pytest.mark.exhaustive
@needs_simulated_device
def test_two_cards_sum_gather_and_broadcast(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _EXCHANGE, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = f"{[6.0] * 3} {[[3.0] * 3, [6.0] * 3]}"
    # Gloo of torch 2.10 prints a line here with its number of peers.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo] ")]
    assert sorted(lines) == [f"0 {found}", f"1 {found}"], done.stderr


def test_the_backend_of_the_real_bridge_is_there_with_the_package(lazy, facade, tmp_path):
    with group_of_one(RealBridge().collectives_backend, tmp_path / "store"):
        x = torch.ones(3).to("hpu")
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1]


def test_a_collective_ends_the_recorded_graph_and_is_none_of_it(lazy, alone):
    x = torch.ones(2**20).to("hpu")
    for num_compilations in (1, 1):
        y = x * 2
        before = lazy.card.clock.compute_s
        dist.all_reduce(y)
        assert lazy.counters().compilations == num_compilations
        assert lazy.card.clock.compute_s - before > y.nbytes / 262.5e9
        assert lazy.counters().host_syncs == 0


@pytest.mark.parametrize("num_cards", [2, 8])
def test_a_collective_takes_the_time_that_plans_predict(lazy, num_cards):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_cards)
    try:
        x = torch.ones(16, 2**16).to("hpu")
        gathered = torch.empty(16 * num_cards, 2**16, device="hpu")
        found = []
        for run in (dist.all_reduce, partial(gather_function(), gathered)):
            lazy.mark_step()
            before = lazy.card.clock.compute_s
            run(x)
            found.append(lazy.card.clock.compute_s - before)
    finally:
        dist.destroy_process_group()
    figures = ModelFigures(
        dense_params=1.0,
        vocab_size=1,
        hidden_size=2**17,  # of 2 bytes
        num_layers=1,
        attention=(),
        weight_bytes=2,
        kv_bytes=2,
        is_fp8=False,
    )
    cost = ServingCost("gaudi2", num_cards, figures)
    moving = cost.fitted.values[list(CONSTANTS).index("link_bytes")]
    waiting = empty_all_reduce_seconds(lazy.card.spec)
    two_all_reduces = float(cost.decode_seconds(16, 16).part("links"))
    assert two_all_reduces / 2 == pytest.approx(waiting + moving * (found[0] - waiting))
    # A gather moves its result, of all cards together, over the links once.
    assert found[1] - waiting == pytest.approx((found[0] - waiting) * num_cards / 2)


def test_a_capture_takes_lazy_collectives_only(alone):
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            dist.all_reduce(y)
            return y * 2

    def run(bridge: SimBridge) -> list[float]:
        with torch.inference_mode():
            wrapped = bridge.wrap_in_hpu_graph(Sum())
            return [wrapped(torch.tensor([value]).to("hpu")).item() for value in (1.0, 2.0, 3.0)]

    with pytest.raises(SimulationError, match="collective nonSFG is not supported"):
        run(SimBridge("gaudi2", is_lazy=True))
    bridge = SimBridge("gaudi2", is_lazy=True, has_lazy_collectives=True)
    assert run(bridge) == [4, 6, 8]
    assert (bridge.counters().graph_captures, bridge.counters().graph_replays) == (1, 2)
    before = bridge.counters().compilations
    bridge.synchronize()
    assert bridge.counters().compilations == before


class _SumAndGather(torch.nn.Module):
    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self.collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.collectives.all_gather(self.collectives.all_reduce(x + 1) * 2)


def test_in_strict_mode_a_recorded_collective_needs_a_step_before_it(alone):
    """This holds outside and inside a graph, whose capture then has a part for each step."""
    x = torch.ones(2, 3)
    for is_strict in (True, False):
        bridge = SimBridge("gaudi2", is_lazy=True, is_strict=is_strict, has_lazy_collectives=True)
        with_step = TorchCollectives(1, before=bridge.mark_step)
        graph = bridge.wrap_in_hpu_graph(_SumAndGather(with_step))
        for run in (_SumAndGather(with_step), graph):
            for value in (1.0, 2.0):
                with torch.inference_mode():
                    assert run((x * value).to("hpu")).tolist() == [[2 * value + 2] * 3] * 2
        assert bridge.counters().graph_replays == 1
        without = _SumAndGather(TorchCollectives(1))
        if is_strict:
            with pytest.raises(SimulationError, match=r"allreduce_ must not follow .* got 1:"):
                without(x.to("hpu"))
            with pytest.raises(SimulationError, match="allgather_base_ must not follow recorded"):
                without.collectives.all_gather(x.to("hpu") * 2)
        else:
            assert without(x.to("hpu")).tolist() == [[4.0] * 3] * 2


def test_in_strict_mode_what_is_sent_needs_a_step_before_it(alone, monkeypatch):
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True, has_lazy_collectives=True)
    monkeypatch.setattr(dist, "isend", lambda x, rank: dist.all_reduce(x, async_op=True))
    x = torch.ones(3).to("hpu")
    with pytest.raises(CollectiveError, match=r"must not follow recorded .* got 1"):
        CardLink(0, None, 1, None).send(x * 2)
    CardLink(0, None, 1, None, before=bridge.mark_step).send(x * 2)


def test_an_eager_card_needs_no_step(alone):
    SimBridge("gaudi2", is_strict=True, has_lazy_collectives=True)
    assert TorchCollectives(1).all_reduce(torch.ones(3).to("hpu") * 2).tolist() == [2, 2, 2]
