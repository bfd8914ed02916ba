"""Test slots of adapters under random loads, and the masked matmuls of a device with fixed
shapes.
"""

import random
from collections import Counter

import pytest
import torch

from vllm.lora.adapted_layers import AdaptedLayers
from vllm.lora.launches import DeviceSlots, HostSlots
from vllm.lora.slots import AdapterSlots
from vllm.ops.expert_options import SILU_EXPERTS
from vllm.ops.lora_weights import (
    AdaptedExpert,
    AdaptedExperts,
    AdaptedLayer,
    AdaptedRows,
    LoRAHeads,
    LoRAWeights,
    PlainAdapter,
)
from vllm.ops.native.operators import NativeOps
from vllm.ops.prepared import SingleExperts


@pytest.mark.parametrize("num_slots", [1, 2, 7])
def test_a_slot_has_what_its_requests_use(num_slots):
    rng = random.Random(num_slots)
    slots, uses, content = AdapterSlots(num_slots), Counter(), {}
    writes = 0
    for _ in range(4000):
        key = str(rng.randrange(2 * num_slots))
        if rng.random() < 0.5 and uses[key]:
            slots.release(key)
            uses[key] -= 1
        elif uses[key] or len(+uses) < num_slots:
            slot, is_new = slots.take(key)
            assert 0 <= slot < num_slots
            assert is_new == (content.get(slot) != key)
            content[slot] = key
            writes += is_new
            uses[key] += 1
        in_use = {key for key, count in uses.items() if count}
        assert in_use <= set(content.values()), "an adapter in use was written over"
        assert all(slots.has(key) for key in in_use)
    assert writes > num_slots


def test_the_adapter_that_was_released_first_goes():
    slots = AdapterSlots(2)
    for key in ("a", "b"):
        slots.take(key)
    slots.release("b")
    slots.release("a")
    slots.take("c")
    assert slots.has("a") and not slots.has("b")


LAYERS = [AdaptedLayer(0, 0, 12, ((0, 8), (8, 4))), AdaptedLayer(1, 2, 6, ((0, 10),))]


def random_parts(
    rank: int, layers: list[AdaptedLayer] = LAYERS, *, without: int | None = None
) -> list[LoRAWeights | None]:
    parts: list[LoRAWeights | None] = []
    for layer in layers:
        for _, size in layer.parts:
            parts.append(LoRAWeights(torch.randn(rank, layer.in_features), torch.randn(size, rank)))
    if without is not None:
        parts[without] = None
    return parts


def test_slots_on_a_device_give_what_the_host_gives():
    torch.manual_seed(0)
    ends: list[int] = []
    cpu = torch.device("cpu")
    slots = DeviceSlots(AdaptedLayers(LAYERS), 3, 4, torch.float32, cpu, lambda: ends.append(1))
    old, first, second = random_parts(4), random_parts(4), random_parts(2, without=1)
    # A smaller adapter replaces a larger one.
    for slot, parts in ((0, old), (2, first), (0, second)):
        slots.put(slot, slots.prepare(parts))
    of_tokens = torch.tensor([0, -1, 2, 0, 2], dtype=torch.int32)
    launch = slots.of_tokens(of_tokens)
    adapters = [PlainAdapter(second), None, PlainAdapter(first)]
    for layer in LAYERS:
        x, y = torch.randn(5, layer.in_features), torch.randn(5, layer.out_features)
        y[1, 0], x[1, 0] = -0.0, torch.inf
        got = launch.adapt(layer, x, y.clone())
        want = NativeOps().add_low_rank(y.clone(), x, layer, AdaptedRows(adapters, of_tokens))
        torch.testing.assert_close(got, want)
        assert torch.equal(got[1].view(torch.int32), y[1].view(torch.int32))
    assert slots.num_bytes == 4 * 3 * 4 * (2 * 12 + 8 + 4 + 6 + 10)


def test_heads_on_a_device_give_what_the_host_gives():
    """Elements after the output of a head remain unchanged."""
    torch.manual_seed(0)
    heads = [AdaptedLayer(number, number, 6, ((0, 5),)) for number in range(3)]
    adapted = AdaptedLayers(heads, 3, alike=[range(3)])
    adapters = random_parts(2, heads), random_parts(4, heads, without=1)
    slots = torch.tensor([0, -1, 1, 0], dtype=torch.int32)
    x, y = torch.randn(4, 3, 8)[..., 1:-1], torch.randn(4, 3, 7)
    found = []
    for store in (
        HostSlots(adapted, 2, torch.float32),
        DeviceSlots(adapted, 2, 4, torch.float32, torch.device("cpu"), lambda: None),
    ):
        for slot, parts in enumerate(adapters):
            store.put(slot, store.prepare(parts))
        found.append(store.of_tokens(slots).adapt_heads(LoRAHeads(heads), x, y.clone()))
    for slot, parts in enumerate(adapters):
        rows = slots == slot
        for number, part in enumerate(parts):
            if part is not None:
                y[rows, number, :5] += x[rows, number] @ part.a.T @ part.b.T
    for got in found:
        torch.testing.assert_close(got, y)
        assert torch.equal(got[1], y[1]) and torch.equal(got[..., 5:], y[..., 5:])


class _Products:
    """The matmuls of single experts."""

    def __init__(self, count: int, hidden: int, size: int) -> None:
        self.gate_up = torch.randn(count, 2 * size, hidden)
        self.down = torch.randn(count, hidden, size)

    def multiply_gate_up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return x @ self.gate_up[expert].T

    def multiply_down(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down[expert].T


def test_experts_on_a_device_give_what_the_host_gives():
    """This rank has 3 of the 5 experts, from the second one on."""
    torch.manual_seed(0)
    hidden, size = 6, 4
    adapted, experts = AdaptedLayers(), []
    for _ in range(3):
        halves = ((0, size), (size, size))
        gate_up = adapted.add(hidden, halves)
        experts.append(AdaptedExpert(gate_up, adapted.add(size, ((0, hidden),))))
    adapted.experts, adapted.alike = range(9), [range(0, 6, 2), range(1, 6, 2)]
    adapters = random_parts(2, adapted.layers), random_parts(4, adapted.layers, without=4)
    host = HostSlots(adapted, 2, torch.float32)
    device = DeviceSlots(adapted, 2, 4, torch.float32, torch.device("cpu"), lambda: None)
    slots = torch.tensor([0, -1, 1, 0, 1, -1, 1], dtype=torch.int32)
    x, y, weights = torch.randn(7, hidden), torch.randn(7, hidden), torch.rand(7, 2)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(7)])
    found = []
    single = SingleExperts(_Products(3, hidden, size), SILU_EXPERTS)
    for store in (host, device):
        for slot, parts in enumerate(adapters):
            store.put(slot, store.prepare(parts))
        launch = store.of_tokens(slots)
        layer = AdaptedExperts(experts, 1)
        found.append(launch.adapt_experts(layer, single, x, ids, weights, y.clone()))
    torch.testing.assert_close(*found)
    for got in found:
        assert [bool(row.all()) for row in got == y] == (slots < 0).tolist()
    assert len(device.a) == 2 and device.num_bytes == 4 * 3 * 2 * 4 * (2 * 6 + 4 + 4 + 4 + 6)
