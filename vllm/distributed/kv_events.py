"""Export the messages that subscribers to KV cache events receive, under their import name in
vLLM.
"""

from vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventBatch

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "KVEventBatch"]
