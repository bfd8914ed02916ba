"""Token embeddings and the output head, with the vocabulary split over ranks."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention.context import ContextHolder, ReadsContext, text_positions
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget, Slice
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod
from vllm.ops import get_ops
from vllm.ops.lora_weights import AdaptedLayer


class EmbeddingMethod(WeightMethod["VocabParallelEmbedding"]):
    """Storage format of an embedding table, and the operations with it.

    `layer` gives the size: `local_size` rows of `embedding_dim` elements.
    """

    @abstractmethod
    def embed(self, layer: "VocabParallelEmbedding", ids: Tensor) -> Tensor:
        """Look up embeddings in this rank's part of the table, [T] int64 -> [T, embedding_dim]."""

    @abstractmethod
    def multiply(self, layer: "VocabParallelEmbedding", hidden_states: Tensor) -> Tensor:
        """Compute hidden_states [N, embedding_dim] @ table.T -> [N, local_size]."""


class DenseTable(EmbeddingMethod):
    """One dense weight [local_size, embedding_dim] in the model's dtype."""

    def create_weights(self, layer: "VocabParallelEmbedding") -> None:
        weight = torch.empty(layer.local_size, layer.embedding_dim)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.slices["weight"] = dict(layer.feature_slices)

    def embed(self, layer: "VocabParallelEmbedding", ids: Tensor) -> Tensor:
        return F.embedding(ids, layer.weight)

    def multiply(self, layer: "VocabParallelEmbedding", hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, layer.weight)


class VocabParallelEmbedding(MethodLayer, ReadsContext):
    """An embedding table split over ranks, padded with zero rows to a multiple of the rank count.

    A batch may bring embeddings (of images, for example) that replace the embeddings of some
    tokens; they are not scaled.

    Args:
        num_embeddings: rows of the table in the checkpoint.
        embedding_dim: size of one embedding.
        tp: the ranks that share the table.
        scale: factor on the embeddings of tokens, not on the embeddings that a batch brings.

    Shape: ids [T] int64 -> [T, embedding_dim]
    """

    weight: nn.Parameter
    method: EmbeddingMethod
    is_head_elsewhere: bool = False
    """Another stage of the pipeline has an output head with the same parameters."""
    adapted: AdaptedLayer | None = None
    """Layer of LoRA adapters that may add to its rows; None: none."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, tp: TPGroup, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.launch = ContextHolder()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.tp = tp
        self.scale = scale
        self.local_size = -(-num_embeddings // tp.size)
        self.first_id = tp.rank * self.local_size
        # Sizes as of a linear layer, because an output head multiplies with the table.
        self.input_size, self.output_size = embedding_dim, self.local_size
        self.feature_slices = {"": Slice(0, 0, self.local_size, num_embeddings)}
        self.use_method(DenseTable())

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.look_up(input_ids)
        context = self.launch.context
        if context is not None and context.adapters is not None and self.adapted is not None:
            rows = context.adapters.adapt_embeddings(self.adapted, input_ids, rows)
        if self.scale != 1.0:
            rows = rows * self.scale
        if context is None or context.replaced is None:
            return rows
        return context.replaced.put_into(rows)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        shape, wanted = list(source.shape), [self.num_embeddings, self.embedding_dim]
        if target.slice is None:  # a file for each rank has only its part of the table
            wanted[0] = self.local_size
        is_table = name.endswith(".weight")  # other tensors of a quantized table have other shapes
        if is_table and len(shape) == 2 and shape[0] != wanted[0] and shape[1] == wanted[1]:
            raise WeightLoadError(
                f"tensor {name} has shape {shape} in the checkpoint, but the model needs {wanted}. "
                f"If the vocabulary of the checkpoint has {shape[0]} tokens, set vocab_size in "
                "config.json or with hf_overrides"
            )
        super().load(target, name, source, tp)

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Return unscaled embeddings, as in the checkpoint, [T] int64 -> [T, embedding_dim]."""
        if self.tp.size == 1:
            return self.method.embed(self, input_ids)
        rows = get_ops().rows_of_part(
            lambda ids: self.method.embed(self, ids), input_ids, self.first_id, self.local_size
        )
        return self.tp.all_reduce(rows)


class ParallelLMHead(VocabParallelEmbedding):
    """The output head: logits over the whole vocabulary on every rank.

    Args:
        num_embeddings: tokens of the vocabulary.
        embedding_dim: features of the hidden states.
        tp: the ranks that share it.
        has_bias: whether a bias is added to the logit of each token.

    Shape: [N, embedding_dim] -> [N, num_embeddings]
    """

    _tied: tuple[VocabParallelEmbedding, ...] = ()
    """The input embedding, if it has the same parameters; a tuple, so that it is no submodule."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, tp: TPGroup, has_bias: bool = False
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, tp)
        self.register_parameter("bias", None)
        if has_bias:
            self.bias = nn.Parameter(torch.empty(self.local_size), requires_grad=False)
            self.slices["bias"] = {"": Slice(0, 0, self.local_size, num_embeddings)}

    @property
    def is_tied(self) -> bool:
        """Whether the head shares its parameters with the input embedding."""
        return bool(self._tied)

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Share the parameters and the weight method of the input embedding."""
        self._tied = (embedding,)
        self._share()

    def use_method(self, method: WeightMethod[Any]) -> None:
        """Store the weights with this method; a tied input embedding gets the same method."""
        if not self._tied:
            super().use_method(method)
            return
        self._tied[0].use_method(method)
        self._share()

    def _share(self) -> None:
        (embedding,) = self._tied
        self.remove_weights()
        self.method = embedding.method
        for name, param in embedding.named_parameters():
            setattr(self, name, param)
            self.slices[name] = embedding.slices[name]

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.method.multiply(self, hidden_states)
        if self.bias is not None:
            logits = logits + self.bias
        logits = self.tp.all_gather(logits)
        return logits[..., : self.num_embeddings]


class LearnedPositionalEmbedding(nn.Module):
    """One learned embedding per position; position p uses row p + `offset` (2 in OPT).

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
