"""The messages that subscribers to KV cache events receive, under the name they import them by."""

from vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventBatch

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "KVEventBatch"]
