"""Join or start the Ray cluster of an engine. Ray is the extra `vllm[ray]`."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from vllm import envs
from vllm.config import ParallelConfig
from vllm.errors import ConfigError
from vllm.executor.ray import caretaker

_CONNECT_TIMEOUT_S = 10.0
"""Seconds to wait for the head of a cluster to accept a connection. Ray itself tries for up to 15
minutes, and reports nothing to the user meanwhile."""

_caretakers: list[subprocess.Popen[bytes]] = []
"""Caretakers of the local cluster of this process, if it has started one."""


def import_ray() -> Any:
    """Import the package `ray`.

    Raises:
        ConfigError: Ray is not installed.
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
    """Join a Ray cluster: at `ray_address` or RAY_ADDRESS, or one that runs on this machine. If
    there is none, start one. Does nothing if this process has joined a cluster.

    Args:
        parallel_config: accepted for compatibility and not read; an engine requests what it needs
            when it starts.
        ray_address: such as auto or 10.0.0.1:6379.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        _refuse_client(ray.util.client.ray.is_connected())
        return
    _check_address(ray_address)
    # Otherwise a local cluster would send usage statistics.
    envs.export_default("RAY_USAGE_STATS_ENABLED", "0")
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
        _caretakers.append(start_caretaker(cluster))


def start_caretaker(cluster: Iterable[psutil.Process]) -> subprocess.Popen[bytes]:
    """Start the process that kills what is left of a cluster when this process has exited."""
    names = [f"{each.pid}:{each.create_time()}" for each in cluster]
    command = [sys.executable, caretaker.__file__, *names]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _check_address(ray_address: str | None) -> None:
    """Refuse an address at which no cluster listens, because Ray would wait for it.

    Raises:
        ConfigError: nothing listens at the address, or it is an address of Ray Client.
    """
    address, origin = _find_address(ray_address)
    _refuse_client(address.startswith("ray://"))
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return  # Ray itself reports what is wrong with the address
    hosts = [host.strip("[]")]
    if hosts[0] in ("localhost", "127.0.0.1", "::1"):  # Ray accepts any address of this machine
        hosts.append(import_ray().util.get_node_ip_address())
    reasons = [reason for each in hosts if (reason := _connect_error(each, int(port)))]
    if len(reasons) == len(hosts):
        raise ConfigError(
            f"no Ray cluster answers at {address}, the address {origin}: {reasons[0]}. Start it "
            f"with `ray start --head`, or set RAY_ADDRESS to the address of one that runs, or to "
            f"'local' to start one on this machine"
        )


def _refuse_client(is_client: bool) -> None:
    if is_client:
        raise ConfigError(
            "an engine cannot use Ray Client (an address that begins with ray://): its process has "
            "to run on a machine of the cluster. Start it there, with `ray job submit` for "
            "example, and set RAY_ADDRESS to HEAD:6379 or leave it out"
        )


def _find_address(ray_address: str | None) -> tuple[str, str]:
    """Return the address of the cluster that Ray will join, and the setting that contains it.

    An empty address means that Ray will start a cluster, or use one among the processes of this
    machine.
    """
    if ray_address not in (None, "auto"):
        return str(ray_address), "in ray_address"
    ray_address = envs.of_launcher("RAY_ADDRESS") or ray_address
    if ray_address not in (None, "auto"):
        return str(ray_address), "in RAY_ADDRESS"
    if ray_address == "auto" and any(
        each.info["name"] == "gcs_server" for each in psutil.process_iter(["name"])
    ):
        return "", ""
    folder = Path(envs.of_launcher("RAY_TMPDIR") or tempfile.gettempdir())
    file = folder / "ray" / "ray_current_cluster"
    try:
        return file.read_text().strip(), f"in {file}, of the last `ray start` on this machine"
    except FileNotFoundError:
        return "", ""


def _connect_error(host: str, port: int) -> str:
    """Try to connect to an address, and return why this fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


def has_own_cluster() -> bool:
    """Return whether this process started its cluster, so that no other machine joins it."""
    return bool(_caretakers)


def leave_ray_cluster() -> None:
    """Leave the cluster of this process, and end the cluster if this process started it."""
    import_ray().shutdown()
    while _caretakers:
        caretaker = _caretakers.pop()
        caretaker.communicate()


def _processes_below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
