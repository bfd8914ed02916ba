"""Simulates `habana_frameworks.torch.distributed.hccl`: importing it registers the backend `hccl`.

The backend is gloo, between the processes of simulated cards.
"""

from datetime import timedelta

from torch import distributed as dist

__all__: list[str] = []

_BACKEND = "hccl"


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroupGloo":
    return dist.ProcessGroupGloo(store, rank, size, timeout)


if _BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "hpu"])
