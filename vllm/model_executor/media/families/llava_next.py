"""The encoder of LLaVA-NeXT (Liu et al. 2024) and Granite Vision."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.media.families.llava import LlavaEncoder
from vllm.multimodal.families.llava_next import Layout, check_grid


class LlavaNextEncoder(LlavaEncoder):
    """Encodes each tile as LLaVA 1.5, then joins the tiles row by row without padding.

    An image also has the tensor `layout` [6]: the fields of `Layout`.
    """

    prefixes: ClassVar[tuple[str, ...]] = (*LlavaEncoder.prefixes, "image_newline")

    image_newline: nn.Parameter
    """[hidden_size], after each row of patches."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        check_grid(config, self.tower)
        self.image_newline = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        tensors = super().prepare(items, size)
        num_tiles = tensors["pixels"].shape[0]
        order = torch.cat(self._orders(items, num_tiles))
        # The largest number for this many tiles: no padding is removed, and each row has one tile.
        most = num_tiles * (self.embeddings_per_tile + self.tower.patches_per_side)
        tensors["order"] = torch.cat([order, order.new_zeros(most - len(order))])
        return tensors

    def _orders(self, items: Sequence[Mapping[str, Tensor]], num_tiles: int) -> list[Tensor]:
        """Return for each image the order in which the embeddings of its tiles are joined.

        An index after the last embedding stands for the learned end of a row.
        """
        side, per_tile = self.tower.patches_per_side, self.embeddings_per_tile
        orders, first = [], 0
        for item in items:
            layout = Layout(*item["layout"].tolist())
            y = torch.arange(layout.top, layout.top + layout.rows)[:, None]
            x = torch.arange(layout.left, layout.left + layout.columns)
            tile = 1 + y // side * layout.tile_columns + x // side
            patches = (first + tile) * per_tile + y % side * side + x % side
            ends = patches.new_full((layout.rows, 1), num_tiles * per_tile)
            copy = torch.arange(per_tile) + first * per_tile
            orders += [copy, torch.cat([patches, ends], 1).flatten()]
            first += layout.num_tiles
        return orders

    def run(self, **tensors: Tensor) -> Tensor:
        order = tensors.pop("order")
        embeddings = torch.cat([super().run(**tensors), self.image_newline[None]])
        return embeddings.index_select(0, order)

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        side = self.tower.patches_per_side
        sizes = [Layout(*item["layout"].tolist()).num_tokens(side) for item in items]
        return list(embeddings[: sum(sizes)].split(sizes))


Encoder = LlavaNextEncoder
