"""Converts a program to the functionalised graph that the bridge's compiler gets.

`capture` does it with the code that the bridge uses, AOT autograd, on host tensors and with every
torch we know. `functionalise` does it to a Dynamo graph for the simulated card.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize

_HOST = torch.device("cpu")


def capture(function: Callable[..., Any], *args: Any) -> fx.Graph:
    """Return the graph of a call, compiled with static shapes and in one piece. Runs the call once.

    Args:
        function: a module or a function.
        args: arguments of the call; its tensors are on the host.

    Raises:
        torch._dynamo.exc.Unsupported: the graph breaks.
    """
    from torch._dynamo.backends.common import aot_autograd  # takes seconds, and not all need it

    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True
    )
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    (graph,) = graphs
    return graph


def functionalise(
    module: fx.GraphModule, inputs: Sequence[Any], device: torch.device
) -> fx.GraphModule:
    """Return a Dynamo graph without mutating operators, except for copying new values to inputs.

    Args:
        module: module for tensors of `device`.
        inputs: inputs of one call; only the shapes, strides and dtypes of tensors are used.
        device: device for which torch has no kernels; the graph is made with host tensors.
    """
    # These imports take seconds, and cards in lazy mode do not need them.
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    on_host = _moved(module, device, _HOST)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(*args: Any) -> Any:
        return on_host.forward(*args)

    def empty_like(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_HOST)

    with torch.inference_mode(False), torch.no_grad(), mode:
        # Keep views as they are: the compiler uses them to find the writes that it must copy.
        traced = make_fx(functionalize(run, remove="mutations"))(*map(empty_like, inputs))
    traced.graph.eliminate_dead_code()
    return _moved(traced, _HOST, device)


def _moved(module: fx.GraphModule, source: torch.device, target: torch.device) -> fx.GraphModule:
    """Return the same graph, with its tensors created on `target` instead of `source`."""

    def move(x: Any) -> Any:
        if isinstance(x, torch.device) and x.type == source.type:
            return target
        return x

    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args, node.kwargs = _map(move, node.args), _map(move, node.kwargs)
    return fx.GraphModule(module, graph)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(function, x) for x in value)
    if isinstance(value, dict):
        return {name: _map(function, x) for name, x in value.items()}
    return function(value)
