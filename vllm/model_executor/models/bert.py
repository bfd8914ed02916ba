"""BERT: a post-norm encoder with learned positions, and its classifier for texts and pairs."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vllm.attention import EncoderAttention
from vllm.config import ModelArch
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.embedding import LearnedPositionalEmbedding, VocabParallelEmbedding
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.models.interface import PoolingModel

PRETRAINING_TENSORS = (
    "embeddings.position_ids",
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.seq_relationship.bias",
    "cls.seq_relationship.weight",
)
"""Tensors in checkpoints of the heads that the encoder was trained with."""


class EncoderEmbeddings(nn.Module):
    """The sum of token, position and type embeddings, normed.

    Args:
        arch: architecture of the model.
        tp: the ranks that share the token table.
        position_offset: index in the position table of the first token.

    Shape: embeddings of tokens [T, hidden], positions and token_type_ids [T] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup, position_offset: int = 0) -> None:
        super().__init__()
        kind = arch.hf_config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise ConfigError(
                f"position_embedding_type {kind!r} is not supported by {arch.architecture}; "
                f"supported: absolute"
            )
        size, num_types = arch.hidden_size, arch.config_count("type_vocab_size") or 1
        self.word_embeddings = VocabParallelEmbedding(arch.vocab_size, size, tp)
        self.position_embeddings = LearnedPositionalEmbedding(
            arch.max_position_embeddings, size, position_offset
        )
        self.token_type_embeddings = nn.Embedding(num_types, size)
        self.LayerNorm = LayerNorm(size, arch.norm_eps)

    def forward(self, embedded: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        if types is None:
            of_type = self.token_type_embeddings.weight[0]
        else:
            of_type = self.token_type_embeddings(types)
        return self.LayerNorm(embedded + self.position_embeddings(positions) + of_type)


class EncoderSelfAttention(nn.Module):
    """Query, key and value of every head, and attention over the whole prompt.

    Shape: [T, hidden] -> [T, hidden / tp.size]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        size = arch.hidden_size
        self.head_size = arch.head_size
        self.qkv_proj = ColumnParallelLinear(
            size, {"query": size, "key": size, "value": size}, tp, bias=True
        )
        self.attn = EncoderAttention(divide(arch.num_heads, tp.size), arch.head_size)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv_proj(x).split(self.qkv_proj.split_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in packed)
        return self.attn(q, k, v).flatten(1)


class EncoderResidual(nn.Module):
    """norm(dense(x) + residual), the last step of the attention block and of the MLP.

    Shape: x [T, input_size / tp.size], residual [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, input_size: int, tp: TPGroup) -> None:
        super().__init__()
        self.dense = RowParallelLinear(input_size, arch.hidden_size, tp, bias=True)
        self.LayerNorm = LayerNorm(arch.hidden_size, arch.norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class EncoderAttentionBlock(nn.Module):
    """The attention of a layer; the level `attention` of the checkpoint's names."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.self = EncoderSelfAttention(arch, tp)
        self.output = EncoderResidual(arch, arch.hidden_size, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x), x)


class EncoderIntermediate(nn.Module):
    """The first half of the MLP: a matmul and the activation.

    Shape: [T, hidden] -> [T, intermediate / tp.size]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.dense = ColumnParallelLinear(
            arch.hidden_size, {"": arch.intermediate_size}, tp, bias=True
        )
        self.act = get_activation(arch.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class EncoderLayer(nn.Module):
    """Attention and MLP, each normed after the residual is added (post-norm)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.attention = EncoderAttentionBlock(arch, tp)
        self.intermediate = EncoderIntermediate(arch, tp)
        self.output = EncoderResidual(arch, arch.intermediate_size, tp)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class EncoderStack(nn.Module):
    """The layers; the level `encoder` of the checkpoint's names."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(arch, tp) for _ in range(arch.num_layers))

    def forward(self, x: Tensor, first: int, end: int) -> Tensor:
        for index in range(first, end):
            x = self.layer[index](x)
        return x


class Encoder(nn.Module):
    """Embeddings and layers; the level `model` of the checkpoint's names."""

    def __init__(self, arch: ModelArch, tp: TPGroup, position_offset: int = 0) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(arch, tp, position_offset)
        self.encoder = EncoderStack(arch, tp)


class EncoderModel(PoolingModel):
    """Base class of encoder-only models, which return hidden states; families set the first
    position.
    """

    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *("pooler.dense.weight", "pooler.dense.bias"),
        *PRETRAINING_TENSORS,
    )

    def __init__(self, arch: ModelArch, tp: TPGroup, position_offset: int = 0) -> None:
        super().__init__(arch, tp)
        self.num_token_types = arch.config_count("type_vocab_size") or 1
        self.model = Encoder(arch, tp, position_offset)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.encoder.layer)

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        heads = [module for module in self.children() if module is not self.model]
        return [self.model.embeddings], heads

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.model.embeddings.word_embeddings

    def run_layers(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        first: int,
        end: int,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        if first == 0:
            hidden_states = self.model.embeddings(hidden_states, positions, token_type_ids)
        return self.model.encoder(hidden_states, first, end)


class BertModel(EncoderModel):
    """BERT (Devlin et al. 2019, arXiv 1810.04805)."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "bert.": "model.",
        "embeddings.": "model.embeddings.",
        "encoder.": "model.encoder.",
    }


class BertForSequenceClassification(EncoderModel):
    """Classifies with a dense layer and tanh on the first token, and a linear classifier."""

    ignored_tensors: ClassVar[tuple[str, ...]] = PRETRAINING_TENSORS
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "bert.pooler.dense.": "pooler.",
        "bert.": "model.",
    }

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.pooler = nn.Linear(arch.hidden_size, arch.hidden_size)
        self.classifier = nn.Linear(arch.hidden_size, num_labels(arch))

    def head(self, pooled: Tensor) -> Tensor:
        """Compute the logits of the labels [N, labels] from the first tokens [N, hidden]."""
        return self.classifier(self.pooler(pooled).tanh())


def num_labels(arch: ModelArch) -> int:
    """Count the classes of a classifier; two, as in transformers, if config.json does not name
    any."""
    return len(arch.hf_config.get("id2label") or ()) or int(arch.hf_config.get("num_labels") or 2)
