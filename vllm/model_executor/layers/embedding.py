"""Token embeddings and the output head, with the vocabulary split over ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention.context import ContextHolder, ReadsContext, text_positions
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import Slice, SlicedModule


class VocabParallelEmbedding(SlicedModule, ReadsContext):
    """A table of rows, split over ranks; padded with zero rows to a multiple of their number.

    A launch may bring embeddings that take the place of those of some tokens.

    Args:
        num_embeddings: rows of the checkpoint.
        embedding_dim: size of a row.
        tp: the ranks that share the table.

    Shape: ids [T] int64 -> [T, embedding_dim]
    """

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int, tp: TPGroup) -> None:
        super().__init__()
        self.launch = ContextHolder()
        self.num_embeddings = num_embeddings
        self.tp = tp
        self.local_size = -(-num_embeddings // tp.size)
        self.first_id = tp.rank * self.local_size
        self.weight = nn.Parameter(torch.empty(self.local_size, embedding_dim), requires_grad=False)
        self.slices["weight"] = {"": Slice(0, 0, self.local_size, num_embeddings)}

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self._look_up(input_ids)
        context = self.launch.context
        if context is None or context.replaced is None:
            return rows
        return context.replaced.put_into(rows)

    def _look_up(self, input_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.first_id
        is_elsewhere = (local_ids < 0) | (local_ids >= self.local_size)
        rows = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill(is_elsewhere[:, None], 0.0))


class ParallelLMHead(VocabParallelEmbedding):
    """The output head: logits over the whole vocabulary on every rank.

    Shape: [N, embedding_dim] -> [N, num_embeddings]
    """

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the very parameter of the input embedding."""
        self.weight = embedding.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.tp.all_gather(F.linear(hidden_states, self.weight))
        return logits[..., : self.num_embeddings]


class LearnedPositionalEmbedding(nn.Module):
    """One learned row per position, starting at row `offset` (OPT keeps two rows unused).

    Shape: positions [T] or [1, T] int64 -> [T, embedding_dim]
    """

    weight: nn.Parameter

    def __init__(self, num_positions: int, embedding_dim: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        weight = torch.empty(num_positions + offset, embedding_dim)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(text_positions(positions) + self.offset, self.weight)
