"""Destroy process groups, for programs that start several engines one after another."""

import gc
import sys

import torch


def destroy_distributed_environment() -> None:
    """Destroy the process groups of torch.distributed. Does nothing if there are none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def destroy_model_parallel() -> None:
    """Destroy nothing: the groups of the workers belong to their engine, which destroys them.

    Programs call it before they delete an `LLM`.
    """


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Destroy the process groups and free the memory that is no longer referenced.

    An engine frees its memory when it is garbage-collected, so call this after `del llm`.

    Args:
        shutdown_ray: whether to leave the Ray cluster, if this process has joined one.
    """
    destroy_distributed_environment()
    ray = sys.modules.get("ray")  # a process that has not imported Ray cannot be in a cluster
    if shutdown_ray and ray is not None:
        ray.shutdown()
    gc.collect()
