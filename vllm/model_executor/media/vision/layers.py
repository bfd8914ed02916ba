"""Layers that several kinds of vision towers share. Independent of models and checkpoints.

Shapes: B images or tiles, N patches of each, C channels of a patch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed import TPGroup
from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.linear import UnquantizedLinear
from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.layers.slice import Slice
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.ops import get_ops


class TowerLinear(MethodLayer):
    """y = x @ W.T + b, not split over ranks.

    All matmuls of towers and projectors are of this class.

    Quantization formats leave it dense, except for sounds; a device may rearrange it.

    Shape: [..., input_size] -> [..., output_size]
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    method: Any
    """Methods of linear layers fit: they use no other attributes."""

    keeps_precision: bool = True
    """Whether the weight keeps the model's dtype if the user asks for int8 (`--quantization int8`).
    Vision towers have channels with very large values, which int8 would round away."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.feature_slices = {"": Slice(0, 0, output_size, output_size)}
        self.tp = TPGroup()
        of_features = nn.Parameter(torch.empty(output_size), requires_grad=False)
        self.register_parameter("bias", of_features if bias else None)
        self.use_method(UnquantizedLinear())

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x, self.bias)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its size, computed as a matmul.

    Args:
        hidden_size: C.
        patch_size: height and width of a patch in pixels.
        bias: whether there is a bias.

    Shape: [B, 3, H, W] -> [B, N, C], rows of patches from the top. Pixels on the right
    and at the bottom that do not fill a patch are dropped.
    """

    weight: nn.Parameter
    """[C, 3, patch_size, patch_size], as checkpoints have it."""
    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, patch_size: int, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        weight = torch.empty(hidden_size, 3, patch_size, patch_size)
        self.weight = nn.Parameter(weight, requires_grad=False)
        of_channels = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.register_parameter("bias", of_channels if bias else None)

    def forward(self, pixels: Tensor) -> Tensor:
        batch, channels, height, width = pixels.shape
        size = self.patch_size
        rows, columns = height // size, width // size
        pixels = pixels[:, :, : rows * size, : columns * size]
        patches = pixels.reshape(batch, channels, rows, size, columns, size)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PositionTable(nn.Module):
    """Adds a learned embedding of each position, the same for all images.

    Shape: [B, num_positions, C] -> [B, num_positions, C]
    """

    weight: nn.Parameter
    """[num_positions, C]"""

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        weight = torch.empty(num_positions, hidden_size)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class TowerAttention(nn.Module):
    """Self-attention within each item; parameters are named as in CLIP, SigLIP and Whisper.

    Args:
        hidden_size: C.
        num_heads: heads; each has C / num_heads channels.
        has_key_bias: False for Whisper.

    Shape: [B, N, C] -> [B, N, C]
    """

    def __init__(self, hidden_size: int, num_heads: int, has_key_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = TowerLinear(hidden_size, hidden_size)
        self.k_proj = TowerLinear(hidden_size, hidden_size, has_key_bias)
        self.v_proj = TowerLinear(hidden_size, hidden_size)
        self.out_proj = TowerLinear(hidden_size, hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(get_ops().attend_within_items(query, key, value, mask).flatten(-2))


class TowerMLP(nn.Module):
    """Two matmuls with an activation between; parameters are named as in CLIP and SigLIP.

    Shape: [..., hidden_size] -> [..., hidden_size]
    """

    activation: Callable[[Tensor], Tensor]

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.activation = get_activation(activation)
        self.fc1 = TowerLinear(hidden_size, intermediate_size)
        self.fc2 = TowerLinear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class TowerLayer(nn.Module):
    """One pre-norm transformer layer; parameters are named as in CLIP and SigLIP.

    Shape: [B, N, hidden_size] -> [B, N, hidden_size]
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_heads: int, activation: str, eps: float
    ) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(hidden_size, eps)
        self.self_attn = TowerAttention(hidden_size, num_heads)
        self.layer_norm2 = LayerNorm(hidden_size, eps)
        self.mlp = TowerMLP(hidden_size, intermediate_size, activation)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Reshape [B, N, num_heads * D] to [B, num_heads, N, D]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Reshape [B, num_heads, N, D] to [B, N, num_heads * D]."""
    return x.transpose(1, 2).flatten(2)


def normalize(pixels: Tensor, statistics: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalise pixels: (pixels - mean) / deviation, computed in float32.

    Args:
        pixels: [B, 3, H, W] uint8.
        statistics: [B, 2, 3] float32: mean and deviation of each channel, in units of `pixels`.
        dtype: data type of the result.
    """
    mean, deviation = statistics[:, :, :, None, None].unbind(1)
    return ((pixels.float() - mean) / deviation).to(dtype)


def merge_patches(x: Tensor, scale: int) -> Tensor:
    """Join squares of patches: [B, N, C] -> [B, N / scale^2, scale^2 * C].

    Args:
        x: patches of a square image, row by row.
        scale: height and width of a square; divides the height and width of the image.
    """
    side = math.isqrt(x.shape[1]) // scale
    x = x.unflatten(1, (side, scale, side, scale)).transpose(2, 3)
    return x.flatten(3).flatten(1, 2)
