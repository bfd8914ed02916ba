"""What a captured graph moves: its operators, all bytes, and those of the KV cache.

As if nothing were fused: every operator reads its operands and writes its results.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gaudi_sim.graphs.rules import is_view, operators_of, reinplace, value_of
from vllm.cost_model.work import base_name, work_of

_PRODUCTS = ("bmm", "mm", "addmm", "baddbmm", "sdpa_recomp_fwd", "fp8_gemm_v2")
"""Whose results are no copies of keys and values any more."""


@dataclass(frozen=True)
class GraphCost:
    """Counted over a whole graph."""

    num_operators: int
    """Views not included."""
    moved_bytes: int
    cache_bytes: int
    """Read from and written to tensors that the graph writes, and copies of them."""


def cost_of(graph: fx.Graph) -> GraphCost:
    """The cost of a functionalised graph as the bridge runs it; puts its writes back in place."""
    copies = {copied.node.args[0] for copied in reinplace(graph)}
    written = {x.args[0] for x in operators_of(graph) if x.target._schema.is_mutable}  # type: ignore[union-attr]
    cached = {x for x in written | copies if isinstance(x, fx.Node)}
    num_operators = moved_bytes = cache_bytes = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = [x for x in node.all_input_nodes if isinstance(value_of(x), torch.Tensor)]
        of_cache = [x for x in node.all_input_nodes if x in cached]  # also parts of a split
        if is_view(node):
            cached |= {node} if of_cache else set()
            continue
        num_operators += 1
        num_bytes = _moved(node, operands)
        moved_bytes += num_bytes
        if not of_cache:
            continue
        if base_name(node.target) in _PRODUCTS:
            cache_bytes += sum(value_of(x).nbytes for x in of_cache)
        else:
            cache_bytes += num_bytes
            cached.add(node)
    return GraphCost(num_operators, moved_bytes, cache_bytes)


def _moved(node: fx.Node, operands: list[fx.Node]) -> int:
    value: Any = value_of(node)
    results = [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, tuple) else []
    results = results or [value]
    return work_of(node.target, [value_of(x) for x in operands], results).num_bytes
