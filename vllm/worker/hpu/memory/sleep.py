"""Sleep mode on a card: weights are moved to the host or dropped, the KV cache is dropped.

Tensors get other addresses afterwards. So captured graphs are discarded first, and captured again
after waking up.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from vllm.logger import init_logger
from vllm.model_executor.model_memory import copy_cache_scales, replace_tensors
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.execution import GraphExecution
from vllm.worker.hpu.launches.launches import PaddedRunner
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_profile import MemoryProfile
from vllm.worker.sleep import BuildModel

logger = init_logger(__name__)


class CardWeights:
    """The weights of a model on a card, for sleep mode.

    Args:
        model: loaded, on the card.
        folder: folder of the checkpoint.
        build: loads a checkpoint into a new model in host memory.
        bridge: the card.
    """

    def __init__(
        self, model: nn.Module, folder: str, build: BuildModel, bridge: HabanaBridge
    ) -> None:
        self._model = model
        self._folder = folder
        self._build = build
        self._bridge = bridge
        self._is_released = False
        self._is_on_host = False

    def release(self, *, keep: bool) -> None:
        """Move the weights to the host, or drop them if `keep` is False."""
        with MemoryProfile(self._bridge) as profile:
            if keep:
                replace_tensors(self._model, lambda name, tensor: tensor.cpu())
            else:
                replace_tensors(self._model, lambda name, tensor: _without_memory(tensor))
            self._bridge.synchronize()
        self._is_released, self._is_on_host = True, keep
        logger.info("Moving model to CPU for sleep mode took %s", profile)

    def restore(self) -> None:
        """Move the weights back to the card; dropped ones are read from the checkpoint.

        Raises:
            WeightLoadError: the checkpoint cannot be read.
        """
        with MemoryProfile(self._bridge) as profile:
            if self._is_on_host:
                device = self._bridge.device
                replace_tensors(self._model, lambda name, tensor: tensor.to(device))
            else:
                self._read(self._folder)
            self._bridge.synchronize()
        self._is_released = self._is_on_host = False
        logger.info("Waking up model, moving it back to HPU took %s", profile)

    def reload(self, folder: str | None) -> None:
        """Read the weights again, optionally from another folder; see `SleepingWeights.reload`."""
        folder = folder or self._folder
        if self._is_released:
            self._is_on_host = False
            replace_tensors(self._model, lambda name, tensor: _without_memory(tensor))
        else:
            self._read(folder)
        self._folder = folder

    @torch.no_grad()
    def _read(self, folder: str) -> None:
        """Load the weights of a checkpoint folder to the card, into existing memory if there is
        any.
        """
        fresh = self._build(folder)
        tensors = dict([*fresh.named_parameters(), *fresh.named_buffers()])

        def load(name: str, tensor: Tensor) -> Tensor:
            new = tensors.pop(name).detach()
            if tensor.is_meta:
                return new.to(self._bridge.device)
            return tensor.copy_(new)

        replace_tensors(self._model, load)
        copy_cache_scales(fresh, self._model)
        self._bridge.mark_step()


class CardCache:
    """The KV cache on a card, for sleep mode. It is empty after waking up.

    Args:
        bridge: the card.
        drop: frees the cache.
        bind: allocates it again.
    """

    def __init__(
        self, bridge: HabanaBridge, drop: Callable[[], None], bind: Callable[[], None]
    ) -> None:
        self._bridge = bridge
        self._drop = drop
        self._bind = bind

    def release(self, *, keep: bool) -> None:
        """Free the memory of the cache."""
        with MemoryProfile(self._bridge) as profile:
            self._drop()
        logger.info("Discarding KV cache for sleep mode took %s", profile)

    def restore(self) -> None:
        """Allocate the cache again."""
        with MemoryProfile(self._bridge) as profile:
            self._bind()
        logger.info("Waking up KV cache, reinitializing it took %s", profile)


class EncoderGraphs(Protocol):
    """The HPU graphs of an encoder of images or sounds."""

    @property
    def graph_sizes(self) -> list[int]:
        """Return the sizes that have a graph, in the order of their capture."""
        ...

    def capture(self, size: int) -> None:
        """Capture the graph of a size."""
        ...

    def release(self, size: int) -> None:
        """Discard the graph of a size."""
        ...


class SleepingGraphs:
    """Discards and restores the HPU graphs of a runner for sleep mode.

    Args:
        runner: warmed up.
        encoder: encoder of images or sounds; None: the model reads text only.
    """

    def __init__(self, runner: PaddedRunner, encoder: EncoderGraphs | None = None) -> None:
        self._runner, self._encoder = runner, encoder
        self._shapes: list[PaddedShape] = []
        self._encoder_sizes: list[int] = []

    def release(self) -> None:
        """Discard all graphs, because they contain addresses of weights and cache."""
        execution = self._runner.launches.execution
        if isinstance(execution, GraphExecution):
            self._shapes += execution.shapes
            for shape in execution.shapes:
                self._runner.launches.release(shape)
        if self._encoder is not None:
            self._encoder_sizes += self._encoder.graph_sizes
            for size in self._encoder.graph_sizes:
                self._encoder.release(size)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the discarded graphs again. Their recipes are compiled already."""
        execution = self._runner.launches.execution
        while self._shapes:
            assert isinstance(execution, GraphExecution)
            shape = self._shapes.pop(0)
            self._runner.launches.capture(shape)
            self._runner.warm_up(shape, sampling="none")
        while self._encoder_sizes:
            assert self._encoder is not None
            self._encoder.capture(self._encoder_sizes.pop(0))


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
