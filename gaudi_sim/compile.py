"""The simulated `hpu_backend` of `torch.compile`: the same steps as the bridge, then one recipe.

A Dynamo graph is functionalised; writes to its inputs are put back in place where the bridge does
so (`graphs.rules`); the others copy their inputs, which the card counts.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from gaudi_sim.card.card import SimulationError
from gaudi_sim.card.device import HpuTensor, active_card
from gaudi_sim.graphs.capture import functionalise
from gaudi_sim.graphs.rules import reinplace
from vllm.platforms.habana.bridge import COMPILE_BACKEND


def compile_for_card(
    graph: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, object] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Compile a Dynamo graph; it runs as one recipe per set of shapes.

    If sizes are symbols, every set of sizes gets its own graph: compilation is static.

    Args:
        graph: graph of Dynamo.
        example_inputs: inputs of the graph.
        options: only `force_static_compile` has an effect.

    Raises:
        RuntimeError: the card is in lazy mode, which uses HPU graphs instead.
        SimulationError: the card is strict, and a size is a symbol without `force_static_compile`.
    """
    card = active_card()
    if card.is_lazy:
        raise RuntimeError(f"{COMPILE_BACKEND} needs eager mode (PT_HPU_LAZY_MODE=0)")
    programs: dict[tuple[Any, ...], fx.GraphModule] = {}
    is_static = not any(isinstance(x, torch.SymInt) for x in example_inputs)
    if not is_static and card.is_strict and not options.get("force_static_compile"):
        raise SimulationError(
            "the graph has symbolic sizes: without force_static_compile a card compiles recipes "
            "with dynamic shapes, which is slow"
        )

    def compiled(*inputs: Any) -> Any:
        key = () if is_static else tuple(map(_kind, inputs))
        program = programs.get(key)
        if program is None:
            program = programs[key] = _compile(graph, inputs)
        with active_card().compiled_region():
            return program.forward(*inputs)

    return compiled


def _kind(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _compile(graph: fx.GraphModule, inputs: tuple[Any, ...]) -> fx.GraphModule:
    program = functionalise(graph, inputs, torch.device("hpu", 0))
    for copied in reinplace(program.graph):
        copied.node.target = _copy_back
    program.recompile()
    return program


def _copy_back(target: HpuTensor, source: HpuTensor) -> HpuTensor:
    """Copy the new value of an input back into it, after it was written through a view."""
    active_card().copy_whole(target.lease, target.raw.nbytes)
    target.copy_(source)
    return target
