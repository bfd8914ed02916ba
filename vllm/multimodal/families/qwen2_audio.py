"""Qwen2-Audio (Chu et al. 2024, arXiv 2407.10759): each token is 40 ms of sound."""

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.multimodal.audio.settings import FeatureSettings
from vllm.multimodal.audio.sound_family import SoundFamily
from vllm.multimodal.interface.family import EncoderInput

_SHORTEST = 3
"""Frames of the shortest sound that has a token."""


class Qwen2AudioFamily(SoundFamily):
    """Sounds of up to 30 s; padding with silence is neither encoded nor attended to.

    The tensors are `features` [num_mel_bins, F], of which the encoder needs F frames, and
    `num_states`, the hidden states of the sound before pairs of them are joined.
    """

    placeholder = "<|AUDIO|>"
    text_of_image = "<|audio_bos|><|AUDIO|><|audio_eos|>\n"

    @property
    def min_samples(self) -> int:
        return (_SHORTEST - 1) * self.sizes.hop_length + 1

    def encoder_input(self, features: npt.NDArray[np.float32], num_samples: int) -> EncoderInput:
        num_states = _num_states(num_samples, self.sizes)
        needed = min(2 * (num_states + 1), features.shape[1])
        tensors: dict[str, npt.NDArray[Any]] = {
            "features": np.ascontiguousarray(features[:, :needed]),
            "num_states": np.array([num_states], np.int32),
        }
        return EncoderInput(tensors, (num_states // 2,))


def _num_states(num_samples: int, sizes: FeatureSettings) -> int:
    """Return the number of hidden states of a sound: one for each pair of frames, rounded up."""
    num_frames = min(-(-num_samples // sizes.hop_length), sizes.chunk_frames)
    return (num_frames + 1) // 2


Family = Qwen2AudioFamily
