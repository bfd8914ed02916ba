"""Sleep mode on the CPU, where weights are in host memory anyway.

All memory keeps its address while it is released (`utils/process/process_memory`), so kernels that
store addresses of weights and caches are not affected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm.attention import CachedLayer
from vllm.errors import ConfigError, WeightLoadError
from vllm.logger import init_logger
from vllm.model_executor.model_memory import copy_cache_scales, fingerprint, model_storages
from vllm.utils.process.process_memory import can_discard, discard, release_freed_memory
from vllm.worker.sleep import BuildModel

logger = init_logger(__name__)


def check_can_sleep() -> None:
    """Check that this system supports sleep mode.

    Raises:
        ConfigError: the system is not Linux.
    """
    if not can_discard():
        raise ConfigError("enable_sleep_mode=True needs Linux on the CPU. Leave it out")


class HostWeights:
    """The weights of a model in host memory, which are restored from the checkpoint.

    There is no other memory to save them in. So weights that differ from the checkpoint are not
    released if their content must be kept.

    Args:
        model: loaded, its weights packed.
        folder: folder of the checkpoint.
        build: loads a checkpoint into a new model.
        can_sleep: `release` will be called, so remember checksums of the weights now.
    """

    def __init__(
        self, model: nn.Module, folder: str, build: BuildModel, *, can_sleep: bool
    ) -> None:
        self._model = model
        self._folder = folder
        self._build = build
        self._can_sleep = can_sleep
        self._storages = model_storages(model)
        self._loaded = self._fingerprints() if can_sleep else []
        self._is_released = False
        self._must_be_as_loaded = False

    def release(self, *, keep: bool) -> None:
        """Release the weights, unless they must be kept and differ from the checkpoint."""
        self._must_be_as_loaded = keep
        if self._is_released:
            return
        if keep and self._fingerprints() != self._loaded:
            logger.warning(
                "The weights were changed after they were loaded, so sleep level 1 keeps them in "
                "memory: the files of the checkpoint do not have the changes. Use level 2 to "
                "release them."
            )
            return
        for storage in self._storages:
            _discard(storage)
        release_freed_memory()
        self._is_released = True

    def restore(self) -> None:
        """Read the checkpoint again, into the same memory.

        Raises:
            WeightLoadError: it cannot be read, or its weights have changed although they had to be
                kept.
        """
        if not self._is_released:
            return
        self._read(self._folder)
        if self._must_be_as_loaded and self._fingerprints() != self._loaded:
            for storage in self._storages:
                _discard(storage)
            raise WeightLoadError(
                f"the weights in {self._folder} differ from the weights that were loaded before "
                "sleep level 1. Put the old files back, or call sleep with level 2, which keeps "
                "nothing, and wake up again"
            )
        self._is_released = False
        self._note()

    def reload(self, folder: str | None) -> None:
        """Read the weights again, optionally from another folder; see `SleepingWeights.reload`."""
        if self._is_released:
            self._folder = folder or self._folder
            self._must_be_as_loaded = False
            return
        self._read(folder or self._folder)
        self._folder = folder or self._folder
        self._note()

    @torch.no_grad()
    def _read(self, folder: str) -> None:
        """Copy the weights of a checkpoint folder into the memory of the model."""
        fresh_model = self._build(folder)
        fresh = model_storages(fresh_model)
        sizes = [[len(storage) for storage in storages] for storages in (self._storages, fresh)]
        assert sizes[0] == sizes[1], "two models of one config have other memory"
        for ours, new in zip(self._storages, fresh, strict=True):
            assert ours.data_ptr() != new.data_ptr(), "two models share a tensor"
            ours.copy_(new)
            _discard(new)  # frees the new weights, so that the model is not in memory twice
        copy_cache_scales(fresh_model, self._model)
        del fresh_model, fresh, new
        release_freed_memory()

    def _note(self) -> None:
        if self._can_sleep:
            self._loaded = self._fingerprints()

    def _fingerprints(self) -> list[bytes]:
        return [fingerprint(storage) for storage in self._storages]


class HostCache:
    """The KV cache of some layers in host memory. It is empty after `restore`.

    Args:
        layers: layers with their caches bound.
        kept_states: other tensors with data of tokens, such as hidden states.
    """

    def __init__(self, layers: Sequence[CachedLayer], kept_states: Sequence[Tensor] = ()) -> None:
        self._layers, self._kept_states = layers, kept_states

    def release(self, *, keep: bool) -> None:
        """Release the memory of the caches, whose content is lost."""
        for layer in self._layers:
            for tensor in layer.request_tensors:
                _discard(tensor)
        for states in self._kept_states:
            _discard(states)

    def restore(self) -> None:
        """Do nothing: the system allocates pages again when they are written."""


def _discard(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    discard(storage.data_ptr(), storage.nbytes())
