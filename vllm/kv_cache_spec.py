"""Describes the data of requests that the layers of a model store, and its layout in memory.

No torch.

A layer describes its data as a `KVCacheSpec`. Layers that need the same blocks of a request form a
`KVCacheGroup` with its own block tables: layers with full attention need all blocks of a request,
layers with a sliding window only the last ones. All groups take their blocks from one pool, so a
block has the same number of bytes in every group: it holds `block_size` tokens of as many layers as
a group has. Worker, scheduler and ledger read the same `KVCacheLayout`.

A layer with recurrent state, whose size does not grow with the tokens, has no blocks: its tensors
have one entry per batch index, which belongs to the request with this index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod


class CacheKind(Enum):
    """The kinds of data that a layer stores for a request."""

    FULL = "full attention"
    """Keys and values of all tokens."""
    SLIDING_WINDOW = "sliding window"
    """Keys and values of the most recent tokens."""
    LATENT = "latent"
    """One compressed vector for keys and values together, of all tokens."""
    STATE = "state"
    """A summary of all tokens so far, of fixed size."""
    NONE = "none"
    """Nothing, as in an encoder."""


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer: [num_blocks, block_size, *shape]; of a recurrent state: [rows,
    *shape].

    The first two dimensions are one on a platform whose cache is flat.
    """

    shape: tuple[int, ...]
    """Shape of the entry of one token; of a state, of one request."""
    dtype: str
    """Name of a torch dtype."""
    itemsize: int
    """Bytes of an element."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, for one token or one request."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class KVCacheSpec:
    """The data that one layer stores for each token, or for each request (recurrent state)."""

    kind: CacheKind
    tensors: tuple[CacheTensor, ...] = ()
    window: int | None = None
    """Most recent tokens that a query sees, itself included; None: all."""
    inputs: tuple[CacheTensor, ...] = ()
    """Inputs of a layer with states, which it keeps for tokens that ran with drafts:
    [rows, tokens, *shape]."""

    def __post_init__(self) -> None:
        if (self.kind is CacheKind.NONE) == bool(self.tensors):
            raise ValueError(
                f"a cache of kind {self.kind.value!r} cannot have {len(self.tensors)} tensors"
            )
        if (self.kind is CacheKind.SLIDING_WINDOW) != (self.window is not None):
            raise ValueError(
                f"a cache of kind {self.kind.value!r} cannot have the window {self.window}"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in all tensors: of one token, or of one request's recurrent state."""
        return sum(tensor.entry_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables."""

    window: int | None = None
    """Most recent tokens that a query sees, itself included; None: all."""
    layers: tuple[int, ...] = ()
    """Indices of the layers. Layers at the same position of several groups share their memory."""

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that queries from `position` on attend to.

        >>> [KVCacheGroup(window=5).first_block(position, 4) for position in (0, 7, 8, 11, 12)]
        [0, 0, 1, 1, 2]
        """
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size


FULL_GROUP = KVCacheGroup()
"""The one group of a model whose layers all need all blocks of a request."""


@dataclass(frozen=True)
class KVCacheLayout:
    """The division of blocks among the layers, and the other data of each request in the batch."""

    block_size: int
    """Tokens per block."""
    block_bytes: int
    """Bytes of a block; 0 for a model that keeps nothing."""
    groups: tuple[KVCacheGroup, ...] = (FULL_GROUP,)
    """The groups of layers, with full attention first, then by the size of the window."""
    state_layers: tuple[int, ...] = ()
    """Indices of the layers with states."""
    state_bytes: int = 0
    """Bytes of the states of one request, in all layers."""
    input_bytes: int = 0
    """Bytes of the inputs of one token, in all layers with states."""


def plan_layout(
    specs: Sequence[KVCacheSpec], block_size: int, max_model_len: int, *, keeps_all: bool = False
) -> KVCacheLayout:
    """Plan the KV cache of a model: group its layers, and compute the bytes of a block.

    Layers with different windows form groups with equal numbers of layers. If that is not possible,
    because their tensors differ, all layers share one block table and keep all tokens.

    Layers with recurrent state are in no group. If a model has only such layers, it has one group
    without layers.

    Args:
        specs: one per layer, none of them of kind NONE.
        block_size: tokens per block.
        max_model_len: a sliding window of at least this length is ignored.
        keeps_all: the device needs all blocks of a request.
    """
    states = tuple(i for i, spec in enumerate(specs) if spec.kind is CacheKind.STATE)
    state_bytes = sum(specs[index].entry_bytes for index in states)
    paged = {i: spec for i, spec in enumerate(specs) if spec.kind is not CacheKind.STATE}
    groups, block_bytes = _plan_groups(paged, block_size, max_model_len, keeps_all=keeps_all)
    inputs = (tensor for index in states for tensor in specs[index].inputs)
    input_bytes = sum(tensor.entry_bytes for tensor in inputs)
    return KVCacheLayout(block_size, block_bytes, groups, states, state_bytes, input_bytes)


def _plan_groups(
    specs: Mapping[int, KVCacheSpec], block_size: int, max_model_len: int, *, keeps_all: bool
) -> tuple[tuple[KVCacheGroup, ...], int]:
    """Group the layers that have blocks; return the groups, by layer index, and the bytes of a
    block.
    """
    if not specs:
        return (FULL_GROUP,), 0
    by_window: dict[int | None, list[int]] = {}
    for index, spec in specs.items():
        window = spec.window
        is_passed = window is not None and window < max_model_len and not keeps_all
        by_window.setdefault(window if is_passed else None, []).append(index)
    is_alike = len({spec.tensors for spec in specs.values()}) == 1
    if not is_alike and len(by_window) != 1:
        by_window = {None: list(specs)}
    if len(by_window) == 1:
        ((window, layers),) = by_window.items()
        token_bytes = sum(spec.entry_bytes for spec in specs.values())
        return (KVCacheGroup(window, tuple(layers)),), token_bytes * block_size
    size = _group_size([len(layers) for layers in by_window.values()])
    groups = tuple(
        KVCacheGroup(window, tuple(by_window[window][start : start + size]))
        for window in sorted(by_window, key=lambda window: window or 0)
        for start in range(0, len(by_window[window]), size)
    )
    return groups, next(iter(specs.values())).entry_bytes * size * block_size


def _group_size(counts: Sequence[int]) -> int:
    """Return the number of layers per group: the fewest unused positions, then the fewest groups.

    >>> [_group_size(counts) for counts in ([13, 13], [10, 52], [4, 22], [16, 17])]
    [13, 10, 4, 17]
    """

    def num_slots(size: int) -> int:
        return size * sum(-(-count // size) for count in counts)

    return min(counts, key=lambda size: (num_slots(size), -size))
