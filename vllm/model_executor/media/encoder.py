"""The interface of encoders of images and sounds. Independent of model families."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class MediaEncoder(nn.Module, ABC):
    """A vision tower and its projector: images to embeddings of the language model.

    Its parameters have the names of the checkpoint. An encoder runs in three parts, so that an
    accelerator compiles few shapes. `prepare` pads on the host. `run` has only operators whose
    shapes depend on the shapes of its arguments, never on values. `split` cuts the result. The
    result of an image depends neither on the other images nor on padding.

    An image may have parts (`divide`), such as tiles, which can be encoded in different steps. The
    other methods take parts as images, and `join` joins the embeddings of the parts.

    Args:
        config: config.json of the whole model.
        hidden_size: hidden size of the language model's embeddings.
    """

    prefixes: ClassVar[tuple[str, ...]]
    """Beginnings of the encoder's names in the checkpoint, such as `vision_tower.`, after the
    prefix `model.` is removed."""

    unit: ClassVar[str]
    """The unit of `size_of`: "patches", or a name of items that all have one size, such as
    "images"."""

    reads: ClassVar[str] = "images"
    """Items that the encoder reads, as messages name them."""

    max_at_once: int | None = None
    """Parts (`divide`) that are encoded in one forward pass on the CPU; None: all of a step."""

    num_added: int = 0
    """Number of layers, the first of the language model, after which values are added to hidden
    states. An embedding has hidden_size elements for the token, and as many for each such
    layer."""

    max_states: int = 0
    """Hidden states of the largest item, where cross-attention layers of the language model read
    them; `split` returns the states [n, hidden_size] of each item. 0: it makes embeddings."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.dtype = torch.get_default_dtype()

    def parameter_name(self, name: str) -> str | None:
        """Return the parameter name of a checkpoint tensor; None if the encoder does not need it.

        Args:
            name: name in the checkpoint, without the prefix `model.`; begins with one of
                `prefixes`.
        """
        return name

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Divide an item into the smallest parts that are encoded separately.

        There are `MediaFamily.num_parts` of them.
        """
        return [item]

    def join(self, found: Sequence[Tensor], item: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings [n, width] of an item, on the host.

        Args:
            found: embeddings of each of its parts, on the host.
            item: the item in the format that `divide` expects.
        """
        return found[0] if len(found) == 1 else torch.cat(list(found))

    @abstractmethod
    def size_of(self, item: Mapping[str, Tensor]) -> int:
        """Return the size of an image, in the units in which forward passes are padded."""

    def max_units(self, num_embeddings: int) -> int | None:
        """Return the maximum size of an image with this number of embeddings, in units of
        `size_of`.

        None if the size cannot be computed from the number of embeddings.
        """
        return None

    @abstractmethod
    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        """Build the arguments of `run` for some images, on the host.

        Args:
            items: `EncoderInput.tensors` of each image.
            size: pad to this number of units; None: no padding.
        """

    @abstractmethod
    def run(self, **tensors: Tensor) -> Tensor:
        """Encode the prepared tensors, on the device of the weights."""

    @abstractmethod
    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Split the result of `run` into the embeddings of each image, [n, width] each."""

    def encode_parts(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode parts without padding; return the embeddings [n, width] of each."""
        return self.split(self.run(**self.prepare(parts)), parts)

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode whole images without padding; return the embeddings [n, width] of each."""
        divided = [self.divide(item) for item in items]
        found = iter(self.encode_parts([part for parts in divided for part in parts]))
        return [
            self.join([next(found) for _ in parts], item)
            for parts, item in zip(divided, items, strict=True)
        ]
