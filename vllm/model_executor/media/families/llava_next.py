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

    def join(self, found: Sequence[Tensor], item: Mapping[str, Tensor]) -> Tensor:
        embeddings = torch.cat([*found, self.image_newline[None].cpu()])
        return embeddings.index_select(0, self._order(Layout(*item["layout"].tolist())))

    def _order(self, layout: Layout) -> Tensor:
        """Return the order in which the embeddings of the tiles of an image are joined.

        The index after the last embedding means the learned end of a row.
        """
        side, per_tile = self.tower.patches_per_side, self.embeddings_per_tile
        y = torch.arange(layout.top, layout.top + layout.rows)[:, None]
        x = torch.arange(layout.left, layout.left + layout.columns)
        tile = 1 + y // side * layout.tile_columns + x // side
        patches = tile * per_tile + y % side * side + x % side
        ends = patches.new_full((layout.rows, 1), layout.num_tiles * per_tile)
        return torch.cat([torch.arange(per_tile), torch.cat([patches, ends], 1).flatten()])


Encoder = LlavaNextEncoder
