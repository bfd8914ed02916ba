"""Create files in memory, through which processes share data. They have no name in any folder."""

import os

from vllm.errors import ConfigError


def memory_file(name: str) -> int:
    """Return the descriptor of an empty file in memory. It is freed when the last descriptor is
    closed, at the latest by the system when a process exits.

    Args:
        name: name that `/proc` shows.

    Raises:
        ConfigError: the system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            "tensor_parallel_size and pipeline_parallel_size above 1, and media in requests, need "
            "Linux (memfd_create). Leave them out on this system"
        )
    return os.memfd_create(name)
