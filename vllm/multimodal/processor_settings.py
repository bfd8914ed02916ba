"""The settings of a model's processor: of images, or of sounds if it reads no images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.multimodal.audio import settings as sounds
from vllm.multimodal.images import settings as images
from vllm.multimodal.interface.family import MediaFamily
from vllm.multimodal.video.settings import read_video_settings


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


def has_settings(family: type[MediaFamily], folder: Path | str) -> bool:
    """Return whether the folder of a model has settings, valid or not.

    Raises:
        ConfigError: a file is damaged.
    """
    if _has_images(family):
        return images.has_processor_settings(folder)
    return sounds.has_feature_settings(folder)


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
