"""Simulates `habana_frameworks.torch.hpu.graphs`: capture and replay, in lazy mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gaudi_sim.card.device import active_card
from gaudi_sim.graphs.graphs import HPUGraph, input_hash
from gaudi_sim.graphs.graphs import wrap_in_hpu_graph as _wrap

__all__ = ["HPUGraph", "graph", "input_hash", "is_current_stream_capturing", "wrap_in_hpu_graph"]


def wrap_in_hpu_graph(
    module: nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool | None = None,
    max_graphs: int | None = None,
    free_inplace: bool = True,
    verbose: bool = False,
    log_frequency: int = 100,
) -> nn.Module:
    """Let `module` capture one graph per input signature; inputs are bound again at each replay.

    Args:
        max_graphs: limit of captured signatures; others run without a graph.

    Raises:
        RuntimeError: in eager mode.
    """
    card = active_card()
    if not card.is_lazy:
        raise RuntimeError("HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
    return _wrap(module, card, max_graphs=max_graphs)


@contextmanager
def graph(hpu_graph: HPUGraph, stream: object = None, dry_run: bool = False) -> Iterator[None]:
    """Capture the operators in this context into `hpu_graph`."""
    with hpu_graph.capturing():
        yield


def is_current_stream_capturing() -> bool:
    return active_card().capture is not None
