"""Tiny models of transformers that read sound, and sounds for them."""

from typing import Any

import numpy as np

SETTINGS: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 8,
    "n_fft": 400,
    "hop_length": 160,
    "chunk_length": 2,
}
"""Pieces of 2 s, which are 200 frames and 100 hidden states."""

_ENCODER = {"num_mel_bins": 8, "max_source_positions": 100}
QWEN2_AUDIO: dict[str, Any] = {
    **_ENCODER,
    "model_type": "qwen2_audio_encoder",
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
}
VOXTRAL: dict[str, Any] = {
    **_ENCODER,
    "model_type": "voxtral_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def make_sound(seed: int, num_samples: int) -> np.ndarray:
    """Return chords that change every 50 ms, with some noise."""
    generator = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / 16000
    pitches = generator.uniform(100, 6000, (3, num_samples // 800 + 1)).repeat(800, 1)
    chords = np.sin(2 * np.pi * pitches[:, :num_samples] * seconds).sum(0)
    return (0.2 * chords + 0.02 * generator.standard_normal(num_samples)).astype(np.float32)
