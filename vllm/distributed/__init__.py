"""Groups of workers and the collectives between them."""

from vllm.distributed.groups import TPGroup, divide

__all__ = ["TPGroup", "divide"]
