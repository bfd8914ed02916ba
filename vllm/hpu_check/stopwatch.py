"""Measure time on a card: by the clock of a simulated card, else by the host's clock."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vllm.cost_model.links import all_reduce_bytes
from vllm.cost_model.measured import COMPILED_OPERATORS
from vllm.distributed import TPGroup
from vllm.platforms.habana.bridge import HabanaBridge

NUM_RUNS = 5
"""Runs of which `shortest_s` returns the fastest."""
_CHAINS = 2, 10
_MATRIX = 4096
_LARGE_BYTES = 256 * 2**20
_EXCHANGED_BYTES = 64 * 2**20
_NEW_SHAPE = (1237,)
"""A shape that no other check uses, so that the card has no recipe for it."""


def shortest_s(bridge: HabanaBridge, run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs, including the wait for the card."""
    return min(elapsed_s(bridge, run) for _ in range(NUM_RUNS))


def elapsed_s(bridge: HabanaBridge, run: Callable[[], object]) -> float:
    """Return the seconds of one run, including the wait for the card."""
    start = _now_s(bridge)
    run()
    return _now_s(bridge) - start


def measure_rates(bridge: HabanaBridge) -> dict[str, float]:
    """Measure the `vllm.cost_model.measured.RATES` of this card; times only in lazy mode.

    A simulated card computes nothing meanwhile, and its rates come from the cost model.
    """
    left, right = (bridge.zeros((_MATRIX, _MATRIX), torch.bfloat16) for _ in range(2))
    large = bridge.zeros((_LARGE_BYTES,), torch.int8)
    small, new = bridge.zeros((1,), torch.float32), bridge.zeros(_NEW_SHAPE, torch.float32)
    with torch.inference_mode(), bridge.dry_run():
        matmul_s = _each_s(bridge, left, lambda x: x @ right)
        add_s = _each_s(bridge, large, lambda x: x + 1)
        rates = {
            "matmul_flops_per_s": 2 * _MATRIX**3 / matmul_s,
            "memory_bytes_per_s": 2 * _LARGE_BYTES / add_s,
        }
        if bridge.is_lazy:
            rates["launch_s"] = shortest_s(bridge, lambda: small + 1)
            run = partial(_chain, new, lambda x: x + 1, COMPILED_OPERATORS)
            rates["compile_s"] = elapsed_s(bridge, run) - elapsed_s(bridge, run)
    return rates


def measure_links(bridge: HabanaBridge, group: TPGroup) -> dict[str, float]:
    """Return the `vllm.cost_model.measured.RATES` of the links between cards; all cards call it
    together. A rate that the clock is too coarse for is left out."""
    small = bridge.zeros((1,), torch.bfloat16)
    large = bridge.zeros((_EXCHANGED_BYTES // 2,), torch.bfloat16)
    all_reduce_s = _each_s(bridge, small, group.all_reduce)
    moving_s = _each_s(bridge, large, group.all_reduce) - all_reduce_s
    moved = float(all_reduce_bytes(_EXCHANGED_BYTES, group.size))
    rates = {"all_reduce_s": all_reduce_s}
    if moving_s > 0:
        rates["link_bytes_per_s"] = moved / moving_s
    return {name: rate for name, rate in rates.items() if rate > 0}


def _each_s(bridge: HabanaBridge, x: Tensor, operator: Callable[[Tensor], Tensor]) -> float:
    """Return the seconds of one operator in a chain: the difference between a longer and a shorter
    chain.
    """
    few, many = (shortest_s(bridge, partial(_chain, x, operator, n)) for n in _CHAINS)
    return (many - few) / (_CHAINS[1] - _CHAINS[0])


def _chain(x: Tensor, operator: Callable[[Tensor], Tensor], length: int) -> Tensor:
    for _ in range(length):
        x = operator(x)
    return x


def _now_s(bridge: HabanaBridge) -> float:
    bridge.synchronize()
    return bridge.now_s()
