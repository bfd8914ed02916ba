"""The differences between devices.

A platform answers questions and names the classes that serve it. Code above it never asks which
platform it runs on: there is no `is_hpu()`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm.config.speculative import LOOKUP_DRAFTS

if TYPE_CHECKING:
    import torch

    from vllm.platforms.card_reading import CardReading


class Platform(ABC):
    """One kind of device. Making one loads neither torch nor a driver."""

    name: ClassVar[str]
    """As in `--device`."""
    device_type: ClassVar[str]
    """Of `torch.device`."""
    default_block_size: ClassVar[int]
    default_max_num_seqs: ClassVar[int]
    default_max_num_batched_tokens: ClassVar[int]
    default_max_step_ms: ClassVar[int]
    worker_class: ClassVar[str]
    """module:Class of the worker that drives this device."""
    is_asynchronous: ClassVar[bool]
    """A worker starts a step and returns; False: it returns when the step is computed."""
    needs_static_shapes: ClassVar[bool]
    """Each launch has the shape of a bucket; False: any shape."""
    kv_cache_dtypes: ClassVar[tuple[str, ...]]
    """Values of `--kv-cache-dtype` that run here."""

    has_own_memory: ClassVar[bool]
    """The device has memory of its own for weights, apart from the host's."""
    has_flat_cache: ClassVar[bool] = False
    """Tensors of the KV cache are [num_blocks * block_size, ...], and written as they are; False:
    [num_blocks, block_size, ...]."""

    can_copy_process: ClassVar[bool] = False
    """A worker may run in a copy of a process that has imported it (`forked_process`)."""

    def check_present(self) -> None:
        """Refuse a device that this machine does not have. Opens nothing.

        Raises:
            ConfigError: there is none.
        """
        return None

    @property
    def collectives_backend(self) -> str:
        """Of torch.distributed, for tensors on this device."""
        return "gloo"

    def set_replica(self, index: int, count: int, world_size: int) -> None:
        """Choose the devices of this replica among the devices of the machine, before they are
        used."""
        return None

    def set_rank(
        self,
        rank: int,
        world_size: int,
        local_rank: int | None = None,
        num_local_ranks: int | None = None,
    ) -> None:
        """Choose the device of this process among several, before it is used.

        Args:
            rank, world_size: of this process, and processes in all.
            local_rank, num_local_ranks: the same among those that see the devices of this process;
                None: all are on this machine.
        """
        return None

    def card_reader(self, num_ranks: int) -> "Callable[[], Sequence[CardReading]] | None":
        """Return what reads the sensors of the cards of an engine, in any process; it may block.
        None: this device has none.

        Args:
            num_ranks: processes of the engine on this machine, each with a card.
        """
        return None

    @property
    @abstractmethod
    def ops_class(self) -> str:
        """module:Class of the operator table."""

    @property
    def quantizations(self) -> tuple[str, ...]:
        """Formats that dense weights can be rounded to while they are loaded."""
        return ()

    @property
    def head_quantizations(self) -> tuple[str, ...]:
        """Return the formats to which only a dense output head can be rounded while it is
        loaded."""
        return ()

    @property
    def can_run_draft_models(self) -> bool:
        """Its worker can run a second model, which makes drafts."""
        return False

    @property
    def can_run_speculators(self) -> bool:
        """Its runner hands hidden states of the model to a network that makes drafts."""
        return False

    def max_lookup_drafts(self, max_num_seqs: int) -> int:
        """Return the default number of drafts of a request in one step for the methods ngram and
        suffix, by the most requests that run."""
        return LOOKUP_DRAFTS

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Free device memory that this process can allocate."""

    @abstractmethod
    def allocate_cache(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Allocate a zeroed tensor on the device for the KV cache.

        Raises:
            MemoryError: not enough device memory is free.
        """
