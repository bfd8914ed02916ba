"""Embeddings of requests, which replace the embeddings of tokens. Model files do not know of them.

They travel in the context of a launch; the layer that looks up embeddings reads them there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vllm.attention import LaunchParts, ReplacedTokens
from vllm.errors import ConfigError
from vllm.messages import IntArray, NewRequest, TokenEmbeddings
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.row_parts import BoolArray, RowPart


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a launch whose embeddings are given."""

    first: int
    """Which of the tokens of the launch."""
    embeddings: TokenEmbeddings
    """They are those from `begin` to `stop`, positions of the prompt."""
    begin: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.begin

    def read(self) -> Tensor:
        """Return them, [m, embedding_dim] float32; no others are copied."""
        dtype = getattr(torch, self.embeddings.dtype)
        size = self.embeddings.shape[1]
        width = size * dtype.itemsize
        first, end = (place - self.embeddings.start for place in (self.begin, self.stop))
        part = bytearray(memoryview(self.embeddings.data)[first * width : end * width])
        return torch.frombuffer(part, dtype=dtype).view(-1, size).float()


class EmbeddingRows(RowPart):
    """The embeddings of the requests in the batch, by row.

    Args:
        model: loaded, its weights packed if they are to be; None: another stage of the pipeline
            looks up embeddings.
        num_rows: of the batch.
        device: of the model.

    Raises:
        ConfigError: the model does not have exactly one layer that looks up embeddings.
    """

    def __init__(self, model: nn.Module | None, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._ends: IntArray = np.zeros(num_rows, np.int32)
        """[rows] the position behind the last embedding of each row; 0: it has none."""
        self._rows: dict[int, tuple[TokenEmbeddings, ...]] = {}
        if model is not None:
            _check_embedding(model)

    def add(self, new: NewRequest) -> None:
        if new.request.embeddings:
            self._rows[new.row] = new.request.embeddings
            self._ends[new.row] = max(part.end for part in new.request.embeddings)

    def remove(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._ends[row] = 0

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Keep tokens whose embeddings are given from decodes, which read tokens alone."""
        if not self._rows:
            return None
        is_given: BoolArray = indices < self._ends[rows]
        return is_given

    def spans(self, launch: Launch) -> Iterator[Span]:
        """Yield the embeddings that a launch brings."""
        starts = launch.starts
        has_some = launch.num_computed_tokens < self._ends[launch.rows]
        for index in np.flatnonzero(has_some).tolist():
            first = int(launch.num_computed_tokens[index])
            end = first + int(launch.num_scheduled_tokens[index])
            for embeddings in self._rows[int(launch.rows[index])]:
                begin, stop = max(first, embeddings.start), min(end, embeddings.end)
                if begin < stop:
                    yield Span(int(starts[index]) + begin - first, embeddings, begin, stop)

    def part_of(self, launch: Launch) -> LaunchParts:
        if not self._rows:
            return {}
        found = list(self.spans(launch))
        if not found:
            return {}
        indices = [torch.arange(span.first, span.first + len(span)) for span in found]
        embeddings = torch.cat([span.read() for span in found])
        return {
            "replaced": ReplacedTokens(
                torch.cat(indices).to(self._device), embeddings.to(self._device)
            )
        }


def _check_embedding(model: nn.Module) -> None:
    """Refuse a model in which not exactly one layer would read the embeddings."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"enable_prompt_embeds=True needs a model with one table of token embeddings; "
            f"{type(model).__name__} has {len(found)}. Leave it out"
        )
