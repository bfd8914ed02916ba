"""The four ways to run a model on Gaudi.

                       enforce_eager off            enforce_eager on
    PT_HPU_LAZY_MODE=0  torch.compile                eager
    PT_HPU_LAZY_MODE=1  HPU graphs                   lazy: recorded up to a mark

All have the same interface: an object that runs a forward pass.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.model import LaunchModel
from vllm.worker.hpu.launches.planner import PaddedShape

Outputs = tuple[Tensor, Tensor]
"""Logits [B, V], or numbers of a pooling head, and hidden states [B * Q, hidden]. Of a stage of a
pipeline that is not the last, the hidden states twice."""


class Execution:
    """Runs forward passes operator by operator: eager, or lazy up to a mark.

    Args:
        bridge: the card.
        model: runs padded forward passes.
    """

    name = "eager"
    has_recipes = False
    """A launch is compiled as one program, or a few."""

    def __init__(self, bridge: HabanaBridge, model: LaunchModel) -> None:
        self._bridge = bridge
        self.model = model

    def run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        """Run one forward pass; the next one of the same shape overwrites its outputs.

        Args:
            packed: packed input of the forward pass.
            shape: padded shape of the forward pass.
            before: [B * Q, hidden], the output of the previous pipeline stage; none on the first
                stage.
        """
        # Clears the context also if the forward pass raises.
        with self.model.launch_holder.running(None):
            return self._run(packed, shape, *before)

    def _run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        outputs: Outputs = self.model(packed, shape, *before)
        self._bridge.mark_step()
        return outputs

    def how(self, shape: PaddedShape) -> str:
        """Return the name of the way a forward pass of this shape runs, for a trace."""
        return self.name

    def allow_shapes(self, num_shapes: int) -> None:
        """Prepare the compiler, if there is one, for forward passes of `num_shapes` shapes."""

    def forbid_recompilation(self) -> None:
        """Note that everything has run once; a compiler may skip its guards from now on."""


class LazyExecution(Execution):
    """Records operators lazily; a mark after every few layers lets the device start on them.

    Args:
        layers_per_mark: decoder layers between two marks; None: the layers mark steps themselves.
    """

    name = "lazy"
    has_recipes = True

    def __init__(
        self, bridge: HabanaBridge, model: LaunchModel, layers_per_mark: int | None
    ) -> None:
        super().__init__(bridge, model)
        for number, layer in enumerate(model.model.layers, start=1):
            if layers_per_mark is not None and number % layers_per_mark == 0:
                layer.register_forward_hook(self._mark)

    def _mark(self, module: nn.Module, args: Any, output: Any) -> None:
        self._bridge.mark_step()


class GraphExecution(LazyExecution):
    """Replays captured HPU graphs; shapes without a graph run lazily."""

    name = "HPU graphs"

    def __init__(
        self, bridge: HabanaBridge, model: LaunchModel, layers_per_mark: int | None
    ) -> None:
        super().__init__(bridge, model, layers_per_mark)
        self._graphs: dict[PaddedShape, nn.Module] = {}

    def _run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        graph = self._graphs.get(shape)
        if graph is None:
            return super()._run(packed, shape, *before)
        return graph(packed, *before)

    def how(self, shape: PaddedShape) -> str:
        """Return "replay" for a shape with a graph, else the name of lazy execution, for a
        trace.
        """
        return "replay" if shape in self._graphs else LazyExecution.name

    def capture(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> None:
        """Capture the graph of a shape; it takes the arguments of `run`."""
        graph = self._bridge.wrap_in_hpu_graph(_ShapedModel(self.model, shape))
        with self.model.launch_holder.running(None):
            graph(packed, *before)
        self._graphs[shape] = graph

    @property
    def shapes(self) -> list[PaddedShape]:
        """The shapes that have a graph, in the order of their capture."""
        return list(self._graphs)

    def release(self, shape: PaddedShape) -> None:
        """Discard the graph of a shape, if it has one, and free its memory."""
        graph: Any = self._graphs.pop(shape, None)
        if graph is not None:
            graph.clear_cache()


class _ShapedModel(nn.Module):
    """The model for forward passes of one shape: only tensors vary between calls.

    There is one module per shape, because a bridge can only discard all graphs of a module.
    """

    def __init__(self, model: LaunchModel, shape: PaddedShape) -> None:
        super().__init__()
        self._model = model
        self._shape = shape

    def forward(self, packed: Tensor, *before: Tensor) -> Outputs:
        return self._model(packed, self._shape, *before)


class CompiledExecution(Execution):
    """Runs the model with torch.compile and the backend of the bridge.

    Compiled are each layer and the modules outside the layers separately, or all together.

    Args:
        config: `config.hpu` has the options.
    """

    name = "torch.compile"
    has_recipes = True

    def __init__(self, bridge: HabanaBridge, model: LaunchModel, config: VllmConfig) -> None:
        super().__init__(bridge, model)
        options: dict[str, Any] = {"fullgraph": config.hpu.compile_fullgraph, "dynamic": False}
        if config.hpu.compile_dynamic_shapes:
            # torch may trace with symbolic sizes, but each recipe is still compiled for concrete
            # sizes.
            options |= {"dynamic": None, "options": {"force_static_compile": True}}
        if config.hpu.regional_compilation:
            self._compiled: Any = model
            model.compile_regions(bridge, **options)
        else:
            self._compiled = bridge.compile(model, **options)

    def _run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        return self._compiled(packed, shape, *before)

    def allow_shapes(self, num_shapes: int) -> None:
        """Raise torch's limit on recompilations of a function to fit the number of shapes.

        Layers share the compiled code, and there may be variants of a layer, for example with a
        sliding window. So the limit counts every layer.
        """
        dynamo: Any = torch._dynamo.config
        wanted = 1 + num_shapes * (1 + len(self.model.model.layers))
        # These are the names of torch 2.6; newer versions still accept them next to
        # `recompile_limit`.
        dynamo.cache_size_limit = max(dynamo.cache_size_limit, wanted)
        dynamo.accumulated_cache_size_limit = max(dynamo.accumulated_cache_size_limit, 8 * wanted)

    def forbid_recompilation(self) -> None:
        """Skip the guards; torch then raises an error instead of compiling."""
        torch.compiler.set_stance(skip_guard_eval_unsafe=True)


def make_execution(bridge: HabanaBridge, model: LaunchModel, config: VllmConfig) -> Execution:
    """Make the execution for the bridge's mode and `enforce_eager`."""
    is_eager = config.model.enforce_eager
    if bridge.is_lazy:
        # With several cards, a step is marked before each all-reduce, and a layer ends with one.
        # A mark after the layer would make a recipe with nothing but this all-reduce.
        has_marks = config.parallel.tensor_parallel_size > 1
        layers = None if has_marks else config.hpu.hidden_layers_per_graph
        bridge.disable_compiler()  # code of libraries that calls torch.compile runs uncompiled
        kind = LazyExecution if is_eager else GraphExecution
        return kind(bridge, model, layers)
    return Execution(bridge, model) if is_eager else CompiledExecution(bridge, model, config)
