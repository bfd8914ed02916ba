"""The settings of a model's processor: of images and videos, or of sounds if it reads no images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.multimodal.audio import settings as sounds
from vllm.multimodal.images import settings as images
from vllm.multimodal.interface.family import MediaFamily
from vllm.multimodal.interface.settings_file import WHOLE_FILE, find_settings
from vllm.utils.files.json_file import read_json_object

_VIDEO_FILE = "video_preprocessor_config.json"
_VIDEO_CLASS = "video_processor_type"
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read_settings(family: type[MediaFamily], folder: Path | str) -> dict[str, Any]:
    """Read the settings from the folder of a model.

    Raises:
        ConfigError: there are none, or they cannot be used.
    """
    if _has_images(family):
        settings = images.read_processor_settings(folder, family.image_processor)
        if "video" in family.modalities:
            settings |= read_video_settings(folder)
        return settings
    return sounds.read_feature_settings(folder)


def read_video_settings(folder: Path | str) -> dict[str, Any]:
    """Read the settings of videos from the folder of a model.

    Args:
        folder: folder of the model.

    Returns:
        "video_size": the smallest and the largest number of pixels, as shortest_edge and
        longest_edge; a missing one has the default of the family. None: the folder has no settings
        of videos, so the settings of images are used. "video_processor_type": the class of the
        processor, or None.

    Raises:
        ConfigError: a file is damaged.
    """
    whole, own = Path(folder) / WHOLE_FILE, Path(folder) / _VIDEO_FILE
    found = read_json_object(whole).get("video_processor") if whole.exists() else None
    if found is None and own.exists():
        found = read_json_object(own)
    if not isinstance(found, Mapping):
        return {"video_size": None, _VIDEO_CLASS: None}
    size = found.get("size")
    edges = dict(size) if isinstance(size, Mapping) else {}
    for key, edge in _EDGES.items():
        if found.get(key) is not None:
            edges[edge] = found[key]
    sizes = {key: value for key, value in edges.items() if value is not None}
    return {"video_size": sizes, _VIDEO_CLASS: found.get(_VIDEO_CLASS)}


def has_settings(family: type[MediaFamily], folder: Path | str) -> bool:
    """Return whether the folder of a model has settings, valid or not.

    Raises:
        ConfigError: a file is damaged.
    """
    part = images.PART if _has_images(family) else sounds.PART
    return find_settings(Path(folder), part) is not None


def override_settings(
    family: type[MediaFamily], settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace some settings by `mm_processor_kwargs`.

    Args:
        family: family of the model.
        settings: settings from `read_settings`.
        overrides: values that replace defaults, by key.

    Raises:
        ConfigError: there is no setting of this name.
    """
    if _has_images(family):
        return images.override_settings(settings, overrides)
    return sounds.override_feature_settings(settings, overrides)


def _has_images(family: type[MediaFamily]) -> bool:
    return "image" in family.modalities
