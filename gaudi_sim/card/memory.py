"""The memory pool of a simulated card: which tensors hold how many bytes, and what is free.

Bytes are counted when a tensor is made, also in lazy mode, where a card allocates at launch. What a
recipe makes and drops again is in the workspace, which is as large as the recipe with the most of
it needs, and is never given back. There is no fragmentation.
"""

from weakref import ref

import torch
from torch._subclasses import FakeTensor

from vllm.platforms.habana.bridge import OUT_OF_MEMORY_TEXT


class Allocation:
    """Bytes of the pool, given back when nothing refers to this object any more."""

    __slots__ = ("__weakref__", "_pool", "_recipe", "_storage", "num_bytes")

    def __init__(self, pool: "MemoryPool", num_bytes: int, storage: int | None = None) -> None:
        """
        Args:
            storage: the address that the pool knows the storage of a tensor by; None: it is no
                tensor, and in no workspace.
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
    """Accounts for every live tensor of the device once per storage."""

    def __init__(self, limit_bytes: int, *, narrow_int64: bool) -> None:
        """
        Args:
            narrow_int64: int64 is kept as int32, as a card in lazy mode does.
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
        """The lease of the storage under `raw`: views share one."""
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
        """Drop the entry of a freed lease, unless another storage has the same address now."""
        known = self._leases.get(address)
        if known is not None and known() is None:
            del self._leases[address]

    def device_bytes(self, num_bytes: int, dtype: torch.dtype) -> int:
        """What a tensor of `num_bytes` on the host takes on the card."""
        return num_bytes // 2 if dtype == torch.int64 and self._narrow_int64 else num_bytes

    @property
    def in_use_bytes(self) -> int:
        """Tensors, graphs and the workspace."""
        return self._resident_bytes + max(self.workspace_bytes, self._recorded_bytes)

    def check(self, num_bytes: int, *, is_kept: bool = False) -> None:
        """Raise what the bridge raises when a tensor of `num_bytes` does not fit.

        Args:
            is_kept: it outlives its recipe, so that it is not in the workspace.
        """
        wanted = self.in_use_bytes + num_bytes
        if self.is_recording and not is_kept:
            recorded = self._recorded_bytes + num_bytes
            wanted = self._resident_bytes + max(self.workspace_bytes, recorded)
        self._check(wanted, num_bytes)

    def reserve(self, num_bytes: int, *, is_tensor: bool) -> int | None:
        """Take memory; the recipe that it is part of, or None."""
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
        """Free what `reserve` has taken for this recipe."""
        if recipe == self._recipe:
            self._recorded_bytes -= num_bytes
        else:
            self._resident_bytes -= num_bytes
        self._num_frees += 1

    def end_recipe(self, *, is_launched: bool) -> None:
        """The tensors of the recipe that live on are its results; the others were in the workspace.

        Raises:
            RuntimeError: the workspace does not fit beside the results.
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
