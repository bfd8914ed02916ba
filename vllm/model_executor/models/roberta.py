"""RoBERTa and XLM-RoBERTa: BERT with positions that start after the padding position."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.models.bert import PRETRAINING_TENSORS, EncoderModel, num_labels

_HEAD_TENSORS = (
    *("lm_head.bias", "lm_head.weight", "lm_head.decoder.bias", "lm_head.decoder.weight"),
    *("lm_head.dense.bias", "lm_head.dense.weight"),
    *("lm_head.layer_norm.bias", "lm_head.layer_norm.weight"),
)


def _position_offset(arch: ModelArch) -> int:
    return arch.config_count("pad_token_id") + 1


class RobertaModel(EncoderModel):
    """RoBERTa (Liu et al. 2019, arXiv 1907.11692)."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (*EncoderModel.ignored_tensors, *_HEAD_TENSORS)
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "roberta.": "model.",
        "embeddings.": "model.embeddings.",
        "encoder.": "model.encoder.",
    }

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, _position_offset(arch))


class XLMRobertaModel(RobertaModel):
    """XLM-RoBERTa (Conneau et al. 2020, arXiv 1911.02116)."""


class RobertaClassificationHead(nn.Module):
    """A dense layer with tanh and a linear classifier; the level `classifier` of the checkpoint's
    names.

    Shape: [N, hidden] -> [N, labels]
    """

    def __init__(self, arch: ModelArch) -> None:
        super().__init__()
        self.dense = nn.Linear(arch.hidden_size, arch.hidden_size)
        self.out_proj = nn.Linear(arch.hidden_size, num_labels(arch))

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dense(x).tanh())


class RobertaForSequenceClassification(EncoderModel):
    """RoBERTa with a classifier on the first token: a dense layer with tanh, then a linear
    layer.
    """

    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *("roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
        *PRETRAINING_TENSORS,
    )
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"roberta.": "model."}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, _position_offset(arch))
        self.classifier = RobertaClassificationHead(arch)

    def head(self, pooled: Tensor) -> Tensor:
        """Compute the logits of the labels [N, labels] from the first tokens [N, hidden]."""
        return self.classifier(pooled)


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """XLM-RoBERTa for classification: RoBERTa with another vocabulary."""
