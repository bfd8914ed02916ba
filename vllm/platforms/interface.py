"""Define the differences between devices.

A platform answers questions and names the classes for its device. Other code never asks which
platform it runs on: there is no `is_hpu()`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm.config.speculative import LOOKUP_DRAFTS

if TYPE_CHECKING:
    import torch

    from vllm.platforms.habana.card_reading import CardReading


class Platform(ABC):
    """One kind of device. Creating it loads neither torch nor a driver."""

    name: ClassVar[str]
    """Name as in `--device`."""
    device_type: ClassVar[str]
    """Name of the type of `torch.device`."""
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

    def check_present(self, num_ranks: int = 1) -> None:
        """Refuse a device that this machine does not have. Opens nothing.

        Args:
            num_ranks: processes of an engine on this machine, each with a device.

        Raises:
            ConfigError: the device is not present, or there are too few.
        """
        return None

    @property
    def collectives_backend(self) -> str:
        """Name of the torch.distributed backend for tensors on this device."""
        return "gloo"

    def set_replica(self, index: int, count: int, world_size: int) -> None:
        """Choose the devices of this replica among the devices of the machine. Called before they
        are used.
        """
        return None

    def set_rank(
        self,
        rank: int,
        world_size: int,
        local_rank: int | None = None,
        num_local_ranks: int | None = None,
    ) -> None:
        """Choose the device of this process among several. Called before it is used.

        Args:
            rank, world_size: rank of this process, and the number of processes.
            local_rank, num_local_ranks: the same, counted among the processes that see the same
                devices; None: all processes are on this machine.
        """
        return None

    def card_reader(self, num_ranks: int) -> "Callable[[], Sequence[CardReading]] | None":
        """Return a function that reads the sensors of an engine's cards, in any process; it may
        block. None: the device has no sensors.

        Args:
            num_ranks: number of engine processes on this machine, each with a card.
        """
        return None

    @property
    @abstractmethod
    def ops_class(self) -> str:
        """Class of the operator table, as "module:Class"."""

    @property
    def quantizations(self) -> tuple[str, ...]:
        """Formats to which unquantized weights can be rounded while they are loaded."""
        return ()

    @property
    def head_quantizations(self) -> tuple[str, ...]:
        """Formats to which only an unquantized output head can be rounded while it is loaded."""
        return ()

    @property
    def can_run_draft_models(self) -> bool:
        """Whether the worker of the platform can run a second model for drafts."""
        return False

    @property
    def can_run_speculators(self) -> bool:
        """Whether the runner can pass hidden states of the model to a network for drafts."""
        return False

    def max_lookup_drafts(self, max_num_seqs: int) -> int:
        """Return the default number of drafts per request and step for the methods ngram and
        suffix.

        Args:
            max_num_seqs: maximum number of running requests.
        """
        return LOOKUP_DRAFTS

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the free device memory that this process can allocate, in bytes."""

    @abstractmethod
    def allocate_cache(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Allocate a zeroed tensor on the device for the KV cache.

        Raises:
            MemoryError: not enough device memory is free.
        """
