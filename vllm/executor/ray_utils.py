"""The Ray cluster of an engine. Ray is the extra `vllm[ray]`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from vllm import envs
from vllm.config import ParallelConfig
from vllm.errors import ConfigError

_caretakers: list[subprocess.Popen[bytes]] = []
"""Of the local cluster of this process, if it has started one."""


def import_ray() -> Any:
    """The package `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray, which cannot be imported ({error}). "
            f"Install it with: pip install 'vllm[ray]'; or use 'mp' for workers on one machine"
        ) from None
    return ray


def initialize_ray_cluster(
    parallel_config: ParallelConfig | None = None, ray_address: str | None = None
) -> None:
    """Join a Ray cluster: the one of `ray_address` or RAY_ADDRESS, or one that runs on this
    machine; else start one. Nothing happens in a process that has joined one.

    Args:
        parallel_config: of the engine that will use the cluster; not read, an engine takes what it
            needs when it starts.
        ray_address: such as auto or 10.0.0.1:6379.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    before = _processes_below()
    try:
        ray.init(address=ray_address, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"no Ray cluster could be joined or started: {reason}. Start one with `ray start "
            f"--head`, and set RAY_ADDRESS if it runs on another machine"
        ) from error
    if cluster := _processes_below() - before:
        program = Path(__file__).with_name("ray_caretaker.py")
        names = [f"{each.pid}:{each.create_time()}" for each in cluster]
        command = [sys.executable, str(program), *names]
        _caretakers.append(subprocess.Popen(command, stdin=subprocess.PIPE))


def leave_ray_cluster() -> None:
    """Leave the cluster of this process; one that it has started ends."""
    import_ray().shutdown()
    while _caretakers:
        caretaker = _caretakers.pop()
        caretaker.communicate()


def _processes_below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def worker_environment() -> dict[str, str]:
    """The variables of this process that workers on other machines get."""
    return envs.passed_on()
