"""The base class of encoders whose input is tiles of one fixed size."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.media.vision.layers import normalize
from vllm.model_executor.media.vision.transformer import tower_parameter


class TileEncoder(MediaEncoder):
    """Encodes tiles into embeddings, the same number for each tile, one tile after another.

    The tensors of an image are `pixels` [T, 3, S, S] and `statistics` [2, 3]; `TiledFamily` makes
    them. The first one of `prefixes` is the name of the vision tower.
    """

    unit: ClassVar[str] = "images"

    embeddings_per_tile: int

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode tiles: their embeddings [T, embeddings_per_tile, hidden_size].

        Args:
            pixels: [T, 3, S, S], normalised.
        """

    def parameter_name(self, name: str) -> str | None:
        prefix = self.prefixes[0]
        return tower_parameter(name, prefix, self.get_submodule(prefix.removesuffix(".")))

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        return [{**item, "pixels": pixels} for pixels in item["pixels"].split(1)]

    def size_of(self, item: Mapping[str, Tensor]) -> int:
        return item["pixels"].shape[0]

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        pixels = torch.cat([item["pixels"] for item in items])
        statistics = torch.cat(
            [item["statistics"].expand(self.size_of(item), -1, -1) for item in items]
        )
        missing = 0 if size is None else size - pixels.shape[0]
        assert missing >= 0, f"{pixels.shape[0]} tiles do not fit {size}"
        return {
            "pixels": F.pad(pixels, (0, 0) * 3 + (0, missing)),
            # A standard deviation of 0 would divide by zero and give NaN.
            "statistics": F.pad(statistics, (0, 0) * 2 + (0, missing), value=1.0),
        }

    def run(self, **tensors: Tensor) -> Tensor:
        pixels = normalize(tensors["pixels"], tensors["statistics"], self.dtype)
        return self.encode(pixels).flatten(0, 1)

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        sizes = [self.size_of(item) * self.embeddings_per_tile for item in items]
        return list(embeddings[: sum(sizes)].split(sizes))
