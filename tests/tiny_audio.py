"""Small random models that read sound, complete with tokenizer and feature extractor."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import WhisperFeatureExtractor

from tests.kept_folders import kept
from tests.multimodal.sound_models import QWEN2_AUDIO, SETTINGS, VOXTRAL
from tests.tiny_images import TEXT, make_tokenizer
from tests.tiny_models import randomize, spelled

RATE = 16_000
PIECE = SETTINGS["chunk_length"] * RATE
"""Samples that the encoders take at a time."""


@dataclass(frozen=True)
class TinyAudio:
    """A family with sound, and the sizes of its small model."""

    architecture: str
    audio: dict[str, Any]
    """Values of `audio_config`."""
    text: dict[str, Any]
    """Values of `text_config`, in addition to `TEXT`."""
    token: str
    """Token of a sound, before it is expanded."""
    others: tuple[str, ...]
    """Other tokens around sounds."""
    in_text: str
    """A sound in a text."""
    token_key: str
    """Key of config.json with the id of the token."""


FAMILIES = {
    "qwen2_audio": TinyAudio(
        "Qwen2AudioForConditionalGeneration",
        QWEN2_AUDIO,
        {"model_type": "qwen2"},
        "<|AUDIO|>",
        ("<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "audio_token_index",
    ),
    "voxtral": TinyAudio(
        "VoxtralForConditionalGeneration",
        VOXTRAL,
        {"model_type": "llama"},
        "[AUDIO]",
        ("[BEGIN_AUDIO]",),
        "[BEGIN_AUDIO][AUDIO]",
        "audio_token_id",
    ),
}


@kept
def make_tiny_audio(family: str, folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """Write config, weights, tokenizer and feature extractor of a small random model.

    Args:
        family: one of `FAMILIES`.
        folder: folder of the model, created if it does not exist.
        seed: seed of the weights.
        text: values of `text_config` instead of the family's.
    """
    made = FAMILIES[family]
    tokenizer = make_tokenizer(made.token, *made.others, chat_image=made.in_text)
    if not hasattr(transformers, made.architecture):
        pytest.skip(f"this transformers has no {made.architecture}")
    model_class = getattr(transformers, made.architecture)
    config = model_class.config_class(
        text_config=spelled({**TEXT, **made.text, "vocab_size": len(tokenizer), **text}),
        audio_config=made.audio,
        **{made.token_key: tokenizer.get_vocab()[made.token]},
    )
    model = model_class(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@dataclass(frozen=True)
class Expected:
    """The greedy output of transformers."""

    token_ids: list[int]
    logprobs: list[float]
    """Of these tokens."""


@torch.inference_mode()
def expected_outputs(
    folder: Path, prompts: Sequence[tuple[list[int], list[np.ndarray]]], max_tokens: int
) -> list[Expected]:
    """Return the greedy outputs of transformers.

    Args:
        folder: folder of the model.
        prompts: tokens, including the tokens of all sounds, and the sounds.
        max_tokens: length of each output.
    """
    config = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None  # the outputs continue after an end token
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    outputs = []
    for token_ids, sounds in prompts:
        ids = torch.tensor([token_ids])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **(_features(config["model_type"], extractor, sounds) if sounds else {}),
        )
        made = out.sequences[0, len(token_ids) :].tolist()
        logprobs = torch.cat(out.logits).log_softmax(-1)
        outputs.append(Expected(made, [float(logprobs[i, t]) for i, t in enumerate(made)]))
    return outputs


def _features(
    family: str, extractor: WhisperFeatureExtractor, sounds: list[np.ndarray]
) -> dict[str, Any]:
    """Return the sounds as the processor of transformers gives them to the model."""
    if family == "qwen2_audio":
        found = extractor(
            sounds, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        return {
            "input_features": found["input_features"],
            "feature_attention_mask": found["attention_mask"],
        }
    pieces = []
    for sound in sounds:
        found = extractor(
            sound,
            sampling_rate=RATE,
            truncation=False,
            padding=True,
            pad_to_multiple_of=PIECE,
            return_tensors="pt",
        )["input_features"]
        pieces.append(found.reshape(found.shape[1], -1, PIECE // 160).transpose(0, 1))
    return {"input_features": torch.cat(pieces)}
