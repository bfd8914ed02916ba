"""Define the interface for storing KV blocks outside of the KV cache of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from vllm.config.kv_transfer import KVTransferConfig

BlockData = list[bytes]
"""The bytes of one block, rank by rank."""


class KVConnector(ABC):
    """A store of KV blocks by the hash of their content.

    The key of a block
    (`vllm.core.kv.block_hash`) covers all tokens up to its end and everything else that determines
    its content. The namespace covers model, weights and layout. So blocks with equal keys are
    interchangeable between engines, and a lost block is computed again. `load` must return exactly
    the saved data: a connector verifies data that could have changed.

    `prefetch` may use threads; all methods are called from one thread.

    Args:
        config: the value of `kv_transfer_config`.

    Attributes:
        block_bytes: bytes of a block in all ranks together, set before `open`; None: not known.
    """

    block_bytes: int | None = None

    def __init__(self, config: KVTransferConfig) -> None:
        self.config = config

    @abstractmethod
    def open(self, namespace: str) -> None:
        """Use this namespace from now on.

        Also called when the weights may have changed: blocks of the previous namespace must not be
        found any more.
        """

    @abstractmethod
    def prefetch(self, keys: Sequence[bytes]) -> "Future[None] | None":
        """Load blocks into fast storage in the background.

        Args:
            keys: consecutive blocks of one prompt.

        Returns:
            A future that is done when `load` would be fast; it never fails. None: there is nothing
            to do.
        """

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> list[BlockData]:
        """Return the blocks with these keys, up to the first one that is missing or damaged."""

    @abstractmethod
    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the indices of the keys whose blocks should be saved."""

    @abstractmethod
    def save(self, keys: Sequence[bytes], blocks: Sequence[BlockData]) -> "Future[None] | None":
        """Save blocks. A block that cannot be saved is dropped.

        Returns:
            A future that is done when other engines can find the blocks; the requests that computed
            them do not finish before. None: nothing has to wait.
        """

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop blocks whose content is wrong; unknown keys are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Finish writing, and release everything."""
