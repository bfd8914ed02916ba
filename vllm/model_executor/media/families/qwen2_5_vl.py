"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): most layers see a window of a frame."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.media.families.qwen2_vl import NORM_EPS, BlockMerger
from vllm.model_executor.media.vision.grid_encoder import (
    GatedTowerMLP,
    GridAttention,
    GridEncoder,
    GridLayer,
    GridPatchEmbedding,
    GridSizes,
    grid_of,
    read_activation,
    read_sizes,
)
from vllm.model_executor.media.vision.packed_attention import attend_within, attend_within_windows
from vllm.multimodal.interface.checks import (
    config_object,
    config_whole,
    layer_indices,
    wrong_config,
)

_FULL_LAYERS = (7, 15, 23, 31)


class _Tower(nn.Module):
    """The vision tower; its modules are named as in checkpoints."""

    def __init__(self, vision: Mapping[str, Any], sizes: GridSizes, hidden_size: int) -> None:
        super().__init__()
        width = sizes.hidden_size
        inner = config_whole(vision, "intermediate_size", 3420, 2**20, "vision_config.")
        activation = get_activation(read_activation(vision, "silu"))
        self.patch_embed = GridPatchEmbedding(sizes)
        self.blocks = nn.ModuleList(
            GridLayer(
                (RMSNorm(width, NORM_EPS), RMSNorm(width, NORM_EPS)),
                GridAttention(sizes),
                GatedTowerMLP(width, inner, activation, has_bias=True),
            )
            for _ in range(sizes.depth)
        )
        self.merger = BlockMerger(sizes, RMSNorm(width, NORM_EPS), hidden_size)


class Qwen2_5_VLEncoder(GridEncoder):
    """The vision tower of Qwen2.5-VL, with its merger.

    Within `run` the blocks of an image are in the order of their windows.
    """

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, read_sizes(config))
        vision = config_object(config, "vision_config")
        window = config_whole(vision, "window_size", 112, 2**14, "vision_config.")
        self.window = window // self.sizes.merge_size // self.sizes.patch_size
        """Rows and columns of blocks in a window."""
        if not self.window:
            least = self.sizes.merge_size * self.sizes.patch_size
            raise wrong_config("vision_config.window_size", window, f"an integer from {least}")
        self.full_layers = layer_indices(vision, "fullatt_block_indexes", _FULL_LAYERS)
        self.visual = _Tower(vision, self.sizes, hidden_size)

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        """Build the arguments of `GridEncoder.run`, with the blocks in the order of their windows.

        Adds `windows` [N], the window of each patch, and `block_order` [N / patches of a block],
        the index of each block in the window order.
        """
        tensors = super().prepare(items, size)
        block = self.sizes.block
        windows, num_windows = [], 0
        for item in items:
            own = self._windows_of(grid_of(item)) + num_windows
            num_windows = int(own.max()) + 1
            windows.append(own)
        padding = len(tensors["pixels"]) // block - sum(map(len, windows))
        of_blocks = torch.cat((*windows, torch.arange(padding) + num_windows))
        order = of_blocks.argsort(stable=True)
        patches = (order[:, None] * block + torch.arange(block)).flatten()
        return {
            **tensors,
            "pixels": tensors["pixels"][patches],
            "statistics": tensors["statistics"][patches],
            "rotations": tensors["rotations"][:, patches],
            "windows": of_blocks[order].repeat_interleave(block).int(),
            "block_order": order.argsort(),
        }

    def _windows_of(self, grid: tuple[int, int, int]) -> Tensor:
        """Return the index of the window of each block of an image."""
        merge_size = self.sizes.merge_size
        frames, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
        per_column, per_row = -(-rows // self.window), -(-columns // self.window)
        frame = torch.arange(frames)[:, None, None]
        row = torch.arange(rows)[:, None] // self.window
        column = torch.arange(columns) // self.window
        return ((frame * per_column + row) * per_row + column).flatten()

    def run(self, **tensors: Tensor) -> Tensor:
        x = self.visual.patch_embed(self.scaled(tensors))
        largest = self.window**2 * self.sizes.block
        whole = partial(attend_within, groups=tensors.get("frames"))
        windowed = partial(attend_within_windows, groups=tensors["windows"], window=largest)
        for index, layer in enumerate(self.visual.blocks):
            x = layer(x, tensors["rotations"], whole if index in self.full_layers else windowed)
        return self.visual.merger(x).index_select(0, tensors["block_order"])


Encoder = Qwen2_5_VLEncoder
