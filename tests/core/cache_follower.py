"""Follow the prefix cache of an engine only by its events, as a router does."""

from typing import Any

from tests.reach import cached_blocks_of
from vllm.core.kv.block_hash import is_of_first_group
from vllm.core.kv.cache_events import public_hash
from vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent


class CacheFollower:
    """The blocks that an engine has reported.

    Attributes:
        blocks: hash -> (hash of the block before it, its tokens).
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def follow(self, events: list[CacheEvent]) -> None:
        """Apply events, and check that each of them is possible."""
        for event in events:
            if isinstance(event, BlockStored):
                size, parent = event.block_size, event.parent_block_hash
                assert event.block_hashes and len(event.token_ids) == size * len(event.block_hashes)
                for index, block_hash in enumerate(event.block_hashes):
                    assert block_hash not in self.blocks, "stored twice"
                    tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                    self.blocks[block_hash] = (parent, tokens)
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    assert self.blocks.pop(block_hash, None), "removed and was not there"
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()

    def check(self, pool: Any) -> None:
        """Check that the reported blocks are the ones that the pool can find."""
        assert self.blocks.keys() == {
            public_hash(key) for key in cached_blocks_of(pool) if is_of_first_group(key)
        }
