"""Weights of dense checkpoints in the layout of the CPU kernels, unchanged or quantized.

int8 has one scale per output feature, and inputs are quantized to int8 as well, with one scale per
token (W8A8).

int4 has groups of 32 inputs that share a float16 scale without a zero point, 4.5 bits per weight;
inputs are quantized to int8 in the same groups, which changes the perplexity of the bundled model
by less than 0.01 %. An additional minimum per group (5 bits) was measured and gave a perplexity
only 0.2 % lower on the bundled model; groups of 64 with a minimum gave a higher one.

Both store output heads, the embeddings that share their table, and encoders of sounds in int8.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.layers.cpu_methods import CPUExperts, CPULinear, PackedTable, StoredAs
from vllm.model_executor.layers.embedding import (
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.model_executor.quantization.interface import Quantization
from vllm.ops.cpu.library import load_cpu_kernels

logger = init_logger(__name__)


class CPUPacked(Quantization):
    """Packs every linear layer and output head for the CPU kernels, in the model's dtype."""

    stored_as: ClassVar[StoredAs] = "dense"
    head_stored_as: ClassVar[StoredAs] = "dense"
    tower_stored_as: ClassVar[StoredAs] = "dense"
    """Format of the linear layers of an encoder of sounds."""

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        return CPULinear("dense" if layer.keeps_precision else self.stored_as)

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        return CPUExperts(self.stored_as)

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        return _head_method(layer, self.head_stored_as)

    def tower_method(self, name: str, layer: TowerLinear) -> LinearMethod | None:
        return CPULinear("dense" if layer.keeps_precision else self.tower_stored_as)


def _head_method(layer: VocabParallelEmbedding, stored_as: StoredAs) -> EmbeddingMethod | None:
    """Return a method for an output head or the embedding tied to it; None for other embeddings."""
    # A tied head shares the method of the embedding, unless the head is on another pipeline stage.
    is_of_head = isinstance(layer, ParallelLMHead) or layer.is_head_elsewhere
    return PackedTable(stored_as) if is_of_head else None


class CPUInt8Head(Quantization):
    """Stores dense output heads in int8 (`--lm-head-quantization int8`)."""

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        return _head_method(layer, "int8")

    def finish_model(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, ParallelLMHead) and not isinstance(layer.method, PackedTable):
                logger.info(
                    "lm_head_quantization=int8 has no effect on %s: the checkpoint, or another "
                    "setting, quantizes it already",
                    name,
                )


class CPUInt8(CPUPacked):
    """Quantizes dense weights to int8 on the CPU (`--quantization int8`). Takes no settings.

    Raises:
        ConfigError: there are no kernels.
    """

    stored_as: ClassVar[StoredAs] = "int8"
    head_stored_as: ClassVar[StoredAs] = "int8"
    tower_stored_as: ClassVar[StoredAs] = "int8"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        del settings
        if load_cpu_kernels() is None:
            raise ConfigError(
                f"--quantization {self.stored_as} needs the C++ CPU kernels, which are not built. "
                "Build them with: python setup.py build_ext --inplace"
            )


class CPUInt4(CPUInt8):
    """Quantizes dense weights to int4 on the CPU (`--quantization int4`). Takes no settings."""

    stored_as: ClassVar[StoredAs] = "int4"
