"""Check whole programs: HPU graphs, torch.compile, and the number of compilations."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm.hpu_check.check import Comparison, Outcome
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import COMPILE_BACKEND, HabanaBridge

_HIDDEN = 64


class _Layer(nn.Module):
    """A layer for checks: a norm, a matmul and an activation."""

    weight: Tensor
    matrix: Tensor

    def __init__(self, ops: NativeOps) -> None:
        super().__init__()
        self._ops = ops
        self.register_buffer("weight", torch.randn(_HIDDEN))
        self.register_buffer("matrix", torch.randn(_HIDDEN, 2 * _HIDDEN) / _HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.silu_and_mul(self._ops.rms_norm(x, self.weight, 1e-5) @ self.matrix)


def check_graph_replay(bridge: HabanaBridge) -> Outcome:
    """Check that a captured graph computes on the inputs of each call, not on the inputs of the
    capture."""
    if not bridge.is_lazy:
        return Outcome("skip", "HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
    before = bridge.counters()
    outcome = _compare(bridge, bridge.wrap_in_hpu_graph, "one capture, two replays")
    after = bridge.counters()
    # This card does not count them.
    if before.graph_captures is None or after.graph_captures is None:
        return outcome
    num_captures = after.graph_captures - before.graph_captures
    if outcome.status == "pass" and num_captures != 1:
        return Outcome("fail", f"{num_captures} graphs were captured for one shape")
    return outcome


def check_torch_compile(bridge: HabanaBridge) -> Outcome:
    """Check that a compiled layer computes the same as the original layer."""
    if bridge.is_lazy:
        return Outcome("skip", f"{COMPILE_BACKEND} needs eager mode (PT_HPU_LAZY_MODE=0)")
    return _compare(bridge, _compiled, f"backend {COMPILE_BACKEND}")


def check_compile_counting(bridge: HabanaBridge) -> Outcome:
    """Check that a known shape compiles nothing, that a new shape is compiled, and that the counter
    reports it.
    """
    layer = _Layer(HPUOps(bridge)).to(bridge.device)
    run = layer if bridge.is_lazy else _compiled(layer)
    # A batch size that no other check has, because equal shapes share a recipe.
    first, again, new = (_compilations(bridge, run, num_rows) for num_rows in (19, 19, 23))
    counts = f"first shape {first}, again {again}, new shape {new}"
    if not first and not new:
        return Outcome("skip", f"{counts}: no compilation was counted; a recipe cache on disk?")
    if again or not first or not new:
        return Outcome("fail", f"compilations: {counts}")
    return Outcome("pass", f"compilations: {counts}")


def check_host_fallbacks(bridge: HabanaBridge) -> Outcome:
    """Check that no operator since the card was opened ran on the host because it has no kernel."""
    fallbacks = bridge.counters().cpu_fallbacks
    if fallbacks:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(fallbacks.items()))
        return Outcome("fail", f"ran on the host: {listed}")
    return Outcome("pass", "every operator so far ran on the card")


def _compare(
    bridge: HabanaBridge, prepare: Callable[[nn.Module], Callable[[Tensor], Tensor]], note: str
) -> Outcome:
    reference, layer = _Layer(NativeOps()), _Layer(HPUOps(bridge))
    layer.load_state_dict(reference.state_dict())
    run, comparison = prepare(layer.to(bridge.device)), Comparison()
    for call in ("first call", "second call", "third call"):
        x = torch.randn(4, _HIDDEN)
        comparison.add(call, run(x.to(bridge.device)), reference(x))
    return comparison.outcome(note)


def _compiled(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(layer, backend=COMPILE_BACKEND, dynamic=False)


def _compilations(bridge: HabanaBridge, run: Callable[[Tensor], Tensor], num_rows: int) -> int:
    x = torch.randn(num_rows, _HIDDEN).to(bridge.device)
    bridge.synchronize()  # finish earlier operations, which do not belong to this run
    before = bridge.counters().compilations
    run(x)
    bridge.synchronize()
    return bridge.counters().compilations - before
