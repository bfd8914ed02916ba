"""The interface of weight formats. Independent of single formats."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vllm.distributed import TPGroup
from vllm.model_executor.layers.embedding import EmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod


class Quantization:
    """One weight format, with the settings of one checkpoint: how its layers are stored.

    By default it leaves every layer to the next format, and in the end to dense weights.

    Attributes:
        names_in_checkpoint: gives what a module of this name in the model may be called in a
            checkpoint, where that differs. Set before any layer is asked for.
    """

    names_in_checkpoint: Callable[[str], Sequence[str]] = staticmethod(lambda name: ())

    def start(self, tp: TPGroup) -> None:
        """Called once, before any layer is asked for, with the ranks that share the model."""

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        """A method of its own for the linear layer of this module name; None: not in this format.

        A packed layer, such as qkv_proj, has the names of its parts in `layer.feature_slices`.
        """
        return None

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        """A method for the embedding or output head of this name; None: not in this format.

        An output head that is tied shares its method with the embedding.
        """
        return None

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        """A method for the experts of this name; None: not in this format."""
        return None

    def finish_model(self, model: nn.Module) -> None:
        """Called once, when all layers have their weights and are finished.

        For what concerns the model as a whole, such as scales that were measured before, or hooks
        that measure them.
        """

    def method_of(self, name: str, layer: MethodLayer) -> WeightMethod[Any] | None:
        """`linear_method`, `embedding_method` or `experts_method`, as the layer is."""
        if isinstance(layer, ParallelLinear):
            return self.linear_method(name, layer)
        if isinstance(layer, VocabParallelEmbedding):
            return self.embedding_method(name, layer)
        if isinstance(layer, Experts):
            return self.experts_method(name, layer)
        return None
