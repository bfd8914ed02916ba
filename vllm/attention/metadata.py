"""What one launch looks like to its attention layers.

Models see flattened tokens; only this knows which of them belong to which request. It reaches
the layers through a context variable, so that model files carry none of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from vllm.messages import IntArray


@dataclass(frozen=True)
class AttentionMetadata:
    """A ragged launch of B requests and T tokens: decodes first, then prefills.

    B_d requests are decodes, with one token each: rows 0 to B_d - 1 and tokens 0 to B_d - 1.
    """

    num_decodes: int
    """B_d."""
    slot_mapping: Tensor
    """[T] int64 on the device: where each token's key and value go, block_id * S + offset."""
    block_tables: Tensor
    """[B, max_blocks] int32 on the device."""
    seq_lens: Tensor
    """[B] int32 on the device: tokens of the request, this launch's included."""
    query_start_loc: IntArray
    """[B + 1] on the host: the tokens of request b are query_start_loc[b] up to [b + 1]."""
    host_seq_lens: IntArray
    """[B] `seq_lens` on the host."""


_current: ContextVar[AttentionMetadata | None] = ContextVar("attention_metadata", default=None)


@contextmanager
def attention_metadata(metadata: AttentionMetadata | None) -> Iterator[None]:
    """Run a forward pass with this metadata. None: all tokens are one prompt, no KV cache."""
    token = _current.set(metadata)
    try:
        yield
    finally:
        _current.reset(token)


def current_metadata() -> AttentionMetadata | None:
    """The metadata of the forward pass that is running."""
    return _current.get()
