"""Tiny models with images and fixed seeds, made with transformers, and their image processors."""

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from vllm.multimodal.images.settings import with_defaults

HIDDEN_SIZE = 48
_TEXT = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_GRID = {
    "depth": 4,
    "num_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "patch_size": 14,
    "out_hidden_size": HIDDEN_SIZE,
}
_LIMITS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 100 * 28 * 28}
_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "size": _LIMITS}
_PIXTRAL = {
    "model_type": "pixtral",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "patch_size": 8,
}
_PIXTRAL_SETTINGS = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 200},
}


@dataclass(frozen=True)
class _Kind:
    architecture: str
    vision: dict[str, Any]
    settings: dict[str, Any]
    text: dict[str, Any]
    whole: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "qwen2_vl": _Kind(
        "Qwen2VLForConditionalGeneration",
        {**_GRID, "embed_dim": 64, "hidden_size": HIDDEN_SIZE, "mlp_ratio": 2},
        _QWEN,
        {},
    ),
    "qwen2_5_vl": _Kind(
        "Qwen2_5_VLForConditionalGeneration",
        {**_GRID, "fullatt_block_indexes": [1, 3], "window_size": 112},
        _QWEN,
        {},
    ),
    "qwen3_vl": _Kind(
        "Qwen3VLForConditionalGeneration",
        {
            **_GRID,
            "patch_size": 16,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        {**_QWEN, "patch_size": 16},
        {"head_dim": 12},
    ),
    "qwen3_5": _Kind(
        "Qwen3_5ForConditionalGeneration",
        {**_GRID, "patch_size": 16, "num_position_embeddings": 36},
        {**_QWEN, "patch_size": 16},
        {"head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    ),
    "glm4v": _Kind(
        "Glm4vForConditionalGeneration",
        {**_GRID, "image_size": 70, "attention_bias": True},
        {"image_processor_type": "Glm4vImageProcessor", "size": _LIMITS},
        {},
    ),
    "pixtral": _Kind(
        "LlavaForConditionalGeneration",
        _PIXTRAL,
        {**_PIXTRAL_SETTINGS, "patch_size": {"height": 8, "width": 8}},
        {"model_type": "mistral"},
        {"vision_feature_layer": [1, -1], "vision_feature_select_strategy": "full"},
    ),
    "mistral3": _Kind(
        "Mistral3ForConditionalGeneration",
        _PIXTRAL,
        {**_PIXTRAL_SETTINGS, "patch_size": {"height": 16, "width": 16}},
        {"model_type": "mistral"},
        {"vision_feature_layer": -2, "spatial_merge_size": 2},
    ),
}
"""Family -> its tiny model."""


@dataclass(frozen=True)
class GridModel:
    """A model of transformers, and the parts of this package for it."""

    config: dict[str, Any]
    """Values of config.json."""
    settings: dict[str, Any]
    """Of the image processor, with defaults."""
    model: Any
    processor: Any
    family: Any
    """The class of the family."""
    encoder_class: Any

    def make_family(self, **settings: Any) -> Any:
        """Return the family with other settings."""
        return self.family(self.config, {**self.settings, **settings})

    def make_encoder(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the encoder with the weights of the model."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            encoder = self.encoder_class(self.config, HIDDEN_SIZE)
        finally:
            torch.set_default_dtype(before)
        encoder.load_state_dict(self.weights(encoder))
        return encoder.eval()

    def weights(self, encoder: Any) -> dict[str, torch.Tensor]:
        """Return the weights of the encoder by their names in checkpoints, without `model.`."""
        found = {}
        for long, tensor in self.model.state_dict().items():
            name = long.removeprefix("model.")
            if name.startswith(encoder.prefixes) and encoder.parameter_name(name):
                found[encoder.parameter_name(name)] = tensor
        return found


@cache
def grid_model(name: str) -> GridModel:
    """Return the tiny model of a family."""
    if not hasattr(transformers, "VoxtralConfig"):  # before 4.54
        pytest.skip("this transformers has other configs for parts", allow_module_level=True)
    kind = KINDS[name]
    torch.manual_seed(1)
    model_class = getattr(transformers, kind.architecture)
    config = model_class.config_class(
        vision_config=kind.vision, text_config=_TEXT | kind.text, **kind.whole
    )
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    for own in (config.text_config, config.vision_config):
        own._attn_implementation = "eager"
    settings = with_defaults(kind.settings)
    given = {key: value for key, value in settings.items() if value is not None}
    class_name = given.pop("image_processor_type")
    return GridModel(
        config.to_dict(),
        settings,
        model,
        image_processor_class(class_name)(**given),
        import_module(f"vllm.multimodal.families.{name}").Family,
        import_module(f"vllm.model_executor.media.families.{name}").Encoder,
    )


def image_processor_class(name: str) -> Any:
    """Return the image processor class of transformers that uses Pillow; in version 4 its name has
    no suffix.
    """
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    """Return random images of these heights and widths."""
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def tensors_of(inputs: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an `EncoderInput`."""
    return {name: torch.from_numpy(value) for name, value in inputs.tensors.items()}
