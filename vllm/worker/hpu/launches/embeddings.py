"""Given embeddings (of images, for example) in a table on the card, which prefills read by
index.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.messages import IntArray
from vllm.model_executor.models.interface import CausalLM
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.batch.launch import Launch
from vllm.worker.hpu.launches.host_buffers import HostBuffers
from vllm.worker.parts.embedding_rows import EmbeddingRows
from vllm.worker.parts.encoded_media import EncodedMedia
from vllm.worker.parts.memory_use import MemoryUse, embeddings_use

logger = init_logger(__name__)

FIRST_GIVEN = -1
"""Stands for a token of a prefill whose embedding is entry 0 of the table; less by one for each
entry after it."""
_PART_SIZE = 256
"""Entries of the table that are written at a time, so that one write is compiled."""


class DeviceEmbeddings(EmbeddingRows):
    """Embeddings that requests give, on a card; a prefill writes its own to a table before it runs.

    The table is allocated before the memory of forward passes is measured, so it counts as weights.

    Args:
        model: the model; see `EmbeddingRows`.
        config: config of the engine.
        bridge: the card.
        media: media; see `EmbeddingRows`.

    Attributes:
        table: [1 + num_added, tokens of a step or more, embedding_dim]: embeddings, and the values
            that `MediaEncoder.num_added` layers add; None: another pipeline stage looks up
            embeddings.
    """

    def __init__(
        self,
        model: CausalLM | None,
        config: VllmConfig,
        bridge: HabanaBridge,
        media: EncodedMedia | None = None,
    ) -> None:
        limits = config.scheduler
        super().__init__(model, limits.max_num_seqs, bridge.device, media)
        self._bridge, self._config = bridge, config
        self.table: Tensor | None = None
        if model is None:
            return
        self._to_device = HostBuffers(bridge).to_device
        num_parts = -(-limits.max_num_batched_tokens // _PART_SIZE)
        dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        size = model.embedding.embedding_dim
        width = size if media is None else media.width
        self.table = bridge.zeros((width // size, num_parts * _PART_SIZE, size), dtype)
        self._write(self.table, 0, torch.zeros(_PART_SIZE, width))
        logger.info(
            "The buffer for embeddings in prompts (--enable-prompt-embeds) always takes %s on "
            "the card, even if no request uses it",
            format_bytes(self.table.nbytes),
        )

    def mark(self, launch: Launch, token_ids: IntArray) -> None:
        """Replace token ids by table indices where the request gives the embedding.

        Args:
            launch: a prefill.
            token_ids: [T] of the prefill; changed.
        """
        num_entries = 0
        for span in self.spans(launch):
            entries = np.arange(num_entries, num_entries + len(span), dtype=np.int32)
            token_ids[span.first : span.first + len(span)] = FIRST_GIVEN - entries
            num_entries += len(span)

    def send(self, launch: Launch) -> None:
        """Write the embeddings of a prefill to the table, in the order of `mark`."""
        if self.table is None:
            return
        width = self.table.shape[0] * self.table.shape[2]
        # Embeddings from a request (prompt_embeds) have no values to add after inner layers.
        found = [pad(each, (0, width - each.shape[1])) for each in self._read(launch)]
        if not found:
            return
        embeddings = torch.cat(found)
        for begin in range(0, len(embeddings), _PART_SIZE):
            self._write(self.table, begin, embeddings[begin : begin + _PART_SIZE])

    def _read(self, launch: Launch) -> Iterator[Tensor]:
        return (span.read() for span in self.spans(launch))

    def memory_uses(self) -> list[MemoryUse]:
        return [] if self.table is None else [embeddings_use(self._config, self.table.nbytes)]

    def _write(self, table: Tensor, begin: int, embeddings: Tensor) -> None:
        """Write embeddings to the table, padded with zeros to a fixed size, so all writes are
        alike.
        """
        num_parts, _, size = table.shape
        part = np.zeros((num_parts, _PART_SIZE, size), np.float32)
        part[:, : len(embeddings)] = embeddings.view(-1, num_parts, size).transpose(0, 1).numpy()
        self._bridge.mark_step()  # run earlier operations first: they belong to other graphs
        index = self._to_device(np.arange(begin, begin + _PART_SIZE, dtype=np.int64))
        table.index_copy_(1, index, self._to_device(part).to(table.dtype))
        self._bridge.mark_step()
