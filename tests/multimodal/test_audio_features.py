"""Test log-mel features against `WhisperFeatureExtractor` of transformers, and settings that no
feature extractor can have.
"""

import json

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from vllm.errors import ConfigError
from vllm.multimodal.audio.features import LogMelFeatures
from vllm.multimodal.audio.settings import (
    check_feature_settings,
    read_feature_settings,
)
from vllm.multimodal.audio.whisper_config import WhisperEncoderConfig, read_whisper_config

SIZES = [
    {},
    {"feature_size": 128},
    {"feature_size": 16, "n_fft": 64, "hop_length": 20, "chunk_length": 2},
    {"feature_size": 8, "n_fft": 63, "hop_length": 7, "chunk_length": 2},
]


def check_close(found, wanted):
    """Check that features are close. Frequencies with very little power have few exact digits after
    the logarithm.
    """
    difference = np.abs(found - wanted)
    assert difference.max() < 5e-4 and difference.mean() < 1e-6


@pytest.mark.parametrize("given", SIZES, ids=str)
def test_features_are_equal_to_transformers(given):
    settings = check_feature_settings(given)
    most = settings.chunk_samples
    theirs, ours = WhisperFeatureExtractor(**given), LogMelFeatures(settings)
    rng = np.random.default_rng(0)
    for num_samples in (1, 161, 5000, most - 250, most - 30, most):
        samples = rng.standard_normal(num_samples).astype(np.float32) * 0.1
        wanted = theirs(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
        found = ours(samples, most)
        assert found.dtype == np.float32 and found.shape == wanted.shape
        check_close(found, wanted)


def test_a_sound_of_several_pieces_has_the_features_of_the_whole():
    theirs = WhisperFeatureExtractor(feature_size=16)
    ours = LogMelFeatures(check_feature_settings({"feature_size": 16}))
    samples = np.random.default_rng(1).standard_normal(700_000).astype(np.float32) * 0.1
    samples[600_000:] *= 30  # the loudest part limits the values of all chunks
    wanted = theirs(
        samples,
        sampling_rate=16000,
        truncation=False,
        padding=True,
        pad_to_multiple_of=480_000,
        return_tensors="np",
    )["input_features"][0]
    check_close(ours(samples, 960_000), wanted)


def test_silence_has_features():
    ours = LogMelFeatures(check_feature_settings({}))
    found = ours(np.zeros(1000, np.float32), 480_000)
    assert np.ptp(found) == 0 and found[0, 0] == pytest.approx(-1.5)


HOSTILE = [
    ("hop_length", 0),
    ("hop_length", -1),
    ("hop_length", 401),
    ("hop_length", 1.5),
    ("feature_size", 10**9),
    ("feature_size", True),
    ("n_fft", 10**9),
    ("n_fft", "400"),
    ("chunk_length", 10**9),
    ("chunk_length", 0),
    ("sampling_rate", 0),
    ("sampling_rate", 44100),
    ("padding_value", 1.0),
    ("padding_value", False),
    ("padding_side", "left"),
    ("dither", 0.1),
    ("feature_extractor_type", "ClapFeatureExtractor"),
    ("feature_extractor_type", ["WhisperFeatureExtractor"]),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE, ids=str)
def test_settings_that_cannot_be_used_are_refused_in_one_line(key, value):
    with pytest.raises(ConfigError, match=key) as caught:
        check_feature_settings({key: value})
    assert "\n" not in str(caught.value) and repr(value) in str(caught.value)


def test_settings_are_read_from_either_file(tmp_path):
    with pytest.raises(ConfigError, match="no settings of a feature extractor"):
        read_feature_settings(tmp_path)
    own = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    assert read_feature_settings(tmp_path) == own
    whole = {"feature_extractor": {**own, "feature_size": 128}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert read_feature_settings(tmp_path)["feature_size"] == 128
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": 1}))
    with pytest.raises(ConfigError, match="feature_extractor is 1; it must be an object"):
        read_feature_settings(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"feature_size": 128}, "num_mel_bins"), ({"chunk_length": 20}, "max_source_positions")],
)
def test_features_of_other_sizes_than_the_encoder_has_are_refused(settings, named):
    WhisperEncoderConfig().check_features(check_feature_settings({}))
    with pytest.raises(ConfigError, match=named):
        WhisperEncoderConfig().check_features(check_feature_settings(settings))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_model", 0),
        ("d_model", 10**9),
        ("hidden_size", "8"),
        ("encoder_layers", -1),
        ("num_hidden_layers", 10**9),
        ("encoder_attention_heads", 5),
        ("num_mel_bins", 10**9),
        ("max_source_positions", 10**9),
        ("activation_function", 3),
    ],
    ids=str,
)
def test_sizes_of_an_encoder_that_cannot_be_used_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"config.json: audio_config\.\w+ is .*{value}"):
        read_whisper_config({key: value}, within="audio_config.")
