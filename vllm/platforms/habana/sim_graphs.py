"""HPU graphs of the simulated card: one capture per input signature, then replays.

Follows newer bridges, which tell graphs apart by type as well as by shape. Inputs are bound anew
at each replay (`disable_tensor_cache=True`); outputs are static buffers.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from vllm.platforms.habana import sim_spec
from vllm.platforms.habana.sim_card import SimulatedCard
from vllm.platforms.habana.sim_device import HpuTensor, set_tape
from vllm.platforms.habana.sim_memory import Lease
from vllm.platforms.habana.sim_tape import Tape


class CapturedGraph:
    """One graph: what was captured, its static outputs, and the memory it holds."""

    def __init__(
        self,
        card: SimulatedCard,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        inputs = _device_tensors((args, kwargs))
        tape = Tape([x.raw for x in inputs])
        with card.capturing() as capture:
            set_tape(tape)
            try:
                outputs = forward(*args, **kwargs)
            finally:
                set_tape(None)
        self.outputs = outputs
        self._static = _device_tensors(outputs)
        owned = {x.raw.untyped_storage()._cdata for x in inputs}
        # What was written into an input is there already; nothing must be written to the old one.
        self._is_alias = [x.raw.untyped_storage()._cdata in owned for x in self._static]
        tape.end([x.raw for x in self._static])
        self._card = card
        self._tape = tape
        self._capture = capture
        self._lease = Lease(card.memory, capture.num_ops * sim_spec.GRAPH_BYTES_PER_OP)

    @property
    def num_bytes(self) -> int:
        """Memory that stays taken: the graph itself and its outputs."""
        own = {x.raw.untyped_storage()._cdata: x.raw for x in self._static}
        return self._lease.num_bytes + sum(x.untyped_storage().nbytes() for x in own.values())

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Run on new inputs of the same shapes; the outputs are those of the capture, overwritten.

        Raises:
            RuntimeError: a shape or a type differs from the capture's.
        """
        inputs = [x.raw for x in _device_tensors((args, kwargs))]
        with torch.inference_mode():
            results = self._tape.replay(inputs)
            for output, result, is_alias in zip(self._static, results, self._is_alias, strict=True):
                if result is not None and not is_alias:
                    output.raw.copy_(result)
        self._card.replay(self._capture)
        return self.outputs


def wrap_in_hpu_graph(module: nn.Module, card: SimulatedCard) -> nn.Module:
    """Give `module` a forward that captures and replays, and a `clear_cache`."""
    graphs: dict[int, CapturedGraph] = {}
    forward = module.forward

    @functools.wraps(forward)
    def replaying(
        *args: Any, warmup_mode: bool = False, bypass_hpu_graphs: bool = False, **kwargs: Any
    ) -> Any:
        if bypass_hpu_graphs:
            return forward(*args, **kwargs)
        key = input_hash((args, kwargs))
        graph = graphs.get(key)
        if graph is None:
            graph = graphs[key] = CapturedGraph(card, forward, args, kwargs)
            return graph.outputs
        if warmup_mode:
            card.mark_step()
            return graph.outputs
        return graph.replay(*args, **kwargs)

    module.forward = replaying
    module.clear_cache = graphs.clear  # type: ignore[assignment]
    return module


def input_hash(value: Any) -> int:
    """What a graph is found by: tensors by shape, type and layout, all else by its own hash.

    As in the bridge, equal hashes are taken for equal inputs: True, 1 and 1.0 are one graph.
    """
    if isinstance(value, torch.Tensor):
        return hash((tuple(value.shape), value.stride(), value.storage_offset(), value.dtype))
    if isinstance(value, dict):
        return hash(tuple((input_hash(k), input_hash(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return hash(tuple(input_hash(x) for x in value))
    if is_dataclass(value) and not isinstance(value, type):
        return hash(tuple(input_hash(getattr(value, f.name)) for f in fields(value)))
    return hash(value)


def _device_tensors(value: Any) -> list[HpuTensor]:
    return list(_walk(value))


def _walk(value: Any) -> Iterator[HpuTensor]:
    if isinstance(value, HpuTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        yield from _walk(vars(value))
