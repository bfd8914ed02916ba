"""Provide groups of workers and the collectives between them."""

from vllm.distributed.groups import (
    CheckedCollectives,
    Collectives,
    TorchCollectives,
    TPGroup,
    divide,
)
from vllm.distributed.layout import RankLayout, ranks_text
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.distributed.pipeline import CardLink, GlooLink, Link, Stage, place_in_engine
from vllm.distributed.rendezvous import Rendezvous, open_listener

__all__ = [
    "CardLink",
    "CheckedCollectives",
    "Collectives",
    "GlooLink",
    "Link",
    "RankLayout",
    "Rendezvous",
    "Stage",
    "TPGroup",
    "TorchCollectives",
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "divide",
    "open_listener",
    "place_in_engine",
    "ranks_text",
]
