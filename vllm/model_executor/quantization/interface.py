"""The interface of quantization formats. Independent of single formats."""

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
    """The names of tensors and modules in the checkpoint that a model is loaded from."""

    of_module: Callable[[str], Sequence[str]] = lambda name: ()
    """Names that a module of the model may have in the checkpoint, where they differ."""
    has_tensor: Callable[[str], bool] = lambda name: False
    """Whether the files of the checkpoint have a tensor of this name."""
    has_files: bool = True
    """False: there are no files, as in a plan, so only the settings describe the layers."""


class Quantization:
    """One quantization format, with the settings of one checkpoint: how its layers are stored.

    By default it declines every layer, which then gets the next format, or dense weights.
    """

    names = CheckpointNames()

    def use_names(self, names: CheckpointNames) -> None:
        """Set the names of the checkpoint; called once, before the method of any layer is
        requested.
        """
        self.names = names

    def start(self, tp: TPGroup, stage: Stage | None = None) -> None:
        """Set the ranks and the stage; called once, before the method of any layer is requested.

        Args:
            tp: the ranks that share the layers.
            stage: pipeline stage of this rank; None: there is only one stage.
        """

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        """Return a new weight method for the linear layer with this module name; None: not
        quantized.

        The names of the parts of a packed layer, such as qkv_proj, are in `layer.feature_slices`.
        """
        return None

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        """Return a weight method for the embedding or output head of this name; None: not
        quantized.

        A tied output head shares its method with the embedding.
        """
        return None

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        """Return a weight method for the experts of this name; None: not quantized."""
        return None

    def tower_method(self, name: str, layer: TowerLinear) -> LinearMethod | None:
        """Return a weight method for a linear layer of an image or sound encoder; None: not
        quantized.
        """
        return None

    def finish_model(self, model: nn.Module) -> None:
        """Finish the model as a whole; called once, after all layers are loaded and finished.

        For example, to set scales that were measured before, or to add hooks that measure.
        """

    def method_of(self, name: str, layer: MethodLayer) -> WeightMethod[Any] | None:
        """Return the weight method of a layer, by calling the function above for its class."""
        if isinstance(layer, ParallelLinear):
            return self.linear_method(name, layer)
        if isinstance(layer, VocabParallelEmbedding):
            return self.embedding_method(name, layer)
        if isinstance(layer, Experts):
            return self.experts_method(name, layer)
        if isinstance(layer, TowerLinear):
            return self.tower_method(name, layer)
        return None
