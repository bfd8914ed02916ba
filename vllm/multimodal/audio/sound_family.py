"""The base class of families whose encoder is Whisper's. Independent of models."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.errors import RequestError
from vllm.multimodal.audio.features import LogMelFeatures
from vllm.multimodal.audio.settings import SAMPLING_RATE, check_feature_settings
from vllm.multimodal.audio.whisper_config import LARGE, WhisperEncoderConfig, read_whisper_config
from vllm.multimodal.interface.checks import config_object
from vllm.multimodal.interface.family import EncoderInput, Expansion, MediaFamily, TokenLookup


class SoundFamily(MediaFamily):
    """Converts sounds to log-mel features.

    Attributes:
        encoder: sizes of the encoder.
        sizes: sizes of the features.
    """

    modalities: ClassVar[tuple[str, ...]] = ("audio",)
    sampling_rate: ClassVar[int] = SAMPLING_RATE
    max_chunks: ClassVar[int] = 1
    """Pieces of a sound, each as long as the encoder takes at a time."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.encoder = self.read_encoder(config)
        self.sizes = check_feature_settings(settings)
        self.encoder.check_features(self.sizes)
        self.features = LogMelFeatures(self.sizes)

    @staticmethod
    def read_encoder(config: Mapping[str, Any]) -> WhisperEncoderConfig:
        """Read the sizes of the encoder.

        Args:
            config: config.json of the whole model.

        Raises:
            ConfigError: a size cannot be used.
        """
        return read_whisper_config(config_object(config, "audio_config"), LARGE, "audio_config.")

    @abstractmethod
    def encoder_input(self, features: npt.NDArray[np.float32], num_samples: int) -> EncoderInput:
        """Build the input of the encoder, whose grid is the number of tokens.

        Args:
            features: [num_mel_bins, F] of whole pieces, padded with silence.
            num_samples: number of samples of the sound, without the silence.
        """

    @property
    def min_samples(self) -> int:
        """Number of samples of the shortest sound that is accepted."""
        return 1

    def process_audio(self, samples: npt.NDArray[np.float32]) -> EncoderInput:
        shortest, longest = self.min_samples, self.max_chunks * self.sizes.chunk_samples
        if not shortest <= len(samples) <= longest:
            rate, other = self.sampling_rate, "shorter" if len(samples) > longest else "longer"
            raise RequestError(
                f"the sound has {len(samples)} samples ({len(samples) / rate:.4g} s); this model "
                f"reads only sounds of {shortest} to {longest} samples ({shortest / rate:.2g} to "
                f"{longest / rate:g} s). Send a {other} one"
            )
        if not np.isfinite(samples).all():
            raise RequestError(
                "the sound has samples that are not finite; they must be from -1 to 1"
            )
        num_pieces = -(-len(samples) // self.sizes.chunk_samples)
        features = self.features(samples, num_pieces * self.sizes.chunk_samples)
        return self.encoder_input(features, len(samples))

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        (num_tokens,) = grid
        return Expansion([token_id(self.placeholder)] * num_tokens, [True] * num_tokens)

    def small(self) -> EncoderInput:
        return self.process_audio(np.zeros(self.min_samples, np.float32))

    def largest(self) -> EncoderInput:
        sizes = self.sizes
        features = np.zeros((sizes.feature_size, self.max_chunks * sizes.chunk_frames), np.float32)
        return self.encoder_input(features, self.max_chunks * sizes.chunk_samples)
