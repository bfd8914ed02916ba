"""The memory pool of a simulated card: the bytes of its tensors, and what is free.

Bytes are counted when a tensor is made. In lazy mode, a real card allocates later, at launch.
Tensors that a recipe makes and drops are in the workspace. It is as large as the largest recipe
needs, and is never freed. There is no fragmentation.
"""

from weakref import ref

import torch
from torch._subclasses import FakeTensor

from vllm.platforms.habana.bridge import OUT_OF_MEMORY_TEXT


class Allocation:
    """Bytes of the pool, freed when nothing refers to this object any more."""

    __slots__ = ("__weakref__", "_pool", "_recipe", "_storage", "num_bytes")

    def __init__(self, pool: "MemoryPool", num_bytes: int, storage: int | None = None) -> None:
        """Allocate bytes of the pool.

        Args:
            pool: the pool.
            num_bytes: bytes to allocate.
            storage: address of a tensor's storage, by which the pool knows it; None: it is not a
                tensor, and never in the workspace.
        """
        self.num_bytes = 0  # 0 until allocated: nothing must be freed if the pool refuses
        self._pool = pool
        self._storage = storage
        self._recipe: int | None = None
        if num_bytes:
            self._recipe = pool.reserve(num_bytes, is_tensor=storage is not None)
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        if self.num_bytes:
            self._pool.give_back(self.num_bytes, self._recipe)
        if self._storage is not None:
            self._pool.remove(self._storage)


class MemoryPool:
    """Counts the bytes of every live tensor of the device, once per storage."""

    def __init__(self, limit_bytes: int, *, narrow_int64: bool) -> None:
        """Create an empty pool.

        Args:
            limit_bytes: memory of the card.
            narrow_int64: int64 is stored as int32, as a card in lazy mode does.
        """
        self.limit_bytes = limit_bytes
        self.max_in_use_bytes = 0
        self.workspace_bytes = 0
        self.is_recording = False
        """Tensors are part of a recipe that is not launched yet."""
        self._recipe = 0
        # Tensors that were made outside of recipes, or that outlived their recipe.
        self._resident_bytes = 0
        self._recorded_bytes = 0  # tensors of the current recipe
        self._max_recorded_bytes = 0
        self._narrow_int64 = narrow_int64
        self._num_allocs = 0
        self._num_frees = 0
        self._max_alloc_bytes = 0
        self._leases: dict[int, ref[Allocation]] = {}

    def lease_of(self, raw: torch.Tensor) -> Allocation:
        """Return the allocation of the storage of `raw`; views share one."""
        if type(raw) is FakeTensor:  # Dynamo only asks for the shape
            return Allocation(self, 0)
        storage = raw.untyped_storage()
        address = storage._cdata
        known = self._leases.get(address)
        lease = None if known is None else known()
        if lease is None:
            lease = Allocation(self, self.device_bytes(storage.nbytes(), raw.dtype), address)
            self._leases[address] = ref(lease)
        return lease

    def remove(self, address: int) -> None:
        """Remove a freed allocation, unless another storage has the same address now."""
        known = self._leases.get(address)
        if known is not None and known() is None:
            del self._leases[address]

    def device_bytes(self, num_bytes: int, dtype: torch.dtype) -> int:
        """Return the bytes on the card of a tensor with `num_bytes` on the host."""
        return num_bytes // 2 if dtype == torch.int64 and self._narrow_int64 else num_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes of tensors, graphs and the workspace."""
        return self._resident_bytes + max(self.workspace_bytes, self._recorded_bytes)

    def check(self, num_bytes: int, *, is_kept: bool = False) -> None:
        """Raise the bridge's error if a tensor of `num_bytes` does not fit.

        Args:
            num_bytes: bytes of the tensor.
            is_kept: it is kept after its recipe, so it is not in the workspace.
        """
        wanted = self.in_use_bytes + num_bytes
        if self.is_recording and not is_kept:
            recorded = self._recorded_bytes + num_bytes
            wanted = self._resident_bytes + max(self.workspace_bytes, recorded)
        self._check(wanted, num_bytes)

    def reserve(self, num_bytes: int, *, is_tensor: bool) -> int | None:
        """Allocate memory; return the recipe that it is a part of, or None."""
        is_recorded = self.is_recording and is_tensor
        if is_recorded:
            self.check(num_bytes)
            self._recorded_bytes += num_bytes
            self._max_recorded_bytes = max(self._max_recorded_bytes, self._recorded_bytes)
        else:
            self._check(self.in_use_bytes + num_bytes, num_bytes)
            self._resident_bytes += num_bytes
        self.max_in_use_bytes = max(self.max_in_use_bytes, self.in_use_bytes)
        self._max_alloc_bytes = max(self._max_alloc_bytes, num_bytes)
        self._num_allocs += 1
        return self._recipe if is_recorded else None

    def give_back(self, num_bytes: int, recipe: int | None) -> None:
        """Free memory that `reserve` has allocated for this recipe."""
        if recipe == self._recipe:
            self._recorded_bytes -= num_bytes
        else:
            self._resident_bytes -= num_bytes
        self._num_frees += 1

    def end_recipe(self, *, is_launched: bool) -> None:
        """Move the recipe's live tensors to the results; the others were in the workspace.

        Raises:
            RuntimeError: the workspace does not fit in addition to the results.
        """
        needed = self._max_recorded_bytes - self._recorded_bytes
        self._resident_bytes += self._recorded_bytes
        self._recorded_bytes = self._max_recorded_bytes = 0
        self._recipe += 1
        if is_launched and needed > self.workspace_bytes:
            self._check(self._resident_bytes + needed, needed)
            self.workspace_bytes = needed
        self.max_in_use_bytes = max(self.max_in_use_bytes, self.in_use_bytes)

    def _check(self, wanted_bytes: int, num_bytes: int) -> None:
        if wanted_bytes > self.limit_bytes:
            raise RuntimeError(
                f"{OUT_OF_MEMORY_TEXT}{num_bytes} ({num_bytes // 2**20})MB; simulated card: "
                f"{self.in_use_bytes} of {self.limit_bytes} bytes are in use"
            )

    def reset_peak(self) -> None:
        self.max_in_use_bytes = self.in_use_bytes

    def stats(self) -> dict[str, int]:
        """Return the ten keys of `torch.hpu.memory_stats`."""
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
