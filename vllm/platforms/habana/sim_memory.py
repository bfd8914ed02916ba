"""The memory pool of a simulated card: which tensors hold how many bytes, and what is free.

Bytes are counted when a tensor is made, also in lazy mode, where a card allocates at launch.
Intermediates count while they live; there is no separate workspace and no fragmentation.
"""

from weakref import ref

import torch
from torch._subclasses import FakeTensor

from vllm.platforms.habana.bridge import OUT_OF_MEMORY_TEXT


class Lease:
    """Bytes of the pool, given back when nothing refers to this object any more."""

    __slots__ = ("__weakref__", "_pool", "_storage", "num_bytes")

    def __init__(self, pool: "MemoryPool", num_bytes: int, storage: int | None = None) -> None:
        """
        Args:
            storage: the address that the pool knows the storage by.
        """
        self.num_bytes = 0  # nothing to free if the pool refuses
        self._pool = pool
        self._storage = storage
        if num_bytes:
            pool.reserve(num_bytes)
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        if self.num_bytes:
            self._pool.give_back(self.num_bytes)
        if self._storage is not None:
            self._pool.forget(self._storage)


class MemoryPool:
    """Accounts for every live tensor of the device once per storage."""

    def __init__(self, limit_bytes: int, *, narrow_int64: bool) -> None:
        """
        Args:
            narrow_int64: int64 is kept as int32, as a card in lazy mode does.
        """
        self.limit_bytes = limit_bytes
        self.in_use_bytes = 0
        self.max_in_use_bytes = 0
        self._narrow_int64 = narrow_int64
        self._num_allocs = 0
        self._num_frees = 0
        self._max_alloc_bytes = 0
        self._leases: dict[int, ref[Lease]] = {}

    def lease_of(self, raw: torch.Tensor) -> Lease:
        """The lease of the storage under `raw`: views share one."""
        if type(raw) is FakeTensor:  # Dynamo only asks for shapes
            return Lease(self, 0)
        storage = raw.untyped_storage()
        address = storage._cdata
        known = self._leases.get(address)
        lease = None if known is None else known()
        if lease is None:
            lease = Lease(self, self.device_bytes(storage.nbytes(), raw.dtype), address)
            self._leases[address] = ref(lease)
        return lease

    def forget(self, address: int) -> None:
        """Drop the entry of a freed lease, unless another storage has the same address now."""
        known = self._leases.get(address)
        if known is not None and known() is None:
            del self._leases[address]

    def device_bytes(self, num_bytes: int, dtype: torch.dtype) -> int:
        """What a tensor of `num_bytes` on the host takes on the card."""
        return num_bytes // 2 if dtype == torch.int64 and self._narrow_int64 else num_bytes

    def check(self, num_bytes: int) -> None:
        """Raise what the bridge raises when `num_bytes` do not fit."""
        if self.in_use_bytes + num_bytes > self.limit_bytes:
            raise RuntimeError(
                f"{OUT_OF_MEMORY_TEXT}{num_bytes} ({num_bytes // 2**20})MB; simulated card: "
                f"{self.in_use_bytes} of {self.limit_bytes} bytes are in use"
            )

    def reserve(self, num_bytes: int) -> None:
        self.check(num_bytes)
        self.in_use_bytes += num_bytes
        self.max_in_use_bytes = max(self.max_in_use_bytes, self.in_use_bytes)
        self._max_alloc_bytes = max(self._max_alloc_bytes, num_bytes)
        self._num_allocs += 1

    def give_back(self, num_bytes: int) -> None:
        self.in_use_bytes -= num_bytes
        self._num_frees += 1

    def reset_peak(self) -> None:
        self.max_in_use_bytes = self.in_use_bytes

    def stats(self) -> dict[str, int]:
        """The ten keys of `torch.hpu.memory_stats`; nothing is taken from the system."""
        return {
            "Limit": self.limit_bytes,
            "InUse": self.in_use_bytes,
            "MaxInUse": self.max_in_use_bytes,
            "NumAllocs": self._num_allocs,
            "NumFrees": self._num_frees,
            "ActiveAllocs": self._num_allocs - self._num_frees,
            "MaxAllocSize": self._max_alloc_bytes,
            "TotalSystemAllocs": 0,
            "TotalSystemFrees": 0,
            "TotalActiveAllocs": 0,
        }
