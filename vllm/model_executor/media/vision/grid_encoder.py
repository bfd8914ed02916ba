"""Encoders for images of any size, such as Qwen-VL and GLM-V.

The patches of all images are one sequence, and blocks of patches become tokens. Independent of
models.

Shapes: N patches with padding, H heads of size D, C channels of a patch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.media.vision.interpolated_table import InterpolatedTable
from vllm.model_executor.media.vision.layers import TowerLinear, normalize
from vllm.model_executor.media.vision.rotations import (
    axial_frequencies,
    block_coordinates,
    rotate,
    rotations_of,
)
from vllm.multimodal.interface.checks import (
    config_number,
    config_object,
    config_whole,
    wrong_config,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: query, key and value [N, H, D] to [N, H, D]."""

_MAX_SIZE = 2**16
_MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class GridSizes:
    """Sizes of a vision tower."""

    hidden_size: int
    """C, the elements of a hidden state."""
    depth: int
    """Number of layers."""
    num_heads: int
    patch_size: int
    """Height and width of a patch in pixels."""
    frames: int
    """Frames of a patch. An image has all frames alike."""
    merge_size: int
    """A block of so many rows and columns of patches becomes a token."""
    theta: float
    """Base of the angles of rotations."""

    @property
    def block(self) -> int:
        """Number of patches in a block."""
        return self.merge_size**2

    @property
    def head_size(self) -> int:
        """Size D of an attention head."""
        return self.hidden_size // self.num_heads


def read_sizes(
    config: Mapping[str, Any], hidden_key: str = "hidden_size", patch_size: int = 14
) -> GridSizes:
    """Read the sizes of the vision tower from `vision_config` in config.json.

    Args:
        config: config of the whole model.
        hidden_key: key of the hidden size of the tower.
        patch_size: used if the config has none.

    Raises:
        ConfigError: a value cannot be used.
    """
    vision = config_object(config, "vision_config")
    rope = config_object(vision, "rope_parameters")

    def size(key: str, largest: int = _MAX_SIZE, default: int = 0) -> int:
        found = config_whole(vision, key, default, largest, "vision_config.")
        if not found:
            raise wrong_config(f"vision_config.{key}", None, f"an integer from 1 to {largest}")
        return found

    sizes = GridSizes(
        hidden_size=size(hidden_key),
        depth=size("depth", _MAX_LAYERS),
        num_heads=size("num_heads"),
        patch_size=size("patch_size", default=patch_size),
        frames=size("temporal_patch_size", default=2),
        merge_size=size("spatial_merge_size", default=2),
        theta=config_number(rope, "rope_theta", 10000.0, "vision_config.rope_parameters."),
    )
    if sizes.hidden_size % (4 * sizes.num_heads):
        raise wrong_config(
            f"vision_config.{hidden_key}",
            sizes.hidden_size,
            f"a multiple of 4 * num_heads ({4 * sizes.num_heads})",
        )
    return sizes


def read_activation(vision: Mapping[str, Any], default: str) -> str:
    """Read the name of the activation of the MLPs from `vision_config`.

    Raises:
        ConfigError: it is not a string.
    """
    name = vision.get("hidden_act")
    if name is not None and not isinstance(name, str):
        raise wrong_config("vision_config.hidden_act", name, "the name of a function")
    return name or default


class FlatConvolution(nn.Module):
    """A convolution over pieces that do not overlap, computed as a matmul.

    Args:
        size: size of a piece: channels first.
        output_size: channels of the result.
        has_bias: whether there is a bias.

    Shape: [..., elements of a piece] -> [..., output_size]
    """

    weight: nn.Parameter
    """[output_size, *size], as checkpoints have it."""
    bias: nn.Parameter | None

    def __init__(self, size: tuple[int, ...], output_size: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, *size), requires_grad=False)
        bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
        self.register_parameter("bias", bias if has_bias else None)

    def forward(self, pieces: Tensor) -> Tensor:
        return F.linear(pieces, self.weight.flatten(1), self.bias)


class GridPatchEmbedding(nn.Module):
    """Embeds patches; its parameters are named as in Qwen-VL.

    Shape: [N, 3 * frames * patch_size * patch_size] -> [N, C]
    """

    def __init__(self, sizes: GridSizes, has_bias: bool = False) -> None:
        super().__init__()
        patch = (3, sizes.frames, sizes.patch_size, sizes.patch_size)
        self.proj = FlatConvolution(patch, sizes.hidden_size, has_bias)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)


class GridAttention(nn.Module):
    """Attention with rotary embeddings; its parameters are named as in Qwen-VL.

    Shape: [N, C] -> [N, C]
    """

    def __init__(
        self, sizes: GridSizes, has_bias: bool = True, has_output_bias: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.qkv = TowerLinear(sizes.hidden_size, 3 * sizes.hidden_size, has_bias)
        self.proj = TowerLinear(sizes.hidden_size, sizes.hidden_size, has_output_bias)

    def forward(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        read = attend(rotate(query, rotations), rotate(key, rotations), value)
        return self.proj(read.flatten(1))


class GridLayer(nn.Module):
    """One pre-norm transformer layer; its parameters are named as in Qwen-VL.

    Args:
        norms: before attention and before the MLP.
        attention: attention of the tower.
        mlp: maps [N, C] to [N, C].

    Shape: [N, C] -> [N, C]
    """

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: GridAttention, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        x = x + self.attn(self.norm1(x), rotations, attend)
        return x + self.mlp(self.norm2(x))


class GatedTowerMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x)); its parameters are named as in Llama.

    Shape: [..., hidden_size] -> [..., hidden_size]
    """

    activation: Callable[[Tensor], Tensor]

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor],
        has_bias: bool,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = TowerLinear(hidden_size, intermediate_size, has_bias)
        self.up_proj = TowerLinear(hidden_size, intermediate_size, has_bias)
        self.down_proj = TowerLinear(intermediate_size, hidden_size, has_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class GridEncoder(MediaEncoder):
    """Base class of grid encoders: prepares images on the host, and normalises their pixels.

    Tensors of an image: `pixels` [patches, 3 * frames * patch_size^2] uint8, block after block;
    `statistics` [2, 3] float32, mean and deviation of each channel; `grid` [3], frames, rows and
    columns of patches.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("visual.",)
    unit: ClassVar[str] = "patches"

    def __init__(self, config: Mapping[str, Any], hidden_size: int, sizes: GridSizes) -> None:
        super().__init__(config, hidden_size)
        self.sizes = sizes

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Divide a video into frames: patches attend only to patches of their frame."""
        frames, rows, columns = grid_of(item)
        if frames == 1:
            return [item]
        grid = torch.tensor([1, rows, columns], dtype=item["grid"].dtype)
        return [
            {**item, "pixels": pixels, "grid": grid}
            for pixels in item["pixels"].split(rows * columns)
        ]

    def encode_parts(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode images and frames one by one: attention over several would compare all patches."""
        return [super(GridEncoder, self).encode_parts([part])[0] for part in parts]

    def size_of(self, item: Mapping[str, Tensor]) -> int:
        return len(item["pixels"])

    def max_units(self, num_embeddings: int) -> int | None:
        return num_embeddings * self.sizes.block

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        """Build the arguments of `run` on the host.

        These are `pixels` [N, ...], `statistics` [N, 2, 3], `rotations` [2, N, D / 2], and `frames`
        [N], the index of the frame of each patch. `frames` is left out for a single frame without
        padding. With a `position_table` there are also `neighbours` and `weights` [N, K] of its
        positions.
        """
        pixels = torch.cat([item["pixels"] for item in items])
        grids = [grid_of(item) for item in items]
        block = self.sizes.block
        padding = 0 if size is None else -(-size // block) * block - len(pixels)
        assert padding >= 0, f"{len(pixels)} patches do not fit {size}"
        statistics = [
            item["statistics"].expand(len(item["pixels"]), 2, 3).contiguous() for item in items
        ]
        of_padding = torch.tensor([0.0, 1.0])[:, None].expand(padding, 2, 3)
        lengths = [rows * columns for count, rows, columns in grids for _ in range(count)]
        tensors = {
            "pixels": F.pad(pixels, (0, 0, 0, padding)),
            "statistics": torch.cat((*statistics, of_padding)),
            "rotations": F.pad(self._rotations(grids), (0, 0, 0, padding)),
        }
        if size is not None or len(lengths) > 1:
            tensors["frames"] = group_numbers([*lengths, padding])
        table = self.position_table()
        if table is not None:
            tensors |= table.neighbours(grids, self.sizes.merge_size, len(tensors["pixels"]))
        return tensors

    def _rotations(self, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        merge_size = self.sizes.merge_size
        coordinates = torch.cat([block_coordinates(grid, merge_size) for grid in grids])
        return rotations_of(coordinates, *self.frequencies())

    def position_table(self) -> InterpolatedTable | None:
        """Return the learned position embeddings; None: the tower only has rotary embeddings."""
        return None

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """Return the rotary frequencies of rows, and of columns."""
        frequencies = axial_frequencies(self.sizes.head_size, self.sizes.theta)
        return frequencies, frequencies

    def scaled(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Normalise the pixels [N, ...], in this encoder's dtype. It is the first step of `run`."""
        channels = tensors["pixels"].unflatten(1, (3, -1)).unsqueeze(-1)
        return normalize(channels, tensors["statistics"], self.dtype).flatten(1)

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        counts = [len(item["pixels"]) // self.sizes.block for item in items]
        return list(embeddings[: sum(counts)].split(counts))


def grid_of(item: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Return the number of frames, rows and columns of patches of an image."""
    frames, rows, columns = (int(n) for n in item["grid"])
    return frames, rows, columns


def join_blocks(x: Tensor, block: int) -> Tensor:
    """Join the channels of all patches of each block, channel by channel.

    Args:
        x: [N, C], block after block.
        block: patches of a block.

    Returns:
        [N / block, C * block]
    """
    return x.unflatten(0, (-1, block)).transpose(1, 2).flatten(1)


def group_numbers(lengths: Sequence[int]) -> Tensor:
    """Return the index of the group of each patch, [N] int32, given the sizes of consecutive
    groups.
    """
    indices = torch.arange(len(lengths), dtype=torch.int32)
    return indices.repeat_interleave(torch.tensor(lengths))
