"""The interface of weight formats. Independent of single formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm.distributed import Stage, TPGroup
from vllm.model_executor.layers.embedding import EmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod
from vllm.model_executor.media.vision.layers import TowerLinear


@dataclass(frozen=True)
class CheckpointNames:
    """Names of the checkpoint that a model is loaded from."""

    of_module: Callable[[str], Sequence[str]] = lambda name: ()
    """Names that a module of the model may have in the checkpoint, where they differ."""
    has_tensor: Callable[[str], bool] = lambda name: False
    """Whether its files have a tensor of this name."""


class Quantization:
    """One weight format, with the settings of one checkpoint: how its layers are stored.

    By default it leaves every layer to the next format, and in the end to dense weights.
    """

    names = CheckpointNames()

    def use_names(self, names: CheckpointNames) -> None:
        """Set the names of the checkpoint; called once, before any layer is asked for."""
        self.names = names

    def start(self, tp: TPGroup, stage: Stage | None = None) -> None:
        """Set the ranks and the stage; called once, before any layer is asked for.

        Args:
            tp: the ranks that share the layers.
            stage: of the pipeline; None: there is one.
        """

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        """Return a method of its own for the linear layer of this module name; None: not in this
        format.

        A packed layer, such as qkv_proj, has the names of its parts in `layer.feature_slices`.
        """
        return None

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        """Return a method for the embedding or output head of this name; None: not in this format.

        An output head that is tied shares its method with the embedding.
        """
        return None

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        """Return a method for the experts of this name; None: not in this format."""
        return None

    def tower_method(self, name: str, layer: TowerLinear) -> LinearMethod | None:
        """Return a method for a linear layer of an encoder of images; None: not in this format."""
        return None

    def finish_model(self, model: nn.Module) -> None:
        """Finish the model; called once, when all layers have their weights and are finished.

        For what concerns the model as a whole, such as scales that were measured before, or hooks
        that measure them.
        """

    def method_of(self, name: str, layer: MethodLayer) -> WeightMethod[Any] | None:
        """Return the method of one of the functions above, as the layer is."""
        if isinstance(layer, ParallelLinear):
            return self.linear_method(name, layer)
        if isinstance(layer, VocabParallelEmbedding):
            return self.embedding_method(name, layer)
        if isinstance(layer, Experts):
            return self.experts_method(name, layer)
        if isinstance(layer, TowerLinear):
            return self.tower_method(name, layer)
        return None
