"""The sizes of Whisper's encoder, which other models use as well. Independent of weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.audio.settings import FeatureSettings
from vllm.multimodal.interface.checks import config_whole, wrong_config, wrong_setting

_MAX_WIDTH = 2**16
_MAX_LAYERS = 2**10
_MAX_POSITIONS = 2**17


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperEncoderConfig:
    """Sizes of the encoder, with the field names of transformers and the defaults of Whisper."""

    d_model: int = 384
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    num_mel_bins: int = 80
    """Values of a frame."""
    max_source_positions: int = 1500
    """Hidden states of the frames that are encoded at a time: one for each two frames."""
    activation_function: str = "gelu"

    @property
    def num_frames(self) -> int:
        """Number of frames that are encoded at a time."""
        return 2 * self.max_source_positions

    def check_features(self, settings: FeatureSettings) -> None:
        """Check that features have the sizes that the encoder needs.

        Raises:
            ConfigError: they do not; the message names the setting.
        """
        if settings.feature_size != self.num_mel_bins:
            raise wrong_setting(
                "feature_size",
                settings.feature_size,
                f"num_mel_bins of config.json, {self.num_mel_bins}",
            )
        if settings.chunk_frames != self.num_frames:
            raise wrong_setting(
                "chunk_length",
                settings.chunk_length,
                f"as long as {self.num_frames} frames (2 x max_source_positions of config.json), "
                f"and is as long as {settings.chunk_frames} frames",
            )


TINY = WhisperEncoderConfig()
LARGE = WhisperEncoderConfig(
    d_model=1280,
    encoder_layers=32,
    encoder_attention_heads=20,
    encoder_ffn_dim=5120,
    num_mel_bins=128,
)
"""The encoder of Whisper large v3, which Qwen2-Audio and Voxtral have."""

_OTHER_NAMES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
"""Key of a config -> its name in configs of other families, such as Voxtral."""


def read_whisper_config(
    config: Mapping[str, Any], default: WhisperEncoderConfig = TINY, within: str = ""
) -> WhisperEncoderConfig:
    """Read the sizes of an encoder from config.json.

    Args:
        config: the part of config.json that has them.
        default: used for missing and null values.
        within: path of the part in config.json, with a dot at the end.

    Raises:
        ConfigError: a size cannot be used.
    """

    def whole(key: str, largest: int) -> int:
        other = _OTHER_NAMES.get(key)
        name = other if other is not None and config.get(key) is None else key
        return config_whole(config, name, getattr(default, key), largest, within)

    activation = config.get("activation_function")
    activation = default.activation_function if activation is None else activation
    if not isinstance(activation, str):
        raise wrong_config(f"{within}activation_function", activation, "the name of a function")
    found = WhisperEncoderConfig(
        d_model=whole("d_model", _MAX_WIDTH),
        encoder_layers=whole("encoder_layers", _MAX_LAYERS),
        encoder_attention_heads=whole("encoder_attention_heads", _MAX_WIDTH),
        encoder_ffn_dim=whole("encoder_ffn_dim", _MAX_WIDTH),
        num_mel_bins=whole("num_mel_bins", _MAX_WIDTH),
        max_source_positions=whole("max_source_positions", _MAX_POSITIONS),
        activation_function=activation,
    )
    if found.d_model % found.encoder_attention_heads:
        raise wrong_config(
            f"{within}d_model",
            found.d_model,
            f"a multiple of encoder_attention_heads ({found.encoder_attention_heads})",
        )
    return found
