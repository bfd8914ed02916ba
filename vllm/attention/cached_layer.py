"""Define layers that store data of each token, and the memory for it."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.kv_cache_spec import CacheKind, KVCacheSpec


class CachedLayer(nn.Module, ABC):
    """A layer that describes the data it stores, and gets the memory for it."""

    cache_names: ClassVar[tuple[str, ...]]
    """Attributes for the tensors of the cache, in the order of `KVCacheSpec.tensors`; None while
    no cache is bound."""

    scale_names: ClassVar[tuple[str, ...]] = ()
    """Attributes with the scales of an fp8 cache: no weights, but they decide what it holds."""

    input_names: ClassVar[tuple[str, ...]] = ()
    """Attributes with inputs of requests that the layer keeps outside of its cache."""

    cache_group: int = 0
    """Index of the group of layers whose block tables this one reads."""

    @abstractmethod
    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return the description of the layer's cache, with this dtype."""

    @property
    def kv_caches(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; empty while no cache is bound."""
        tensors = (getattr(self, name) for name in self.cache_names)
        return tuple(tensor for tensor in tensors if tensor is not None)

    @property
    def request_tensors(self) -> tuple[Tensor, ...]:
        """All tensors in which the layer stores data of requests."""
        return self.kv_caches

    def bind_kv_cache(self, *tensors: Tensor) -> None:
        """Use these tensors as the cache from now on; see `CacheTensor` for their shapes."""
        for name, tensor in zip(self.cache_names, tensors, strict=True):
            setattr(self, name, tensor)

    def release_kv_cache(self) -> None:
        """Drop the references to the cache tensors."""
        for name in self.cache_names:
            setattr(self, name, None)


def layers_with_cache(model: nn.Module) -> list[CachedLayer]:
    """Return the layers with a KV cache, in the order of the model; empty for an encoder."""
    return [
        module
        for module in model.modules()
        if isinstance(module, CachedLayer)
        and module.cache_spec(torch.float32).kind is not CacheKind.NONE
    ]
