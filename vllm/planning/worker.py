"""A rank of a planned engine: it runs the steps of a start, and computes nothing.

It is the worker of a card whose weights have no values. Other ranks do not exist: collectives
return at once, as if all ranks had the values of this one. So memory, buckets and the operators of
a forward pass are the same as in the real engine.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vllm.bucketing import Bucket, StepLimits
from vllm.bucketing.catalog.catalog import Catalog
from vllm.config import VllmConfig
from vllm.distributed import RankLayout, Rendezvous
from vllm.ops import get_ops, set_ops
from vllm.ops.hpu.operators import HPUOps
from vllm.platforms.hpu import PlannedPlatform
from vllm.worker.hpu.worker import HPUWorker


@contextmanager
def on_planned_card(platform: PlannedPlatform) -> Iterator[None]:
    """Let the device `hpu` be the planned card, which computes nothing, while the context
    is open.
    """
    thresholds = gc.get_threshold()
    ops = get_ops()
    bridge = platform.bridge
    try:
        with (
            torch.inference_mode(),
            platform.activated(),
            bridge.dry_run(),
        ):
            set_ops(HPUOps(bridge))
            yield
    finally:
        set_ops(ops)
        gc.set_threshold(*thresholds)


class PlannedWorker(HPUWorker):
    """One rank of a planned engine.

    Args:
        config: config of the engine.
        platform: has the card.
    """

    has_values = False

    def __init__(self, config: VllmConfig, platform: PlannedPlatform) -> None:
        super().__init__(config, platform)

    def start(self, rank: int) -> None:
        """Load the model without values, and connect to the simulated other ranks."""
        self.load(rank)
        parallel = self.config.parallel
        if parallel.world_size > 1:
            self.join(AbsentPeers(rank=rank, layout=RankLayout.of(parallel)))

    def first_buckets(self, catalog: Catalog, limits: StepLimits) -> list[Bucket]:
        """Return the buckets that are warm when an engine starts that serves while it warms up."""
        return self.warm_ups.choose_first(catalog, limits)


class AbsentPeers(Rendezvous):
    """A rendezvous whose other ranks do not exist; they count as having the values of this rank.

    Args:
        rank: rank of this process.
        layout: layout of the ranks.
    """

    def __init__(self, *, rank: int, layout: RankLayout) -> None:
        super().__init__(rank=rank, layout=layout, timeout_s=0, address=("", 0))

    def join(self, backend: str) -> None:
        """Create a process group whose collectives do not change tensors."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed = torch.distributed
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group(
            "fake", store=FakeStore(), rank=self.rank, world_size=self.layout.world_size
        )
        self.has_joined = True

    def exchange(
        self,
        name: str,
        value: bytes,
        what: str | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> list[bytes]:
        """Return this rank's value once for each of the ranks."""
        return [value] * (self.layout.world_size if ranks is None else len(ranks))

    def is_stage_here(self, name: str, patience_s: float) -> bool:
        """Return True: all ranks count as present."""
        return True

    def arrive(self, name: str, value: bytes = b"") -> None:
        """Do nothing: there are no other ranks to tell."""
