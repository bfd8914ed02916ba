"""The vision tower of Llama 3.2 Vision (Meta 2024), in the format of transformers.

Shapes: B images of T tiles; each tile has N patches and a class embedding, C channels. All tiles of
an image are one sequence. Its positions are either patches of tiles that the image fills, or
padding. Padding changes the result: patches attend to padding, and padding attends to patches but
not to itself.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.media.vision.attention import attend
from vllm.model_executor.media.vision.layers import (
    PatchEmbedding,
    TowerLinear,
    TowerMLP,
    join_heads,
    split_heads,
)
from vllm.multimodal.images.tower_config import TowerConfig

_MULTIPLE = 8
"""A tile has padding up to a multiple of it."""
_MAX_QUERIES = 2048
"""Queries of one mask, which has as many elements as queries times keys."""


def padded_length(tower: TowerConfig) -> int:
    """Return the positions of a tile: its patches, the class embedding and padding."""
    num_real = tower.patches_per_side**2 + 1
    return num_real + -num_real % _MULTIPLE


@dataclass(frozen=True, slots=True)
class Sequences:
    """The order of the positions of some images, and which of them are padding."""

    order: Tensor
    """[positions], the index of each in tiles with their padding."""
    num_first: int
    """Positions whose hidden states are the result."""
    is_padding: Tensor | None
    """[B, positions] bool, in this order. None: all are padding but the first `num_first`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention with the padding rules of this tower.

        All tensors are [B, heads, positions, size of a head].
        """
        if self.is_padding is None:
            num = self.num_first
            of_patches = attend(query[:, :, :num], key, value)
            of_padding = attend(query[:, :, num:], key[:, :, :num], value[:, :, :num])
            return torch.cat([of_patches, of_padding], 2)
        sees = ~self.is_padding[:, None, None]
        parts = zip(query.split(_MAX_QUERIES, 2), sees.split(_MAX_QUERIES, 3), strict=True)
        return torch.cat(
            [attend(part, key, value, own.transpose(2, 3) | sees) for part, own in parts], 2
        )


class _Attention(nn.Module):
    """Attention over all tiles of an image.

    Shape: [B, positions, C] -> [B, positions, C]
    """

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        size, self.num_heads = tower.hidden_size, tower.num_attention_heads
        self.q_proj = TowerLinear(size, size, bias=False)
        self.k_proj = TowerLinear(size, size, bias=False)
        self.v_proj = TowerLinear(size, size, bias=False)
        self.o_proj = TowerLinear(size, size, bias=False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        query, key, value = (
            split_heads(layer(x), self.num_heads)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(join_heads(sequences.attend(query, key, value)))


class _Layer(nn.Module):
    """One layer; learned gates may scale attention and MLP before they are added.

    Shape: [B, positions, C] -> [B, positions, C]
    """

    gate_attn: nn.Parameter | None
    """[1]"""
    gate_ffn: nn.Parameter | None
    """[1]"""

    def __init__(self, tower: TowerConfig, is_gated: bool) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(tower.hidden_size, tower.layer_norm_eps)
        self.self_attn = _Attention(tower)
        self.post_attention_layernorm = LayerNorm(tower.hidden_size, tower.layer_norm_eps)
        self.mlp = TowerMLP(tower.hidden_size, tower.intermediate_size, tower.hidden_act)
        for name in ("gate_attn", "gate_ffn"):
            gate = nn.Parameter(torch.empty(1), requires_grad=False) if is_gated else None
            self.register_parameter(name, gate)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        read = self.self_attn(self.input_layernorm(x), sequences)
        x = x + _gated(read, self.gate_attn)
        return x + _gated(self.mlp(self.post_attention_layernorm(x)), self.gate_ffn)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else gate.tanh() * x


class _Layers(nn.Module):
    """Holds the layers under the name that checkpoints use."""

    def __init__(self, tower: TowerConfig, num_layers: int, is_gated: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(tower, is_gated) for _ in range(num_layers))

    def forward(
        self, x: Tensor, sequences: Sequences, wanted: Collection[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last hidden state, and the hidden states after the layers with the wanted
        indices.
        """
        found = []
        for index, layer in enumerate(self.layers):
            x = layer(x, sequences)
            if index in wanted:
                found.append(x)
        return x, found


class _Table(nn.Module):
    """A learned embedding for each layout of tiles."""

    weight: nn.Parameter
    """[layouts, size]"""

    def __init__(self, num_layouts: int, size: int) -> None:
        super().__init__()
        weight = torch.empty(num_layouts, size)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, layouts: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Look up the embeddings [B, *shape] of the layouts [B]."""
        return self.weight.index_select(0, layouts).unflatten(1, shape)


class _TileEmbedding(nn.Module):
    """Adds a learned embedding for each tile of each layout."""

    gate: nn.Parameter
    """[1]"""

    def __init__(self, tower: TowerConfig, num_tiles: int, num_layouts: int) -> None:
        super().__init__()
        self.shape = (num_tiles, 1, tower.hidden_size)
        self.embedding = _Table(num_layouts, num_tiles * tower.hidden_size)
        self.gate = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, layouts: Tensor) -> Tensor:
        """Return the gated embeddings [B, T, 1, C] of the layouts [B]."""
        return self.embedding(layouts, self.shape) * self.gate.tanh()


class _PositionEmbedding(nn.Module):
    """Adds learned embeddings: of each position in a tile, and of each position in each layout.

    Shape: [B, T, 1 + N, C] -> [B, T, 1 + N, C]
    """

    embedding: nn.Parameter
    """[1 + N, C]"""
    gate: nn.Parameter
    """[1]: the second one's portion."""

    def __init__(self, tower: TowerConfig, num_tiles: int, num_layouts: int) -> None:
        super().__init__()
        self.shape = (num_tiles, tower.patches_per_side**2 + 1, tower.hidden_size)
        self.embedding = nn.Parameter(torch.empty(self.shape[1:]), requires_grad=False)
        self.tile_embedding = _Table(num_layouts, num_tiles * self.shape[1] * tower.hidden_size)
        self.gate = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor, layouts: Tensor) -> Tensor:
        portion = self.gate.tanh()
        x = x + (1 - portion) * self.embedding
        return x + portion * self.tile_embedding(layouts, self.shape)


class MllamaTower(nn.Module):
    """Two transformers; the second one reads the result of the first.

    Args:
        tower: sizes of the tower.
        num_global_layers: layers of the second transformer.
        num_tiles: T.
        num_layouts: number of tile layouts, plus one for "no image".
        wanted: indices of the layers of the first transformer whose hidden states are used.
    """

    class_embedding: nn.Parameter
    """[C]: before the patches of each tile."""

    def __init__(
        self,
        tower: TowerConfig,
        num_global_layers: int,
        num_tiles: int,
        num_layouts: int,
        wanted: Collection[int],
    ) -> None:
        super().__init__()
        size = tower.hidden_size
        self.wanted = wanted
        self.padding = padded_length(tower) - tower.patches_per_side**2 - 1
        self.class_embedding = nn.Parameter(torch.empty(size), requires_grad=False)
        self.patch_embedding = PatchEmbedding(size, tower.patch_size, bias=False)
        sizes = (tower, num_tiles, num_layouts)
        self.pre_tile_positional_embedding = _TileEmbedding(*sizes)
        self.gated_positional_embedding = _PositionEmbedding(*sizes)
        self.post_tile_positional_embedding = _TileEmbedding(*sizes)
        self.layernorm_pre = LayerNorm(size)
        self.layernorm_post = LayerNorm(size)
        self.transformer = _Layers(tower, tower.num_hidden_layers, is_gated=False)
        self.global_transformer = _Layers(tower, num_global_layers, is_gated=True)

    def forward(self, pixels: Tensor, layouts: Tensor, sequences: Sequences) -> Tensor:
        """Return the last hidden state concatenated with the wanted ones, [B, num_first, C *
        several].

        Args:
            pixels: [B, T, 3, H, W], normalised; 0 in tiles that an image does not fill.
            layouts: [B], index of the layout of each image.
            sequences: order and padding of the positions.
        """
        x = self.patch_embedding(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])
        x = x + self.pre_tile_positional_embedding(layouts)
        first = self.class_embedding.expand(*x.shape[:2], 1, -1)
        x = self.gated_positional_embedding(torch.cat([first, x], 2), layouts)
        x = F.pad(self.layernorm_pre(x), (0, 0, 0, self.padding))
        length = x.shape[2]
        x = x.flatten(1, 2).index_select(1, sequences.order)
        x, several = self.transformer(x, sequences, self.wanted)
        tiles = self.post_tile_positional_embedding(layouts).expand(-1, -1, length, -1)
        x = self.layernorm_post(x) + tiles.flatten(1, 2).index_select(1, sequences.order)
        x, _ = self.global_transformer(x, sequences)
        num = sequences.num_first
        # Order of the output: for each channel, its values in all layers.
        joined = torch.stack([each[:, :num] for each in several], -1).flatten(2)
        return torch.cat([x[:, :num], joined], -1)
