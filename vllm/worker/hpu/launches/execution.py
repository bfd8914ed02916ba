"""The four ways to run a model on Gaudi.

                       enforce_eager off            enforce_eager on
    PT_HPU_LAZY_MODE=0  torch.compile                eager
    PT_HPU_LAZY_MODE=1  HPU graphs                   lazy: recorded up to a mark

Whichever it is, the caller sees one object that runs a launch.
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
    """Runs launches operator by operator: eager, or lazy up to a mark.

    Args:
        bridge: the card.
        model: padded launches.
    """

    name = "eager"
    has_recipes = False
    """A launch is compiled as one program, or a few."""

    def __init__(self, bridge: HabanaBridge, model: LaunchModel) -> None:
        self._bridge = bridge
        self.model = model

    def run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        """Run one launch; the outputs are overwritten by the next launch of the same shape.

        Args:
            packed: input of the launch.
            shape: of the launch.
            before: [B * Q, hidden], what the stage of the pipeline before this one has returned;
                nothing for the first.
        """
        # Clears the context also if the forward pass raises.
        with self.model.launch_holder.running(None):
            return self._run(packed, shape, *before)

    def _run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        outputs: Outputs = self.model(packed, shape, *before)
        self._bridge.mark_step()
        return outputs

    def how(self, shape: PaddedShape) -> str:
        """Describe how a launch of this shape runs, for a trace."""
        return self.name

    def allow_shapes(self, num_shapes: int) -> None:
        """Prepare the compiler, if there is one, for launches of so many shapes."""

    def forbid_recompilation(self) -> None:
        """Note that everything has run once; a compiler may skip its guards from now on."""


class LazyExecution(Execution):
    """Operators are recorded; a mark after every few layers lets the device start on them.

    Args:
        layers_per_mark: decoder layers between two marks.
    """

    name = "lazy"
    has_recipes = True

    def __init__(self, bridge: HabanaBridge, model: LaunchModel, layers_per_mark: int) -> None:
        super().__init__(bridge, model)
        for number, layer in enumerate(model.model.layers, start=1):
            if number % layers_per_mark == 0:
                layer.register_forward_hook(self._mark)

    def _mark(self, module: nn.Module, args: Any, output: Any) -> None:
        self._bridge.mark_step()


class GraphExecution(LazyExecution):
    """Launches with a captured graph replay it; the others run lazily."""

    name = "HPU graphs"

    def __init__(self, bridge: HabanaBridge, model: LaunchModel, layers_per_mark: int) -> None:
        super().__init__(bridge, model, layers_per_mark)
        self._graphs: dict[PaddedShape, nn.Module] = {}

    def _run(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Outputs:
        graph = self._graphs.get(shape)
        if graph is None:
            return super()._run(packed, shape, *before)
        outputs: Outputs = graph(packed, *before)
        return outputs

    def how(self, shape: PaddedShape) -> str:
        """Return whether a launch of this shape is replayed or run lazily, for a trace."""
        return "replay" if shape in self._graphs else LazyExecution.name

    def capture(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> None:
        """Record the graph of a shape; the arguments are those of `run`."""
        graph = self._bridge.wrap_in_hpu_graph(_ShapedModel(self.model, shape))
        with self.model.launch_holder.running(None):
            graph(packed, *before)
        self._graphs[shape] = graph

    @property
    def shapes(self) -> list[PaddedShape]:
        """Return the shapes that have a graph, in the order of their capture."""
        return list(self._graphs)

    def release(self, shape: PaddedShape) -> None:
        """Throw the graph of a shape away, if it has one, and the memory it holds."""
        graph: Any = self._graphs.pop(shape, None)
        if graph is not None:
            graph.clear_cache()


class _ShapedModel(nn.Module):
    """The model for launches of one shape: only tensors vary between calls.

    One module per shape, because a bridge can throw away only all graphs of a module.
    """

    def __init__(self, model: LaunchModel, shape: PaddedShape) -> None:
        super().__init__()
        self._model = model
        self._shape = shape

    def forward(self, packed: Tensor, *before: Tensor) -> Outputs:
        outputs: Outputs = self._model(packed, self._shape, *before)
        return outputs


class CompiledExecution(Execution):
    """torch.compile with the backend of the bridge: of each layer and of the modules outside the
    layers, or of all together.

    Args:
        config: `config.hpu` has the options.
    """

    name = "torch.compile"
    has_recipes = True

    def __init__(self, bridge: HabanaBridge, model: LaunchModel, config: VllmConfig) -> None:
        super().__init__(bridge, model)
        options: dict[str, Any] = {
            "fullgraph": config.hpu.compile_fullgraph,
            "dynamic": False,
        }
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
        outputs: Outputs = self._compiled(packed, shape, *before)
        return outputs

    def allow_shapes(self, num_shapes: int) -> None:
        """Raise torch's limit on recompilations of a function, which is meant for dynamic programs.

        Layers share the code that is compiled, and a layer may have variants, for example with a
        sliding window, so the limit counts every layer.
        """
        dynamo: Any = torch._dynamo.config
        wanted = 1 + num_shapes * (1 + len(self.model.model.layers))
        # These are the names of torch 2.6; newer versions still accept them next to
        # `recompile_limit`.
        dynamo.cache_size_limit = max(dynamo.cache_size_limit, wanted)
        dynamo.accumulated_cache_size_limit = max(dynamo.accumulated_cache_size_limit, 8 * wanted)

    def forbid_recompilation(self) -> None:
        """Skip the guards; what would have been compiled raises in torch."""
        torch.compiler.set_stance(skip_guard_eval_unsafe=True)


def make_execution(bridge: HabanaBridge, model: LaunchModel, config: VllmConfig) -> Execution:
    """Make the execution that the mode of the bridge and `enforce_eager` choose."""
    is_eager, layers = config.model.enforce_eager, config.hpu.hidden_layers_per_graph
    if bridge.is_lazy:
        # The bridge's compile backend does not support lazy mode, so torch.compile is disabled:
        # code of libraries that calls it runs uncompiled.
        dynamo: Any = torch._dynamo.config
        dynamo.disable = True
        kind = LazyExecution if is_eager else GraphExecution
        return kind(bridge, model, layers)
    return Execution(bridge, model) if is_eager else CompiledExecution(bridge, model, config)
