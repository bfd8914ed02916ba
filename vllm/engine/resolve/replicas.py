"""Divide cores, memory and ports among the replicas of data parallelism."""

import re
from dataclasses import replace
from typing import Any, cast

from vllm import envs
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig
from vllm.errors import ConfigError
from vllm.platforms import Platform, resolve_platform
from vllm.platforms.cpu_threads import (
    by_topology,
    divide_cores,
    equal_shares,
    parse_cores,
    usable_cores,
)

_PORT = re.compile(r"^(tcp://.*:)(\d+)$")


def resolve_device(platform: Platform, parallel: ParallelConfig) -> DeviceConfig:
    """Return the device config, with the cores that VLLM_CPU_OMP_THREADS_BIND names.

    Raises:
        ConfigError: the variable has a wrong value.
    """
    settings = envs.get()
    text = settings.VLLM_CPU_OMP_THREADS_BIND
    bound_cores: tuple[tuple[int, ...], ...] | None = None
    replica_cores: tuple[tuple[tuple[int, ...], ...], ...] = ()
    num_replicas, num_ranks = parallel.num_local_replicas, parallel.world_size
    if platform.name == "cpu" and num_replicas <= 1:
        bound_cores = parse_cores(text, usable_cores(), num_ranks)
    elif platform.name == "cpu":
        replica_cores = divide_cores(text, usable_cores(), num_replicas, num_ranks)
    return DeviceConfig(
        device=cast(Any, platform.name),
        bound_cores=bound_cores,
        replica_cores=replica_cores,
        counts_threads=settings.OMP_NUM_THREADS is None
        and text.strip().lower() not in ("all", "nobind"),
    )


def replica_configs(config: VllmConfig) -> list[VllmConfig]:
    """Return the config of each replica on this machine. The free memory is divided among them.

    Args:
        config: config of the whole engine; with one replica, it is the config of that replica.

    Raises:
        ConfigError: the resources cannot be divided among the replicas.
    """
    parallel = config.parallel
    if parallel.data_parallel_size == 1:
        return [config]
    count, first = parallel.num_local_replicas, parallel.data_parallel_start_rank
    if count == 0:
        return []
    devices = [config.device] * count
    if config.device.device == "cpu":
        share = resolve_platform("cpu").free_memory_bytes() // count
        is_ray = parallel.distributed_executor_backend == "ray"
        devices = [
            replace(_cpu_share(device, index, count, is_ray=is_ray), memory_share_bytes=share)
            for index, device in enumerate(devices)
        ]
    cache = config.cache
    if config.device.device == "cpu" and cache.kv_cache_memory_bytes is not None:
        cache = replace(cache, kv_cache_memory_bytes=cache.kv_cache_memory_bytes // count)
    return [
        _with_own_endpoints(
            replace(
                config,
                parallel=replace(parallel, data_parallel_rank=first + index),
                device=devices[index],
                cache=cache,
            ),
            index,
        )
        for index in range(count)
    ]


def _cpu_share(device: DeviceConfig, index: int, count: int, *, is_ray: bool) -> DeviceConfig:
    if count == 1:
        return device
    if device.replica_cores:
        return replace(device, bound_cores=device.replica_cores[index], replica_cores=())
    if not device.counts_threads or is_ray:
        return device  # OpenMP's own settings apply, or Ray may start the worker on another machine
    return replace(device, core_share=equal_shares(by_topology(usable_cores()), count)[index])


def _with_own_endpoints(config: VllmConfig, index: int) -> VllmConfig:
    """Give each replica its own ports, counted upwards, for KV cache events and for KV transfer."""
    transfer = config.connector.kv_transfer
    if transfer is not None and transfer.saves and index:
        port = transfer.kv_port and transfer.kv_port + index  # port 0 means any free port
        given = {**config.connector.kv_transfer_config, "kv_port": port}
        config = replace(config, connector=replace(config.connector, kv_transfer_config=given))
    return _with_own_events(config, index)


def _with_own_events(config: VllmConfig, index: int) -> VllmConfig:
    observability = config.observability
    if not index or not observability.kv_events.is_published:
        return config
    events = dict(observability.kv_events_config)
    published = observability.kv_events
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(published, name)
        if address is None:
            continue
        found = _PORT.match(address)
        if found is None:
            raise ConfigError(
                f"kv_events_config: {name} {address!r} has no port, and data_parallel_size="
                f"{config.parallel.data_parallel_size} needs one address per replica. Use "
                f"tcp://HOST:PORT; replica n publishes at PORT + n"
            )
        events[name] = f"{found[1]}{int(found[2]) + index}"
    return replace(config, observability=replace(observability, kv_events_config=events))
