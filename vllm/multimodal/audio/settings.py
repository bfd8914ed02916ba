"""The settings of transformers' `WhisperFeatureExtractor`.

Independent of models; does not import transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.multimodal.interface.checks import is_whole, wrong_setting
from vllm.multimodal.interface.settings_file import OWN_FILE, WHOLE_FILE, find_settings

SAMPLING_RATE = 16_000
"""Samples per second of all models whose encoder is the one of Whisper."""

PART = "feature_extractor"
"""Key of the settings in `processor_config.json`."""
_CLASS = "feature_extractor_type"
_EXTRACTOR = "WhisperFeatureExtractor"
_MAX_MEL_BINS = 2**10
_MAX_FFT = 2**14
_MAX_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSettings:
    """Sizes of log-mel features, with the field names of transformers."""

    feature_size: int = 80
    """Mel bins, which are the values of a frame."""
    sampling_rate: int = SAMPLING_RATE
    """Samples per second."""
    hop_length: int = 160
    """Samples from one frame to the next."""
    n_fft: int = 400
    """Samples of a frame."""
    chunk_length: int = 30
    """Seconds that the encoder takes at a time."""

    @property
    def chunk_samples(self) -> int:
        """Number of samples that the encoder processes at a time."""
        return self.chunk_length * self.sampling_rate

    @property
    def chunk_frames(self) -> int:
        """Number of frames that the encoder processes at a time."""
        return self.chunk_samples // self.hop_length


# The only supported values: silence on the right, and no random noise.
_ONLY = {"padding_value": 0.0, "dither": 0.0, "padding_side": "right"}
_KEYS = {_CLASS, *_ONLY, *(field.name for field in fields(FeatureSettings))}


def read_feature_settings(folder: Path | str) -> dict[str, Any]:
    """Read the settings of the feature extractor of a model.

    Args:
        folder: folder of the model.

    Returns:
        The values that decide the features, of `feature_extractor` in `processor_config.json`,
        which takes precedence, or of `preprocessor_config.json`. Older files also have mel filters.

    Raises:
        ConfigError: neither file has them.
    """
    found = find_settings(Path(folder), PART)
    if found is None:
        raise ConfigError(
            f"{folder} has no settings of a feature extractor: neither {OWN_FILE} nor {PART} in "
            f"{WHOLE_FILE}"
        )
    return {key: value for key, value in found.items() if key in _KEYS}


def override_feature_settings(
    settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace some settings by `mm_processor_kwargs`.

    Args:
        settings: settings of the file.
        overrides: values that replace defaults, by key.

    Raises:
        ConfigError: there is no setting of this name.
    """
    known = [field.name for field in fields(FeatureSettings)]
    for key in overrides:
        if key not in known:
            raise ConfigError(
                f"mm_processor_kwargs: {_EXTRACTOR} has no setting {key!r}; it has "
                f"{', '.join(known)}"
            )
    return {**settings, **overrides}


def check_feature_settings(settings: Mapping[str, Any]) -> FeatureSettings:
    """Check the settings, and return the sizes of the features that they describe.

    Args:
        settings: settings of the file. A default replaces null and missing values.

    Raises:
        ConfigError: they are for another class, or a value cannot be used.
    """
    name = settings.get(_CLASS)
    if name is not None and name != _EXTRACTOR:
        accepted = (
            f"{_EXTRACTOR}. To use the model for text only, set --limit-mm-per-prompt audio=0"
        )
        raise wrong_setting(_CLASS, name, accepted)

    def whole(key: str, default: int, largest: int, smallest: int = 1) -> int:
        value = settings.get(key)
        value = default if value is None else value
        if not is_whole(value, largest, smallest):
            raise wrong_setting(key, value, f"an integer from {smallest} to {largest}")
        return value

    for key, only in _ONLY.items():
        value = settings.get(key)
        if value is not None and (isinstance(value, bool) or value != only):
            raise wrong_setting(key, value, repr(only))
    size = FeatureSettings()
    n_fft = whole("n_fft", size.n_fft, _MAX_FFT, 2)
    return FeatureSettings(
        feature_size=whole("feature_size", size.feature_size, _MAX_MEL_BINS),
        sampling_rate=whole("sampling_rate", SAMPLING_RATE, SAMPLING_RATE, SAMPLING_RATE),
        hop_length=whole("hop_length", size.hop_length, n_fft),
        n_fft=n_fft,
        chunk_length=whole("chunk_length", size.chunk_length, _MAX_SECONDS, 2),
    )
