"""Test families that read sound: features, tokens and embeddings against transformers."""

import numpy as np
import pytest
import torch
import transformers
from transformers import WhisperFeatureExtractor

from tests.multimodal.sound_models import QWEN2_AUDIO, SETTINGS, VOXTRAL, make_sound
from tests.multimodal.tiled_models import LLAMA, TEXT, make_encoder, make_model
from vllm.errors import ConfigError, RequestError
from vllm.multimodal.families import qwen2_audio, voxtral
from vllm.transformers_utils.transformers_version import is_version_4

PIECE = 32000
LENGTHS = [321, 800, 1600, 16000, 16161, PIECE - 100, PIECE]


def tensors_of(given):
    return {name: torch.from_numpy(array) for name, array in given.tensors.items()}


def extractor():
    settings = {key: value for key, value in SETTINGS.items() if "type" not in key}
    return WhisperFeatureExtractor(**settings)


def qwen2_model():
    text = {"model_type": "qwen2", **TEXT}
    return make_model("Qwen2Audio", audio_config=QWEN2_AUDIO, text_config=text)


def voxtral_model():
    return make_model("Voxtral", audio_config=VOXTRAL, text_config=LLAMA, audio_token_id=3)


@torch.inference_mode()
def embeddings_of_qwen2(model, sound):
    """Return the embeddings that transformers gives the language model."""
    found = extractor()(sound, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
    num_frames = int(found["attention_mask"].sum())
    num_tokens = (((num_frames - 1) // 2 + 1) - 2) // 2 + 1
    token = model.config.audio_token_id = 5
    seen = []
    inner = model if is_version_4() else model.model
    hook = inner.language_model.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["inputs_embeds"]), with_kwargs=True
    )
    ids = torch.tensor([[1, *[token] * num_tokens, 2, token][: 2 + num_tokens]])
    model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        input_features=found["input_features"],
        feature_attention_mask=found["attention_mask"],
    )
    hook.remove()
    return seen[0][0, 1 : 1 + num_tokens]


@torch.inference_mode()
def embeddings_of_voxtral(model, sound):
    found = extractor()(
        sound,
        sampling_rate=16000,
        truncation=False,
        padding=True,
        pad_to_multiple_of=PIECE,
        return_tensors="pt",
    )["input_features"]
    pieces = found.reshape(found.shape[1], -1, 200).transpose(0, 1)
    found = model.get_audio_features(pieces)
    return found if is_version_4() else found.pooler_output


FAMILIES = {
    "qwen2_audio": (qwen2_audio.Family, qwen2_model, embeddings_of_qwen2, LENGTHS),
    "voxtral": (voxtral.Family, voxtral_model, embeddings_of_voxtral, [*LENGTHS, 3 * PIECE - 7]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_equal_to_transformers_for_any_length_and_padding(name, monkeypatch):
    family_class, make, expected, lengths = FAMILIES[name]
    model = make()
    if name == "qwen2_audio" and not hasattr(transformers, "VoxtralConfig"):  # before 4.54
        pytest.skip("this transformers wants one token for each embedding of the sound")
    family = family_class(model.config.to_dict(), SETTINGS)
    encoder = make_encoder(name, model)
    given = [family.process_audio(make_sound(seed, n)) for seed, n in enumerate(lengths)]
    items = [tensors_of(each) for each in given]
    wanted = [expected(model, make_sound(seed, n)) for seed, n in enumerate(lengths)]

    def check(found):
        for one, other, each in zip(found, wanted, given, strict=True):
            assert one.shape == other.shape
            assert len(family.expand(each.grid, lambda token: 7).token_ids) == len(one)
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    def padded(parts):
        found = []
        for first in range(0, len(parts), 3):
            some = parts[first : first + 3]
            found += encoder.split(encoder.run(**encoder.prepare(some, 4)), some)
        return found

    with torch.inference_mode():
        check(encoder(items))
        monkeypatch.setattr(encoder, "encode_parts", padded)
        check(encoder(items))
    assert len({float(each[0, 0]) for each in wanted}) == len(lengths)


@pytest.mark.parametrize(
    ("name", "num_samples", "message"),
    [
        ("qwen2_audio", 320, r"has 320 samples \(0.02 s\).*321 to 32000 samples.*a longer one"),
        ("qwen2_audio", 0, "has 0 samples"),
        ("qwen2_audio", PIECE + 1, r"has 32001 samples.*\(0.02 to 2 s\).*a shorter one"),
        ("voxtral", 0, "1 to 2560000 samples"),
        ("voxtral", 80 * PIECE + 1, r"to 160 s\)"),
    ],
)
def test_a_sound_that_is_too_short_or_too_long_is_refused(name, num_samples, message):
    family_class, make, *_ = FAMILIES[name]
    family = family_class(make().config.to_dict(), SETTINGS)
    with pytest.raises(RequestError, match=message):
        family.process_audio(np.zeros(num_samples, np.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_that_are_not_finite_are_refused(name):
    family_class, make, *_ = FAMILIES[name]
    family = family_class(make().config.to_dict(), SETTINGS)
    with pytest.raises(RequestError, match="not finite"):
        family.process_audio(np.full(1000, np.nan, np.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_sound_costs_more_than_the_largest(name):
    family_class, make, *_ = FAMILIES[name]
    family = family_class(make().config.to_dict(), SETTINGS)
    largest = family.largest()
    longest = family.process_audio(np.zeros(family.max_chunks * PIECE, np.float32))
    assert longest.grid == largest.grid
    assert longest.tensors["features"].shape == largest.tensors["features"].shape


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"intermediate_size": 100}, "intermediate_size"), ({"intermediate_size": 224}, "of 7")],
)
def test_hidden_states_that_cannot_be_joined_are_refused(changed, named):
    config = {"audio_config": {**VOXTRAL, **changed}}
    with pytest.raises(ConfigError, match=named):
        voxtral.Family(config, SETTINGS)
