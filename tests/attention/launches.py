"""Padded forward passes over a random cache, for the tests of this folder."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAN = float("nan")
HUGE = 1e38
UNUSED = (NAN, HUGE)
"""Values of keys and values that no query sees: values have to be finite, and may be anything
else."""


@dataclass
class Cache:
    """Keys and values of some requests in shuffled blocks.

    Slots without a token, including the null block, have NaN as keys and huge values, so that a
    test notices if they are read.
    """

    keys: Tensor
    """[num_blocks, S, G, D]"""
    values: Tensor
    tables: np.ndarray
    seq_lens: np.ndarray

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the layout of HPU, as views of the same memory."""
        return flat(self.keys), flat(self.values)


def flat(cache: Tensor) -> Tensor:
    """Merge the first two dimensions: [num_blocks, S, ...] -> [num_blocks * S, ...]."""
    return cache.view(-1, *cache.shape[2:])


def padded_caches(keys: Tensor, values: Tensor, num_blocks: int) -> list[Tensor]:
    """Return the caches with unused blocks after their own ones, because all caches of a bucket
    have the same size.
    """
    shape = (num_blocks - len(keys), *keys.shape[1:])
    return [
        torch.cat((x, x.new_full(shape, unused)))
        for x, unused in zip((keys, values), UNUSED, strict=True)
    ]


def random_cache(
    seq_lens: list[int],
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
) -> Cache:
    """Make a random cache. All requests share the first `shared_blocks` blocks of the longest
    request.
    """
    lengths = np.array(seq_lens, np.int32)
    max_blocks = max(1, -(-int(lengths.max()) // block_size))
    num_blocks = len(seq_lens) * max_blocks + 3
    ids = torch.randperm(num_blocks - 1)[: len(seq_lens) * max_blocks] + 1
    tables = ids.view(len(seq_lens), max_blocks).numpy().astype(np.int32)
    tables[:, :shared_blocks] = tables[lengths.argmax(), :shared_blocks]
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    keys, values = (torch.full(shape, unused, dtype=dtype) for unused in UNUSED)
    written = set()
    for row in np.argsort(-lengths, kind="stable"):
        for index in range(-(-int(lengths[row]) // block_size)):
            block = int(tables[row, index])
            # The longest request that shares a block fills the most of it, so write the block once.
            if block not in written:
                count = min(block_size, int(lengths[row]) - index * block_size)
                keys[block, :count] = torch.randn(count, *shape[2:]).to(dtype)
                values[block, :count] = torch.randn(count, *shape[2:]).to(dtype)
                written.add(block)
    return Cache(keys, values, tables, lengths)


class StaticOnly(TorchDispatchMode):
    """Fails on every operator that reads a tensor on the host, or whose result has a shape that
    depends on values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        bad = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        assert not bad & set(func.tags), f"{func} is not static"
        if "index" in func.name():
            for tensor in torch.utils._pytree.tree_leaves(args[1:]):
                is_mask = isinstance(tensor, Tensor) and tensor.dtype in (torch.bool, torch.uint8)
                assert not is_mask, f"{func} with a mask"
        return func(*args, **(kwargs or {}))
