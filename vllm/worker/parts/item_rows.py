"""Items that cross-attention layers read: pools of keys and values, and slots by request.

Model files need no code for slots.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vllm.attention import LaunchParts, RaggedItems, SeenRun
from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.messages import (
    END_OF_REQUEST,
    EngineRequest,
    IntArray,
    MediaItem,
    NewRequest,
    RunnerStats,
    SchedulerOutput,
)
from vllm.model_executor.layers.cross_attention import (
    CrossAttention,
    cross_attention_layers,
    slot_bytes,
)
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.models.interface import LayeredModel
from vllm.multimodal.job import family_of_model
from vllm.ops.item_slots import ItemSlots
from vllm.platforms.interface import Platform
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.encoded_media import EncodedMedia, ModuleEncoder, agreement
from vllm.worker.parts.row_parts import RowPart

_SHARE = 4
"""One part of so many of the free memory is for items at most, if one of them fits."""
_NO_SLOTS: IntArray = np.empty(0, np.int32)


class ItemPool:
    """A pool for keys and values of items in all cross-attention layers, by the key of the item.

    As the storage of an `EncodedMedia` it receives hidden states and returns slots. All ranks give
    the same slots to an item, as they store the same items.

    Args:
        layers: layers of the model.
    """

    def __init__(self, layers: Sequence[CrossAttention]) -> None:
        self._layers = layers
        self._slots: dict[str, Tensor] = {}
        self._is_free = np.empty(0, np.bool_)

    def allocate(self, num_slots: int, platform: Platform, dtype: torch.dtype) -> None:
        """Allocate `num_slots` free slots in all layers."""
        self._slots.clear()
        self._is_free = np.ones(num_slots, np.bool_)
        for layer in self._layers:
            shape = (num_slots, layer.num_kv_heads, layer.head_size)
            layer.bind_pool(*(platform.allocate_cache(shape, dtype) for _ in range(2)))

    def release(self) -> None:
        """Free the memory of all layers, until it is allocated again."""
        self._slots.clear()
        for layer in self._layers:
            layer.release_pool()

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def get(self, key: str) -> Tensor | None:
        """Return the slots [n] int32 of an item; None if it is not stored."""
        return self._slots.get(key)

    def pop(self, key: str, default: Tensor | None = None) -> Tensor | None:
        """Free the slots of an item, and return them; `default` if it is not stored."""
        slots = self._slots.pop(key, default)
        if slots is not None:
            self._is_free[slots.numpy()] = True
        return slots

    @torch.inference_mode()
    def __setitem__(self, key: str, states: Tensor) -> None:
        """Compute and store keys and values of an item from its hidden states [n, state_size].

        Raises:
            ValueError: there are fewer than n free slots.
        """
        found = np.flatnonzero(self._is_free)[: len(states)].astype(np.int32)
        if len(found) < len(states):
            raise ValueError(
                f"an item needs {len(states)} cross-attention slots, but only {len(found)} are free"
            )
        self._write(states, found)
        self._is_free[found] = False
        self._slots[key] = torch.from_numpy(found)

    def _write(self, states: Tensor, slots: IntArray) -> None:
        """Compute keys and values of hidden states [n, state_size], n at least 1, and write them to
        slots.
        """
        where = torch.from_numpy(slots)
        for layer in self._layers:
            layer.store(states, where)


@dataclass(frozen=True, slots=True)
class _Views:
    """The slots that the tokens of a request see. They change at certain token indices."""

    starts: tuple[int, ...]
    """k indices from which tokens see other items, ascending; the first is 0."""
    slots: tuple[IntArray, ...]
    """k arrays of slots."""

    def runs(self, first: int, count: int, token: int) -> Iterable[SeenRun]:
        """Yield the ranges of slots that consecutive tokens see.

        Args:
            first: index of the first token in its request.
            count: number of tokens.
            token: index of the first token in the forward pass.
        """
        at = bisect_right(self.starts, first) - 1
        end, begin = first + count, first
        while begin < end:
            is_last = at + 1 == len(self.starts)
            stop = end if is_last else min(end, self.starts[at + 1])
            if len(self.slots[at]):
                yield SeenRun(token + begin - first, token + stop - first, self.slots[at])
            begin, at = stop, at + 1


class KeptItems(RowPart, ABC):
    """The items of the requests in the batch. Subclasses pass to the layers which slots are seen.

    Args:
        media: encodes items, and stores them in `pool`.
        pool: pool of the model.
    """

    def __init__(self, media: EncodedMedia, pool: ItemPool) -> None:
        self._media, self.pool = media, pool
        self._new: dict[int, EngineRequest] = {}
        """Requests that have not run yet, by batch index."""
        self._seeing: set[int] = set()

    def prepare(self, request: EngineRequest) -> Future[str] | None:
        return self._media.prepare(request)

    def release(self, request_ids: Iterable[str]) -> None:
        self._media.release(request_ids)

    def add(self, new: NewRequest) -> None:
        if new.request.media:
            self._media.add(new.row, new.request)
            self._new[new.row] = new.request

    def remove(self, row: int) -> None:
        self._media.remove(row)
        self._new.pop(row, None)
        if row in self._seeing:
            self._seeing.remove(row)
            self._hide(row)

    def begin(self, step: SchedulerOutput) -> None:
        """Drop and encode items, as the step says, and look up the items of new requests."""
        self._media.update(step)
        first_of = dict(zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=True))
        # Requests without tokens in this step wait for their items.
        for row in [row for row in self._new if row in first_of]:
            # Items of tokens that are already computed may have been dropped, and are not needed.
            items = [item for item in self._new.pop(row).media if item.end > first_of[row]]
            self._seeing.add(row)
            self._show(row, items)

    @abstractmethod
    def _show(self, row: int, items: Sequence[MediaItem]) -> None:
        """Let the tokens of a request see these items."""

    @abstractmethod
    def _hide(self, row: int) -> None:
        """Let the tokens of a request see no items."""

    def count(self, stats: RunnerStats) -> RunnerStats:
        return self._media.count(stats)

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        return self._media.errors_of(rows)


class ItemRows(KeptItems):
    """The items of the requests in the batch, for forward passes without padding.

    Args:
        media: media; see `KeptItems`.
        pool: pool; see `KeptItems`.
        num_rows: number of rows of the batch.

    Attributes:
        of_output: the slots that output tokens see, by batch index. The arrays are never replaced.
    """

    def __init__(self, media: EncodedMedia, pool: ItemPool, num_rows: int) -> None:
        super().__init__(media, pool)
        self.of_output = ItemSlots.empty(num_rows)
        self._views: dict[int, _Views] = {}

    def _show(self, row: int, items: Sequence[MediaItem]) -> None:
        self._views[row] = views = self._views_of(row, items)
        self.of_output.put(row, views.slots[-1])

    def _hide(self, row: int) -> None:
        del self._views[row]
        self.of_output.put(row, _NO_SLOTS)

    def _views_of(self, row: int, items: Sequence[MediaItem]) -> _Views:
        edges = {edge for item in items for edge in item.seen_by}
        starts = tuple(sorted({0, *edges} - {END_OF_REQUEST}))
        slots = []
        for start in starts:
            seen = [item for item in items if item.start <= start < item.end]
            found = [self._media.find(row, item) for item in seen]
            if any(each is None for each in found):  # `errors_of` reports why
                slots.append(_NO_SLOTS)
                continue
            slots.append(
                np.concatenate([_NO_SLOTS, *(each.numpy() for each in found if each is not None)])
            )
        return _Views(starts, tuple(slots))

    def part_of(self, launch: Launch) -> LaunchParts:
        if not self._views:
            return {}
        runs: list[SeenRun] = []
        token = 0
        for row, first, count in zip(
            launch.rows.tolist(),
            launch.num_computed_tokens.tolist(),
            launch.num_scheduled_tokens.tolist(),
            strict=True,
        ):
            if (views := self._views.get(row)) is not None:
                runs += views.runs(first, count, token)
            token += count
        return {"items": RaggedItems(token, tuple(runs))} if runs else {}


def item_rows(model: LayeredModel, num_rows: int) -> ItemRows | None:
    """Make the item part of a model on the CPU; None if it has no cross-attention.

    Args:
        model: loaded.
        num_rows: number of rows of the batch.
    """
    encoder, layers = model.media_encoder, cross_attention_layers(model)
    if not isinstance(encoder, MediaEncoder) or not layers:
        return None
    pool = ItemPool(layers)
    states = ModuleEncoder(encoder), layers[0].state_size
    media = EncodedMedia(*states, pool, agreement(model.tp))
    return ItemRows(media, pool, num_rows)


def max_items(config: VllmConfig) -> int:
    """Return how many items a request may have. The model must read some."""
    family = family_of_model(config)
    assert family is not None, "the model reads text only"
    if family.required is not None:
        return 1
    return sum(config.multimodal.counts[modality] for modality in family.modalities)


def count_item_states(
    config: VllmConfig, model: nn.Module, free_bytes: int
) -> tuple[int, int] | None:
    """Return (number of hidden states of items that are kept, their bytes).

    None: the model has no cross-attention, or no encoder.

    Args:
        config: limits.
        model: loaded.
        free_bytes: free bytes of this rank, before KV blocks are counted.

    Raises:
        ConfigError: the largest item does not fit.
    """
    encoder = model.media_encoder if isinstance(model, LayeredModel) else None
    if not isinstance(encoder, MediaEncoder) or not encoder.max_states:
        return None  # without an encoder, or the encoder is on another stage
    each, largest = slot_bytes(model, encoder.dtype), encoder.max_states
    if largest * each > free_bytes:
        raise ConfigError(
            f"not enough memory for cross-attention: an image or sound of {largest} hidden states "
            f"takes {format_bytes(largest * each)}, but only {format_bytes(free_bytes)} are free. "
            "Use more ranks (--tensor-parallel-size), or a smaller model"
        )
    # A request may have several items, so even a single running request may need several slots.
    most = max(config.scheduler.max_num_seqs, max_items(config)) * largest
    count = min(most, max(largest, free_bytes // _SHARE // each))
    return count, count * each
