"""The interface of a worker whose KV blocks can be copied out and back."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol

from torch import Tensor

from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.model_executor.model_memory import fingerprint
from vllm.version import __version__


class BlockStore(Protocol):
    """Access to the KV caches of some layers, block by block.

    Attributes:
        block_bytes: bytes of one block in all layers.
    """

    block_bytes: int

    @property
    def layout(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of a block in each of the caches."""
        ...

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each block, all layers concatenated."""
        ...

    def write(self, block_ids: Sequence[int], blocks: Sequence[bytes]) -> bool:
        """Write blocks that `read` has returned.

        Returns False, and writes nothing, if a block has the wrong size.
        """
        ...


def has_uncopied_states() -> ConfigError:
    """Make the error for a model that has recurrent state in addition to its KV cache."""
    return ConfigError(
        "kv_transfer_config is not supported for this model: the recurrent state of its Mamba or "
        "DeltaNet layers is not transferred. Leave it out"
    )


def hash_contents(
    config: VllmConfig,
    rank: int,
    blocks: BlockStore,
    weights: Iterable[Tensor],
    scales: Sequence[tuple[list[float], list[float]]],
    kernels: str,
) -> bytes:
    """Hash everything except tokens that the content of KV blocks depends on.

    That is the weights, the layout of the blocks, the scales and the kernels. Two engines may
    exchange blocks only if their hashes are equal.

    Args:
        config: config of the engine.
        rank: rank of the worker.
        blocks: blocks of this rank.
        weights: [num_bytes] uint8 each, on the CPU.
        scales: scales of the keys and the values of each layer, one for each head.
        kernels: name of the kernels that compute.
    """
    digest = sha256()
    for weight in weights:
        digest.update(fingerprint(weight))
    layout = (
        *(__version__, kernels, config.model.dtype_name, config.cache.kv_cache_dtype),
        *(config.cache.block_size, rank, blocks.layout, scales, config.model.resolved_arch),
        *(config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size),
    )
    digest.update(repr(layout).encode())
    return digest.digest()
