"""Items that cross-attention layers read on a card.

Their keys and values are in pools; a table has the slots of each request. Every shape is fixed at
the start.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.attention.padded_items import NUM_FIELDS
from vllm.bucketing.step_limits import round_up
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.messages import IntArray, MediaItem
from vllm.model_executor.layers.cross_attention import CrossAttention, cross_attention_layers
from vllm.model_executor.models.interface import LayeredModel
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.encoder import CardEncoder
from vllm.worker.hpu.launches.host_buffers import HostBuffers
from vllm.worker.parts.encoded_media import EncodedMedia
from vllm.worker.parts.item_rows import ItemPool, KeptItems, max_items
from vllm.worker.parts.memory_use import MemoryUse, items_use

logger = init_logger(__name__)

_PART_SIZE = 256
"""Hidden states that are written at a time, so that one write is compiled."""
_MULTIPLE = 128
"""Numbers of slots in the table are multiples of it."""


class CardItemPool(ItemPool):
    """An `ItemPool` whose tensors are on a card. All writes have the same shape.

    Args:
        layers: layers of the model.
        bridge: the card.
    """

    def __init__(self, layers: Sequence[CrossAttention], bridge: HabanaBridge) -> None:
        super().__init__(layers)
        self._bridge = bridge
        self._to_device = HostBuffers(bridge).to_device

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the write operation by writing to free slots."""
        width = self._layers[0].state_size
        self._write(torch.zeros(1, width), np.zeros(1, np.int32))

    def _write(self, states: Tensor, slots: IntArray) -> None:
        for begin in range(0, len(slots), _PART_SIZE):
            part = slice(begin, begin + _PART_SIZE)
            missing = begin + _PART_SIZE - min(len(slots), part.stop)
            # Pad by writing the last hidden state again.
            padded_slots = np.pad(slots[part], (0, missing), mode="edge")
            padded = np.pad(states[part].float().numpy(), ((0, missing), (0, 0)), mode="edge")
            self._bridge.mark_step()  # run earlier operations first: they belong to other graphs
            on_card, index = self._to_device(padded), self._to_device(padded_slots)
            for layer in self._layers:
                assert layer.item_keys is not None
                layer.store(on_card.to(layer.item_keys.dtype), index)
            self._bridge.mark_step()


class DeviceItems(KeptItems):
    """The items of the requests in the batch, in a table on the card.

    Args:
        media: encodes items, and stores them in `pool`.
        pool: pool of the model.
        num_rows: number of rows of the batch.
        num_slots: slots that a request with one item may need, and that any request may need; a
            batch reads the smaller number if it is enough for each of its requests.
        bridge: the card.

    Attributes:
        sizes: values of `PaddedShape.item_slots`, ascending, then 0.
        table: [num_rows + 1, NUM_FIELDS, slots] int32; the last entry is for padding.
    """

    pool: CardItemPool

    def __init__(
        self,
        media: EncodedMedia,
        pool: CardItemPool,
        num_rows: int,
        num_slots: Sequence[int],
        bridge: HabanaBridge,
    ) -> None:
        super().__init__(media, pool)
        self._bridge = bridge
        self._to_device = HostBuffers(bridge).to_device
        *smaller, self._num_slots = num_slots
        self.sizes = (*smaller, 0)
        self._used: IntArray = np.zeros(num_rows + 1, np.int32)
        """Number of used slots, by batch index."""
        self.table = bridge.zeros((num_rows + 1, NUM_FIELDS, self._num_slots), torch.int32)
        self._hide(num_rows)

    def slots_of(self, rows: IntArray) -> int:
        """Return the first of `sizes` with enough slots for each of these requests; 0 without
        items.
        """
        most = self._used[rows].max(initial=0)
        return next((size for size in self.sizes if size >= most), 0)

    def _show(self, row: int, items: Sequence[MediaItem]) -> None:
        fields = np.zeros((NUM_FIELDS, self._num_slots), np.int32)
        begin = 0
        for item in items:
            found = self._media.find(row, item)
            if found is None:  # `errors_of` reports why
                continue
            part = slice(begin, begin + len(found))
            fields[0, part], fields[1, part], fields[2, part] = found.numpy(), *item.seen_by
            begin = part.stop
        # Unused slots: no token attends to them. They point to a slot that this request has
        # written.
        fields[0, begin:] = fields[0, 0]
        self._used[row] = begin
        self._put(row, fields)

    def _hide(self, row: int) -> None:
        self._used[row] = 0
        self._put(row, np.zeros((NUM_FIELDS, self._num_slots), np.int32))

    def _put(self, row: int, fields: IntArray) -> None:
        """Write the table entry of a request. All writes have the same shape."""
        self._bridge.mark_step()  # run earlier operations first: they belong to other graphs
        index = self._to_device(np.array([row], np.int64))
        self.table.index_copy_(0, index, self._to_device(fields[None]))
        self._bridge.mark_step()

    def memory_uses(self) -> list[MemoryUse]:
        return [items_use(self.table.nbytes, "table of images and sounds")]


def card_items(
    config: VllmConfig, model: LayeredModel, bridge: HabanaBridge, encoder: CardEncoder | None
) -> DeviceItems | None:
    """Make the item table of a model on a card; None if it has no cross-attention.

    Args:
        config: config of the engine.
        model: loaded.
        bridge: the card.
        encoder: encoder of the model; None: it reads text only.

    Raises:
        ConfigError: prompts are to be merged.
    """
    layers = cross_attention_layers(model)
    if encoder is None or not layers or model.media_encoder is None:
        return None
    if config.hpu.merged_prefill:
        raise ConfigError(
            "VLLM_MERGED_PREFILL=1 cannot be used with layers that read images or sounds by "
            "cross-attention. Set VLLM_MERGED_PREFILL=0"
        )
    pool = CardItemPool(layers, bridge)
    media = EncodedMedia(encoder, layers[0].state_size, pool, encoder.agree)
    num_items = max_items(config)
    counts = sorted({1, num_items})
    num_slots = [round_up(n * model.media_encoder.max_states, _MULTIPLE) for n in counts]
    logger.info(
        "Cross-attention pads each request to %d hidden states, which is enough for %d %s "
        "(--limit-mm-per-prompt)",
        *(num_slots[-1], num_items, encoder.reads),
    )
    if len(num_slots) > 1:
        logger.info(
            "While each request of a batch has at most one image or sound, cross-attention pads "
            "only to %d hidden states",
            num_slots[0],
        )
    return DeviceItems(media, pool, config.scheduler.max_num_seqs, num_slots, bridge)
