"""The interface of a worker whose KV blocks are also kept elsewhere."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol

from torch import Tensor

from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.model_executor.model_memory import fingerprint
from vllm.version import __version__


class BlockStore(Protocol):
    """The caches of some layers, block by block.

    Attributes:
        block_bytes: bytes of one block in all layers.
    """

    block_bytes: int

    @property
    def layout(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and type of a block in each of the caches."""
        ...

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of blocks, layer after layer."""
        ...

    def write(self, block_ids: Sequence[int], blocks: Sequence[bytes]) -> bool:
        """Write blocks that `read` has returned. Returns False, and writes nothing, if one has
        another size."""
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
    """Hash everything but tokens that decides the content of KV blocks: the weights, the layout of
    the blocks, and the kernels.

    Args:
        config: of the engine.
        rank: of the worker.
        blocks: of this rank.
        weights: [num_bytes] uint8 each, on the CPU.
        scales: of the keys and the values of each layer, one for each head.
        kernels: the name of the code that computes.
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
