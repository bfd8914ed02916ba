"""Groups of workers and the collectives between them."""

from vllm.distributed.groups import TPGroup, divide
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
)

__all__ = [
    "TPGroup",
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "divide",
]
