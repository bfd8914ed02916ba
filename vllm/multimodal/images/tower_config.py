"""The sizes of a vision tower, from `vision_config` of config.json. Independent of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.multimodal.images.settings import MAX_PIXELS
from vllm.multimodal.interface.checks import (
    config_number,
    config_object,
    config_whole,
    is_whole,
    wrong_config,
)

TOWER_PARTS = ("vision_tower", "vision_model", "visual", "audio_tower")
"""The first part of the names of a tower's tensors in checkpoints, or the second one after `model`,
of all families; the last is of sound."""

_MAX_WIDTH = 2**16
_MAX_LAYERS = 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig:
    """Sizes of a vision tower for images of one size.

    Fields are named as in transformers, and have the defaults of each kind of tower.
    """

    model_type: str
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    """Height and width in pixels."""
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def patches_per_side(self) -> int:
        """Number of patches along one side of an image."""
        return self.image_size // self.patch_size


_CLIP = TowerConfig(
    model_type="clip_vision_model", patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5
)
_SIGLIP = TowerConfig(model_type="siglip_vision_model")
_IDEFICS3 = replace(
    _SIGLIP, model_type="idefics3_vision", hidden_size=1152, num_attention_heads=16, patch_size=32
)
_INTERNVL = TowerConfig(
    model_type="internvl_vision",
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=448,
    patch_size=14,
    hidden_act="gelu",
)
_PIXTRAL = TowerConfig(
    model_type="pixtral",
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=1024,
    hidden_act="gelu",
)
_MLLAMA = TowerConfig(
    model_type="mllama_vision_model",
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=32,
    num_attention_heads=16,
    image_size=448,
    patch_size=14,
    hidden_act="gelu",
    layer_norm_eps=1e-5,
)
_DEFAULTS = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _SIGLIP,
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": replace(_IDEFICS3, model_type="smolvlm_vision"),
    "internvl_vision": _INTERNVL,
    "pixtral": _PIXTRAL,
    "mllama_vision_model": _MLLAMA,
}
_OTHER_KEYS = {
    "mllama_vision_model": {"num_attention_heads": "attention_heads", "layer_norm_eps": "norm_eps"}
}
"""Kind -> field -> its key in config.json, where that is another one."""
_OLD_NAMES = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "idefics3": "idefics3_vision",
    "smolvlm": "smolvlm_vision",
}


def read_tower_config(
    config: Mapping[str, Any], accepted: tuple[str, ...], default: TowerConfig | None = None
) -> TowerConfig:
    """Read the sizes of a model's vision tower.

    Args:
        config: config.json.
        accepted: `model_type` of the towers that the family may have; the first one is used if
            `vision_config` has none.
        default: the tower if there is no `vision_config`; None: the first one's defaults.

    Raises:
        ConfigError: the tower is of another kind, or a size cannot be used.
    """
    vision = config_object(config, "vision_config")
    if not vision and default is not None:
        return default
    kind = vision.get("model_type") or accepted[0]
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in accepted:
        raise wrong_config("vision_config.model_type", kind, " or ".join(accepted))
    known, other_keys = _DEFAULTS[kind], _OTHER_KEYS.get(kind, {})

    def whole(field: str, largest: int) -> int:
        key = other_keys.get(field, field)
        return config_whole(vision, key, getattr(known, field), largest, "vision_config.")

    def square(key: str) -> int:
        value = vision.get(key)
        if not isinstance(value, list | tuple):
            return whole(key, MAX_PIXELS)
        if len(value) != 2 or value[0] != value[1] or not is_whole(value[0], MAX_PIXELS):
            raise wrong_config(f"vision_config.{key}", value, "an integer, or two equal integers")
        return int(value[0])

    activation = vision.get("hidden_act") or known.hidden_act
    if not isinstance(activation, str):
        raise wrong_config("vision_config.hidden_act", activation, "the name of a function")
    key_of_eps = other_keys.get("layer_norm_eps", "layer_norm_eps")
    tower = TowerConfig(
        model_type=kind,
        hidden_size=whole("hidden_size", _MAX_WIDTH),
        intermediate_size=whole("intermediate_size", _MAX_WIDTH),
        num_hidden_layers=whole("num_hidden_layers", _MAX_LAYERS),
        num_attention_heads=whole("num_attention_heads", _MAX_WIDTH),
        num_channels=whole("num_channels", 3),
        image_size=square("image_size"),
        patch_size=square("patch_size"),
        hidden_act=activation,
        layer_norm_eps=config_number(vision, key_of_eps, known.layer_norm_eps, "vision_config."),
    )
    if tower.num_channels != 3:
        raise wrong_config("vision_config.num_channels", tower.num_channels, "3")
    if tower.hidden_size % tower.num_attention_heads:
        raise wrong_config(
            "vision_config.hidden_size",
            tower.hidden_size,
            f"a multiple of {other_keys.get('num_attention_heads', 'num_attention_heads')} "
            f"({tower.num_attention_heads})",
        )
    if tower.patch_size > tower.image_size:
        raise wrong_config(
            "vision_config.patch_size", tower.patch_size, f"at most image_size ({tower.image_size})"
        )
    return tower
