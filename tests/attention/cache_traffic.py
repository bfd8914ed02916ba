"""Count the bytes that the operators of a forward pass move to and from the KV cache."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CacheTraffic(TorchDispatchMode):
    """Count the bytes as if no operator were fused with another one.

    It counts the reads of a cache and of copies of it. The result of an operator that reads the
    cache counts as such a copy, unless it is the result of a matmul.

    Attributes:
        read_bytes, written_bytes: so far.
    """

    def __init__(self, *caches: Tensor) -> None:
        super().__init__()
        # While the caches are held, no other tensor can get their addresses.
        self._kept = list(caches)
        self._addresses = {x.untyped_storage().data_ptr() for x in caches}
        self.read_bytes = self.written_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes read and written."""
        return self.read_bytes + self.written_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        cached = [x for x in operands if x.untyped_storage().data_ptr() in self._addresses]
        if func.is_view or not cached:
            return result
        name = func.name()
        if name.startswith("aten::index_copy"):
            self.written_bytes += args[3].nbytes
            return result
        is_gather = name.startswith("aten::index_select")
        self.read_bytes += result.nbytes if is_gather else sum(x.nbytes for x in cached)
        # The result of bmm holds scores or a weighted sum, not keys or values.
        if not name.startswith("aten::bmm"):
            self.written_bytes += result.nbytes
            self._kept.append(result)
            self._addresses.add(result.untyped_storage().data_ptr())
        return result
