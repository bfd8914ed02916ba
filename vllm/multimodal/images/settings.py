"""The settings of the image processors of transformers. Independent of models.

It does not import transformers, whose classes take a second to import, and have different defaults
in different releases.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.errors import ConfigError
from vllm.multimodal.interface.checks import is_number, is_whole, wrong_setting
from vllm.multimodal.interface.settings_file import OWN_FILE, WHOLE_FILE, find_settings

MAX_PIXELS = 2**14
"""Largest height or width of an input of an encoder."""

_MAX_CROPPED = 2
"""Edge of a resized image in edges of the square that is cut out of it."""

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_BILINEAR, _BICUBIC, _LANCZOS = 2, 3, 1
"""Ways to resize, as Pillow numbers them."""
_ALL: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
_CROPPED = {
    **_ALL,
    **_CLIP,
    "resample": _BICUBIC,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
_IDEFICS3 = {
    **_ALL,
    **_HALF,
    "resample": _LANCZOS,
    "do_pad": True,
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 364},
    "size": {"longest_edge": 1456},
}
_PATCHES = {
    **_ALL,
    **_CLIP,
    "resample": _BICUBIC,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": None,
    "max_pixels": None,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CROPPED,
    "SiglipImageProcessor": {
        **_ALL,
        **_HALF,
        "resample": _BICUBIC,
        "size": {"height": 224, "width": 224},
    },
    "LlavaImageProcessor": {**_CROPPED, "do_pad": False},
    "LlavaNextImageProcessor": {
        **_CROPPED,
        "do_pad": True,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "Gemma3ImageProcessor": {
        **_ALL,
        **_HALF,
        "resample": _BILINEAR,
        "size": {"height": 224, "width": 224},
        "do_pan_and_scan": False,
    },
    "MllamaImageProcessor": {
        **_ALL,
        **_HALF,
        "resample": _BILINEAR,
        "size": {"height": 224, "width": 224},
        "do_pad": True,
        "max_image_tiles": 4,
    },
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
    "GotOcr2ImageProcessor": {
        **_ALL,
        **_CLIP,
        "resample": _BICUBIC,
        "size": {"height": 384, "width": 384},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
    },
    "Qwen2VLImageProcessor": _PATCHES,
    "Glm4vImageProcessor": {
        **_ALL,
        **_CLIP,
        "resample": _BICUBIC,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
    },
    "PixtralImageProcessor": {
        **_ALL,
        **_CLIP,
        "resample": _BICUBIC,
        "do_pad": True,
        "patch_size": {"height": 16, "width": 16},
        "size": {"longest_edge": 1024},
    },
}
"""Class in transformers, without the endings Fast and Pil -> its settings and their defaults."""

_RENAMED = {
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "Glm46VImageProcessor": "Glm4vImageProcessor",  # name in GLM-4.6V
}
"""Class -> a class with the same processing."""
PART = "image_processor"
"""Key of the settings in `processor_config.json`."""
CLASS = "image_processor_type"
"""Key of the class."""
_OLD_CLASS = "feature_extractor_type"
_NOT_SETTINGS = (CLASS, _OLD_CLASS, "processor_class", "auto_map")


def read_processor_settings(folder: Path | str, usual: str | None = None) -> dict[str, Any]:
    """Read the settings of the image processor of a model, with the defaults of its class.

    Args:
        folder: folder of the model.
        usual: class of settings that name none; None: they must name one.

    Returns:
        The content of `preprocessor_config.json`, or of `image_processor` in
        `processor_config.json`, which takes precedence. `image_processor_type` is a key of
        `DEFAULTS`.

    Raises:
        ConfigError: neither file has them, or there is no such class.
    """
    found = find_settings(Path(folder), PART)
    if found is None:
        raise ConfigError(
            f"{folder} has no settings of an image processor: neither {OWN_FILE} nor "
            f"{PART} in {WHOLE_FILE}"
        )
    return with_defaults(found, usual)


def with_defaults(settings: Mapping[str, Any], usual: str | None = None) -> dict[str, Any]:
    """Add the defaults of the image processor's class to settings.

    A default replaces null, but a switch that is null is off, as in transformers.

    Args:
        settings: settings of a file.
        usual: class of settings that name none; None: they must name one.

    Raises:
        ConfigError: there is no such class.
    """
    name = settings.get(CLASS)
    if name is None and isinstance(settings.get(_OLD_CLASS), str):
        name = settings[_OLD_CLASS].replace("FeatureExtractor", "ImageProcessor")
    known = usual if name is None else name
    for ending in ("Fast", "Pil"):
        known = known.removesuffix(ending) if isinstance(known, str) else known
    known = _RENAMED.get(known, known) if isinstance(known, str) else known
    if not isinstance(known, str) or known not in DEFAULTS:
        accepted = f"one of {', '.join(DEFAULTS)}"
        raise wrong_setting(
            CLASS,
            name,
            f"{accepted}. To use the model for text only, set --limit-mm-per-prompt image=0",
        )
    defaults = DEFAULTS[known]
    given = {
        key: False if value is None and type(defaults.get(key)) is bool else value
        for key, value in settings.items()
        if key not in _NOT_SETTINGS
    }
    given = {key: value for key, value in given.items() if value is not None or key not in defaults}
    return {**defaults, **given, CLASS: known}


def override_settings(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace some settings by `mm_processor_kwargs`.

    Args:
        settings: settings with defaults.
        overrides: values that replace defaults, by key.

    Raises:
        ConfigError: there is no setting of this name.
    """
    known = [key for key in settings if key != CLASS]
    for key in overrides:
        if key not in known:
            raise ConfigError(
                f"mm_processor_kwargs: {settings[CLASS]} has no setting {key!r}; it has "
                f"{', '.join(sorted(known))}"
            )
    of_size = ("min_pixels", "max_pixels") if "size" in overrides else ()
    replaced = {key: None for key in of_size if key in settings}
    return {**settings, **replaced, **overrides}


def pixel_statistics(settings: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return the mean and the deviation [2, 3] of each channel, for pixels of 0 to 255.

    An encoder subtracts the mean and divides by the deviation. This is what an image processor does
    when it rescales and normalises pixels.

    Raises:
        ConfigError: a setting that it needs is not a number.
    """
    factor, mean, deviation = 1.0, [0.0] * 3, [1.0] * 3
    if setting_bool(settings, "do_rescale"):
        given = settings.get("rescale_factor")
        if not is_number(given) or given <= 0:
            raise wrong_setting("rescale_factor", given, "a positive number")
        factor = given
    if setting_bool(settings, "do_normalize"):
        mean = _of_channels(settings, "image_mean")
        deviation = _of_channels(settings, "image_std")
        if min(deviation) <= 0:
            raise wrong_setting("image_std", settings["image_std"], "positive numbers")
    return (np.array([mean, deviation]) / factor).astype(np.float32)


def _of_channels(settings: Mapping[str, Any], key: str) -> list[float]:
    value = settings.get(key)
    if is_number(value):
        return [value] * 3
    if isinstance(value, list | tuple) and len(value) == 3 and all(map(is_number, value)):
        return list(value)
    raise wrong_setting(key, value, "a number, or one for each of 3 channels")


def setting_bool(settings: Mapping[str, Any], key: str) -> bool:
    """Return a boolean setting; missing and null are False.

    Raises:
        ConfigError: it is another value.
    """
    value = settings.get(key)
    if value is not None and type(value) is not bool:
        raise wrong_setting(key, value, "true or false")
    return bool(value)


def setting_edges(settings: Mapping[str, Any], key: str) -> dict[str, int]:
    """Return a size setting as edge name -> pixels: height and width, shortest_edge, longest_edge.

    Args:
        settings: settings that contain the key.
        key: name of an object, or of an integer for height and width.

    Raises:
        ConfigError: the name of an edge is unknown, or an edge is not a positive integer or is too
            large.
    """
    value = settings.get(key)
    if is_whole(value, MAX_PIXELS):
        return {"height": value, "width": value}
    names = ("height", "width", "shortest_edge", "longest_edge")
    if isinstance(value, Mapping):
        edges = {name: edge for name, edge in value.items() if edge is not None}
        is_pair = ("height" in edges) == ("width" in edges)
        if edges and is_pair and all(n in names and is_whole(edges[n], MAX_PIXELS) for n in edges):
            return edges
    raise wrong_setting(
        key,
        value,
        f"an object with height and width, or with shortest_edge or longest_edge, each from 1 to "
        f"{MAX_PIXELS}",
    )


def check_fixed_size(settings: Mapping[str, Any], size: int) -> None:
    """Check that the settings resize every image or tile to size x size pixels.

    Raises:
        ConfigError: they do not; the message names the setting.
    """
    key = "size"
    square = {"height": size, "width": size}
    if setting_bool(settings, "do_resize"):
        setting_edges(settings, "size")
    if setting_bool(settings, "do_center_crop"):
        key = "crop_size"
        is_square = setting_edges(settings, key) == square
    else:
        edges = setting_edges(settings, key)
        is_padded = setting_bool(settings, "do_pad") and edges == {"shortest_edge": size}
        is_square = setting_bool(settings, "do_resize") and (edges == square or is_padded)
    if not is_square:
        raise wrong_setting(
            key,
            settings.get(key),
            f"{size} x {size} pixels, the image_size of vision_config in config.json",
        )


def check_resized(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Check that settings of a request do not enlarge images much before a square is cropped.

    Args:
        settings: settings for the request.
        usual: usual settings of the engine.

    Raises:
        ConfigError: an edge would be longer than with the settings of the engine, and longer than
            several times the square.
    """
    if not (setting_bool(settings, "do_center_crop") and setting_bool(settings, "do_resize")):
        return
    square = max(setting_edges(settings, "crop_size").values())
    own = max(setting_edges(usual, "size").values())
    longest = max(own, square * _MAX_CROPPED)
    if max(setting_edges(settings, "size").values()) > longest:
        raise wrong_setting(
            "size", settings.get("size"), f"edges of at most {longest} pixels for this model"
        )
