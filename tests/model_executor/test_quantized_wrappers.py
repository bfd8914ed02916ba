"""Test which layers are quantized in checkpoints that also have a part for images.

Settings name layers with `language_model` at one of two places in the name, or without it.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_text_of_images import WHOLE
from tests.model_executor.helpers import make_config
from tests.quantized_checkpoints import FORMATS
from tests.tiny_models import is_version_4
from vllm.config import ModelConfig
from vllm.config.families import TEXT_TYPES
from vllm.distributed import TPGroup
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.loader.model_loader import build_model
from vllm.model_executor.loader.weights import names_in_checkpoint
from vllm.model_executor.quantization import quantization_of
from vllm.model_executor.quantization.interface import CheckpointNames

pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)

MLP, ALL, NONE = "the MLP of layer 1", "all layers", "no layer"
KEYS = {
    "ct-w4a16": "ignore",
    "gptq-4": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "fp8-static": "ignored_layers",
    "modelopt": "exclude_modules",
}
ENTRIES = [
    ("language_model.model.layers.1.mlp", MLP),
    ("model.language_model.layers.1.mlp", MLP),
    ("model.layers.1.mlp", MLP),
    ("layers.1.mlp", MLP),
    ("language_model", ALL),
    ("model.language_model.layers", ALL),
    ("vision_tower", NONE),
    ("model.vision_tower.transformer.layers.1.mlp", NONE),
    ("vision_model.model.layers.1.mlp", NONE),
    ("multi_modal_projector", NONE),
    ("language_model.lm_head", NONE),
    ("language_model.model.layers.11.mlp", NONE),
]
PATTERNS = [
    ("ct-w4a16", "re:.*[.]layers[.]1[.]mlp.*", MLP),
    ("ct-w4a16", "re:language_model[.]model[.]layers[.]1[.]mlp[.]", MLP),
    ("ct-w4a16", "re:model[.]language_model[.]layers[.]1[.]mlp[.]", MLP),
    ("ct-w4a16", "re:model[.]layers[.]1[.]mlp[.]", MLP),
    ("ct-w4a16", "re:.*language_model.*", ALL),
    ("ct-w4a16", "re:.*vision.*", NONE),
    ("ct-w4a16", "re:.*multi_modal_projector.*", NONE),
    ("ct-w4a16", "re:.*lm_head", NONE),
    ("modelopt", "language_model.model.layers.1.mlp*", MLP),
    ("modelopt", "model.language_model.layers.1.mlp*", MLP),
    ("modelopt", "model.layers.1.mlp*", MLP),
    ("modelopt", "*language_model*", ALL),
    ("modelopt", "*vision_tower*", NONE),
]
CASES = [*((f, entry, dense) for f in KEYS for entry, dense in ENTRIES), *PATTERNS]


def layers_of(architecture: str, model_impl: str, folder: Path) -> tuple[ModelConfig, Any]:
    """Return the layers of the language model, dense and without memory."""
    model_type, text, _ = WHOLE[architecture]
    text = {"model_type": TEXT_TYPES[architecture], **text, "intermediate_size": 192}
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    model = make_config(folder).model
    arch = replace(model.resolved_arch, media_config=None)
    if model_impl == "transformers":
        arch = replace(arch, architecture="TransformersForConditionalGeneration")
    return replace(model, arch=arch), build_model(arch, TPGroup(), torch.float32)


def dense_layers(config: ModelConfig, built: Any, settings: dict[str, Any]) -> set[str]:
    arch = config.resolved_arch
    hf_config = {**arch.hf_config, "quantization_config": settings}
    format_ = quantization_of(replace(config, arch=replace(arch, hf_config=hf_config)))
    assert format_ is not None
    format_.use_names(CheckpointNames(partial(names_in_checkpoint, model=built)))
    return {
        name
        for name, layer in built.named_modules()
        if isinstance(layer, ParallelLinear)
        and not layer.keeps_precision
        and format_.method_of(name, layer) is None
    }


def of(layers: set[str], dense: str) -> set[str]:
    mlp = {name for name in layers if ".layers.1.mlp." in name or ".layers.1.feed_forward." in name}
    return {MLP: mlp, ALL: layers, NONE: set()}[dense]


@pytest.mark.parametrize(
    ("architecture", "model_impl"),
    [
        ("Gemma3ForConditionalGeneration", "vllm"),
        ("Llama4ForConditionalGeneration", "vllm"),
        ("Mistral3ForConditionalGeneration", "vllm"),
        ("Mistral3ForConditionalGeneration", "transformers"),
    ],
)
def test_layers_stay_dense_by_any_of_their_names(architecture, model_impl, tmp_path):
    config, built = layers_of(architecture, model_impl, tmp_path)
    settings = FORMATS["awq"].settings | {"modules_to_not_convert": ["language_model"]}
    layers = dense_layers(config, built, settings)
    assert len(of(layers, MLP)) >= 2 and len(layers) >= 8
    for name, entry, dense in CASES:
        settings = FORMATS[name].settings | {KEYS[name]: [entry]}
        assert dense_layers(config, built, settings) == of(layers, dense), (name, entry)
