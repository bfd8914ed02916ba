"""What one launch looks like to its attention layers, as far as layers know it.

Models see flattened tokens; only the launch knows which of them belong to which request, whether
they are padded, and how a device attends to them. It reaches the layers through this module, so
that model files carry none of it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class AttentionLayer(Protocol):
    """What a launch has to know of the layer that attends."""

    key_cache: Tensor | None
    """[num_blocks, S, G, D]"""
    value_cache: Tensor | None
    scale: float
    """Multiplies query @ key."""
    sliding_window: int | None
    """Most recent keys a query sees, itself included; None for all."""
    alibi_slopes: Tensor | None
    """[H] float32: what a token of distance takes from the score of each head; None without."""
    logits_soft_cap: float | None
    """C replaces each score s by C * tanh(s / C); None does not."""
    key_scale: float
    """Of what an fp8 key cache holds: key / key_scale."""
    value_scale: float


class LaunchMetadata(Protocol):
    """One forward pass, on one kind of device."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the new keys and values, and attend to what their requests have in the cache.

        Args:
            layer: its caches are bound.
            query: [T, H, D].
            key: [T, G, D].
            value: [T, G, D].

        Returns:
            [T, H, D].
        """
        ...


class _Current:
    """The forward pass that runs in this process. A plain attribute, which compilers can trace."""

    metadata: LaunchMetadata | None = None


class _OfThread(threading.local):
    """The forward pass of a thread: several engines of one process may each have theirs."""

    metadata: LaunchMetadata | None = None


_of_thread = _OfThread()


@contextmanager
def attention_metadata(metadata: LaunchMetadata | None) -> Iterator[None]:
    """Run a forward pass of this thread with this metadata. None: all tokens are one prompt, no
    KV cache."""
    before, _of_thread.metadata = _of_thread.metadata, metadata
    try:
        yield
    finally:
        _of_thread.metadata = before


def set_metadata(metadata: LaunchMetadata | None) -> LaunchMetadata | None:
    """Make this the metadata of what follows; returns what was there before.

    `attention_metadata` for code that a compiler traces, which knows neither context managers of
    ours nor threads: it is that of the whole process.
    """
    before, _Current.metadata = _Current.metadata, metadata
    return before


def current_metadata() -> LaunchMetadata | None:
    """The metadata of the forward pass that is running."""
    if _Current.metadata is not None:
        return _Current.metadata
    return _of_thread.metadata
