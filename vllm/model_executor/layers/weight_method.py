"""Storage of a layer's weights, as an object that a quantization format can replace.

A layer knows the sizes of its features and how they are split over ranks. Its method knows which
parameters hold them, how checkpoint tensors fill these parameters, how filled parameters are
converted, and how to compute with them. Independent of formats and files.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget, SlicedModule

Layer = TypeVar("Layer", bound="MethodLayer")


class WeightMethod(ABC, Generic[Layer]):
    """Storage of the weights of one kind of layer.

    One object belongs to one layer, or to layers that share their parameters. It is called in this
    order: `create_weights`, `load` for each checkpoint tensor, `finish`.
    """

    @abstractmethod
    def create_weights(self, layer: Layer) -> None:
        """Register the uninitialised parameters, and their slices in `layer.slices`.

        Called under the model's dtype and, while a model is built, on the meta device.
        """

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        """Fill a parameter, or a part of it, from a checkpoint tensor.

        Args:
            target: the parameter of the tensor, from `layer.slices`.
            name: name of the tensor in the checkpoint.
            source: the tensor.
            tp: the ranks that share the layer.

        Raises:
            WeightLoadError: the tensor has the wrong shape.
        """
        target.fill(name, source, tp)

    optional_parameters: tuple[str, ...] = ()
    """Parameters that a checkpoint may lack; see `fill_missing`."""

    unused_tensors: tuple[str, ...] = ()
    """Ends of the names of tensors that a checkpoint may have of the layer and nothing reads."""

    def fill_missing(self, target: ParamTarget) -> None:
        """Fill a part of an optional parameter if the checkpoint has no tensor for it."""
        raise AssertionError(f"{target.param_name} is not optional")

    @property
    def is_dequantized(self) -> bool:
        """Whether quantized weights were dequantized, because the device has no kernel for them.

        Valid after the layer is finished.
        """
        return False

    def fill_indices(self, layer: Layer) -> None:
        """Give parameters that are indices or shapes valid values.

        Used with dummy weights, where all other parameters are random.
        """

    def finish(self, layer: Layer) -> None:
        """Convert the weights of a layer to the layout that runs, once all parameters are filled.

        Parameters may be replaced or removed. Called once per layer, as soon as it is complete and
        before other layers get memory, so that a model is never in memory twice.
        """

    def finish_on_shapes(self, layer: Layer) -> bool:
        """Give a layer without values the memory that `finish` would leave it, without computing.

        Return whether the method supports this.
        """
        return False


class MethodLayer(SlicedModule):
    """A layer whose weights are managed by its `method`; a bias belongs to the layer itself."""

    own_parameters: ClassVar[tuple[str, ...]] = ("bias",)
    """Names of parameters that are not the method's."""

    weight_dtype: ClassVar[torch.dtype | None] = None
    """Dtype of a dense weight, and of the inputs; None: the dtype of the model."""

    is_held: bool = False
    """The layer only loads: another one takes its parameters over."""

    is_of_items: bool = False
    """Whether the inputs of the layer are hidden states of images or sounds, which requests with
    different adapters share."""

    method: WeightMethod[Any]
    tp: TPGroup
    """The ranks that share the layer: all ranks of the model, or only this one."""

    def use_method(self, method: WeightMethod[Any]) -> None:
        """Store the weights with another method. Must be called before they are loaded."""
        self.remove_weights()
        self.method = method
        method.create_weights(self)

    def remove_weights(self) -> None:
        """Remove all parameters except the layer's own, such as the bias."""
        named = self.named_parameters(recurse=False)
        names = [name for name, _ in named if name not in self.own_parameters]
        for name in names:
            delattr(self, name)
            self.slices.pop(name, None)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        """Fill one of the layer's parameters; see `WeightMethod.load`.

        The layer's own `tp` is used: a layer that is not split is filled whole on every rank.
        """
        tp = self.tp
        if target.param_name in self.own_parameters:
            target.fill(name, source, tp)
        else:
            self.method.load(target, name, source, tp)

    def finish(self) -> None:
        """Convert the weights to the layout that runs; see `WeightMethod.finish`."""
        self.method.finish(self)
