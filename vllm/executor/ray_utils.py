"""Ray, which no executor of this version uses."""

from typing import Any

from vllm.errors import ConfigError


def initialize_ray_cluster(parallel_config: Any, ray_address: str | None = None) -> None:
    """Refuse to join a Ray cluster: no worker of this version would run in it.

    Args:
        parallel_config: of the engine that would use the cluster.
        ray_address: of the cluster.

    Raises:
        ConfigError: always.
    """
    where = "" if ray_address is None else f" (ray_address={ray_address!r})"
    raise ConfigError(
        f"initialize_ray_cluster{where}: workers are processes of one machine in this version, "
        f"and need no Ray. Leave the call out."
    )
