"""Store KV blocks outside of the KV cache: in host memory, in files, and in other engines."""

from vllm.distributed.kv_transfer.interface import BlockData, KVConnector

__all__ = ["BlockData", "KVConnector"]
