"""Voxtral (Liu et al. 2025, arXiv 2507.13264): sounds of any length, in pieces of 30 s."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.multimodal.audio.sound_family import SoundFamily
from vllm.multimodal.audio.whisper_config import WhisperEncoderConfig
from vllm.multimodal.interface.checks import wrong_config
from vllm.multimodal.interface.family import EncoderInput


def joined_states(config: WhisperEncoderConfig) -> int:
    """Return how many hidden states are joined to one embedding.

    Raises:
        ConfigError: the number does not follow from the sizes of the encoder.
    """
    joined, rest = divmod(config.encoder_ffn_dim, config.d_model)
    if rest or not joined:
        raise wrong_config(
            "audio_config.intermediate_size",
            config.encoder_ffn_dim,
            f"a multiple of hidden_size ({config.d_model})",
        )
    if config.max_source_positions % joined:
        raise wrong_config(
            "audio_config.max_source_positions",
            config.max_source_positions,
            f"a multiple of {joined}, which is intermediate_size divided by hidden_size",
        )
    return joined


class VoxtralFamily(SoundFamily):
    """Sounds that are padded with silence to whole pieces.

    The tensor is `features` [pieces, num_mel_bins, frames].
    """

    placeholder = "[AUDIO]"
    text_of_image = "[BEGIN_AUDIO][AUDIO]"
    max_chunks: ClassVar[int] = 80
    """40 minutes, the longest sound that the model was made for."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._tokens_of_piece = self.encoder.max_source_positions // joined_states(self.encoder)

    def encoder_input(self, features: npt.NDArray[np.float32], num_samples: int) -> EncoderInput:
        num_pieces = features.shape[1] // self.sizes.chunk_frames
        pieces = features.reshape(len(features), num_pieces, -1).transpose(1, 0, 2)
        return EncoderInput(
            {"features": np.ascontiguousarray(pieces)}, (num_pieces * self._tokens_of_piece,)
        )

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return grid[0] // self._tokens_of_piece


Family = VoxtralFamily
