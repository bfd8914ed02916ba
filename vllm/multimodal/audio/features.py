"""Log-mel features of sound, equal to the features of transformers' `WhisperFeatureExtractor`.

Only numpy is used: importing transformers takes seconds, and torch, which its class uses, starts
threads that the processes that read media must not have.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from vllm.multimodal.audio.settings import FeatureSettings

_HIGHEST_HZ = 8000.0
"""Frequency at which the last mel bin ends, of every sampling rate."""
_SMALLEST_POWER = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest value of a sound that are told apart."""
_FRAMES_AT_ONCE = 3000
"""Limits the memory for a long sound."""
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
"""End of the linear part of the scale of mels."""
_MELS_PER_LOG = 27 / np.log(6.4)


class LogMelFeatures:
    """Converts samples to log-mel features.

    Args:
        settings: sizes of the features.
    """

    def __init__(self, settings: FeatureSettings) -> None:
        self.settings = settings

    def __call__(
        self, samples: npt.NDArray[np.float32], num_samples: int
    ) -> npt.NDArray[np.float32]:
        """Return the features [feature_size, num_samples // hop_length] of a sound.

        Args:
            samples: [n] from -1 to 1, at least one.
            num_samples: length to which silence is appended; at least n, and more than n_fft.
        """
        size = self.settings
        assert 0 < len(samples) <= num_samples > size.n_fft, (len(samples), num_samples)
        half, num_frames = size.n_fft // 2, num_samples // size.hop_length
        padded = np.pad(samples.astype(np.float32), (0, num_samples - len(samples)))
        frames = sliding_window_view(np.pad(padded, half, "reflect"), size.n_fft)
        frames = frames[:: size.hop_length][:num_frames]
        # Frames beyond the end of the sound have no power.
        end = min(num_frames, (len(samples) + half) // size.hop_length + 1)
        if num_samples - len(samples) <= half:
            end = num_frames
        found = np.full((size.feature_size, num_frames), _SMALLEST_POWER, np.float32)
        for first in range(0, end, _FRAMES_AT_ONCE):
            some = slice(first, min(first + _FRAMES_AT_ONCE, end))
            spectrum = np.fft.rfft(frames[some] * self._window)
            power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
            np.maximum(self._mel_filters @ power.T, _SMALLEST_POWER, out=found[:, some])
        np.log10(found, out=found)
        np.maximum(found, found.max() - _RANGE, out=found)
        found += 4.0
        found /= 4.0
        return found

    @cached_property
    def _window(self) -> npt.NDArray[np.float32]:
        """The periodic Hann window [n_fft]."""
        return np.hanning(self.settings.n_fft + 1)[:-1].astype(np.float32)

    @cached_property
    def _mel_filters(self) -> npt.NDArray[np.float32]:
        """The weight [feature_size, n_fft // 2 + 1] of each frequency in each mel bin.

        They are triangles of equal width in mels and of equal area in hertz.
        """
        size = self.settings
        mels = np.linspace(0.0, _mels_of(_HIGHEST_HZ), size.feature_size + 2)
        edges = _hertz_of(mels)
        hertz = np.linspace(0, size.sampling_rate // 2, size.n_fft // 2 + 1)
        widths = np.diff(edges)
        slopes = hertz - edges[:, None]
        rising = slopes[:-2] / widths[:-1, None]
        falling = -slopes[2:] / widths[1:, None]
        triangles = np.maximum(0, np.minimum(rising, falling))
        return (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)


def _mels_of(hertz: float) -> float:
    """Convert a frequency to mels on Slaney's scale; only for its logarithmic part."""
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HZ) * _MELS_PER_LOG)


def _hertz_of(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Convert mels on Slaney's scale to frequencies."""
    linear = mels * (_LINEAR_HZ / _LINEAR_MELS)
    logarithmic = _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _MELS_PER_LOG)
    return np.where(mels < _LINEAR_MELS, linear, logarithmic)
