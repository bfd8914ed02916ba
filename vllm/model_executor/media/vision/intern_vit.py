"""The vision tower of InternVL, InternViT (Chen et al. 2023, arXiv 2312.14238)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.norm import LayerNorm, RMSNorm
from vllm.model_executor.media.vision.attention import attend
from vllm.model_executor.media.vision.layers import (
    PatchEmbedding,
    TowerLinear,
    TowerMLP,
    join_heads,
    split_heads,
)
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import config_bool, config_object, wrong_config

_WITHIN = "vision_config."


def _make_norm(vision: Mapping[str, Any], tower: TowerConfig) -> nn.Module:
    kind = vision.get("norm_type") or "layer_norm"
    if kind == "layer_norm":
        return LayerNorm(tower.hidden_size, tower.layer_norm_eps)
    if kind == "rms_norm":
        return RMSNorm(tower.hidden_size, tower.layer_norm_eps)
    raise wrong_config(f"{_WITHIN}norm_type", kind, "'layer_norm' or 'rms_norm'")


class _Patches(nn.Module):
    """The patch embedding, nested to match the parameter names of checkpoints."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.projection = PatchEmbedding(tower.hidden_size, tower.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.projection(pixels)


class InternVitEmbeddings(nn.Module):
    """The class embedding, which represents the whole image, followed by the patches.

    Shape: [B, 3, H, W] -> [B, 1 + N, C]
    """

    cls_token: nn.Parameter
    """[1, 1, C]"""
    position_embeddings: nn.Parameter
    """[1, 1 + N, C]"""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        size, num_patches = tower.hidden_size, tower.patches_per_side**2
        self.patch_embeddings = _Patches(tower)
        self.cls_token = nn.Parameter(torch.empty(1, 1, size), requires_grad=False)
        positions = torch.empty(1, 1 + num_patches, size)
        self.position_embeddings = nn.Parameter(positions, requires_grad=False)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embeddings(pixels)
        whole = self.cls_token.expand(patches.shape[0], -1, -1)
        return torch.cat([whole, patches], 1) + self.position_embeddings


class InternVitAttention(nn.Module):
    """Self-attention within each image.

    Shape: [B, N, C] -> [B, N, C]
    """

    def __init__(self, vision: Mapping[str, Any], tower: TowerConfig) -> None:
        super().__init__()
        size = tower.hidden_size
        has_bias = config_bool(vision, "attention_bias", False, _WITHIN)
        self.num_heads = tower.num_attention_heads
        self.q_proj = TowerLinear(size, size, has_bias)
        self.k_proj = TowerLinear(size, size, has_bias)
        self.v_proj = TowerLinear(size, size, has_bias)
        self.projection_layer = TowerLinear(size, size)
        # The norm covers all heads together; its eps is fixed in transformers.
        has_norms = config_bool(vision, "use_qk_norm", False, _WITHIN)
        self.q_norm = RMSNorm(size, 1e-6) if has_norms else nn.Identity()
        self.k_norm = RMSNorm(size, 1e-6) if has_norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            split_heads(each, self.num_heads)
            for each in (self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))
        )
        return self.projection_layer(join_heads(attend(query, key, value)))


class InternVitLayer(nn.Module):
    """One layer; learned factors scale attention and MLP before they are added.

    Shape: [B, N, C] -> [B, N, C]
    """

    lambda_1: nn.Parameter
    """[C], of the attention."""
    lambda_2: nn.Parameter
    """[C], of the MLP."""

    def __init__(self, vision: Mapping[str, Any], tower: TowerConfig) -> None:
        super().__init__()
        size = tower.hidden_size
        self.layernorm_before = _make_norm(vision, tower)
        self.attention = InternVitAttention(vision, tower)
        self.layernorm_after = _make_norm(vision, tower)
        self.mlp = TowerMLP(size, tower.intermediate_size, tower.hidden_act)
        self.lambda_1 = nn.Parameter(torch.empty(size), requires_grad=False)
        self.lambda_2 = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        return x + self.lambda_2 * self.mlp(self.layernorm_after(x))


class _Layers(nn.Module):
    """Holds the layers under the name that checkpoints use."""

    def __init__(self, vision: Mapping[str, Any], tower: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(InternVitLayer(vision, tower) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class InternVitTower(nn.Module):
    """InternViT up to the hidden state that is used.

    Args:
        config: config.json.
        tower: sizes of the tower.
        num_layers: layers to build; None: all, and the norm after the last one if there is one.

    Shape: [B, 3, H, W], normalised -> [B, 1 + N, C]

    Raises:
        ConfigError: the tower has no learned positions, or a setting cannot be used.
    """

    def __init__(
        self, config: Mapping[str, Any], tower: TowerConfig, num_layers: int | None = None
    ) -> None:
        super().__init__()
        vision = config_object(config, "vision_config")
        has_positions = config_bool(vision, "use_absolute_position_embeddings", True, _WITHIN)
        if not has_positions:
            raise wrong_config(f"{_WITHIN}use_absolute_position_embeddings", False, "true")
        num_built = tower.num_hidden_layers if num_layers is None else num_layers
        self.embeddings = InternVitEmbeddings(tower)
        self.encoder = _Layers(vision, tower, num_built)
        is_without_norm = config_bool(vision, "use_mean_pooling", True, _WITHIN)
        self.layernorm: nn.Module | None = None
        if num_layers is None and not is_without_norm:
            self.layernorm = LayerNorm(tower.hidden_size, tower.layer_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embeddings(pixels))
        return hidden if self.layernorm is None else self.layernorm(hidden)
