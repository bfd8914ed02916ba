"""Models with a part for images serve text: tokens of transformers, in both layouts of names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.e2e.reference import (
    SHORT_TEXTS,
    TransformersReference,
    assert_all_greedy,
    random_prompts,
)
from tests.tiny_models import (
    _DECODER,
    _GEMMA2,
    _LLAMA3_ROPE,
    _YARN_ROPE,
    is_version_4,
    randomize,
)
from vllm import LLM, SamplingParams
from vllm.config.families import TEXT_TYPES, text_types_of
from vllm.errors import ConfigError, WeightLoadError

MAX_TOKENS = 5
SETTINGS: dict[str, Any] = {**SHORT_TEXTS, "skip_tokenizer_init": True}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        _GEMMA2 | {"num_hidden_layers": 7, "rope_parameters": _ROPES, "tie_word_embeddings": True},
        {"vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "Llama4ForConditionalGeneration": (
        "llama4",
        _DECODER
        | {"num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 4, "floor_scale": 8}
        | {"intermediate_size_mlp": 112, "attention_chunk_size": 20, "attn_scale": 0.5}
        | {"rope_parameters": _LLAMA3_ROPE},
        {"vision_config": _VISION | {"vision_output_dim": 16, "projector_output_dim": 16}},
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        _DECODER | {"model_type": "mistral", "head_dim": 32},
        {"vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8}},
    ),
}
"""Architecture -> model type of the whole, config of its language model, the rest."""
_WHOLE["Mistral3ForConditionalGeneration with ministral3"] = (
    "mistral3",
    _DECODER
    | {"model_type": "ministral3", "head_dim": 32}
    | {"rope_parameters": _YARN_ROPE | {"llama_4_scaling_beta": 0.1}},
    _WHOLE["Mistral3ForConditionalGeneration"][2],
)

pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an architecture, made once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            model_type, text, rest = _WHOLE[name]
            config = transformers.AutoConfig.for_model(model_type, text_config=text, **rest)
            model = getattr(transformers, name.partition(" ")[0])(config)
            randomize(model, 0)
            made[name] = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(made[name])
        return made[name]

    return of


def with_names(folder: Path, target: Path, layout: str) -> Path:
    """A copy with the names of transformers before 4.52 or since."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for part in ("language_model", "vision_tower", "vision_model", "multi_modal_projector"):
            if name.startswith((f"{part}.", f"model.{part}.")):
                rest = name.removeprefix("model.").removeprefix(f"{part}.")
                if part == "language_model" and not rest.startswith(("model.", "lm_head.")):
                    rest = f"model.{rest}"
                if layout == "before":
                    name = f"{part}.{rest}"
                elif part == "language_model":
                    head = rest.startswith("lm_head.")
                    name = rest if head else f"model.language_model.{rest.removeprefix('model.')}"
                else:
                    name = f"model.{part}.{rest}"
                break
        else:
            name = f"language_model.{name}" if layout == "before" else name
        tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_every_architecture_is_in_the_table():
    kinds = {name: text_types_of(name) for name in TEXT_TYPES}
    others = {f"{name} with {kind}" for name, found in kinds.items() for kind in found[1:]}
    assert set(_WHOLE) == {*kinds, *others}


BY_TRANSFORMERS = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
CASES = [
    *((name, "vllm" if name in TEXT_TYPES else "auto") for name in _WHOLE),
    *((name, "transformers") for name in BY_TRANSFORMERS),
]


@pytest.mark.parametrize(("name", "model_impl"), CASES)
def test_text_gives_the_tokens_of_transformers(name, model_impl, whole, tmp_path, caplog):
    folder = whole(name)
    prompts = random_prompts(8, 64 - MAX_TOKENS, vocab_size=4096)
    reference = TransformersReference(folder)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    settings = SETTINGS | {"model_impl": model_impl}
    for layout in ("before", "since"):
        llm = LLM(model=str(with_names(folder, tmp_path / layout, layout)), **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert_all_greedy(outputs, prompts, params, reference)
    lines = [r.getMessage() for r in caplog.records if "serves text input only" in r.getMessage()]
    architecture = name.partition(" ")[0]
    message = (
        f"{architecture} serves text input only: the part of the checkpoint for images is not "
        f"loaded"
    )
    assert lines == [message] * 2


def test_what_the_modules_of_transformers_cannot_run_is_refused(whole):
    folder = str(whole("Llama4ForConditionalGeneration"))
    with pytest.raises(ConfigError, match="cannot run with the modules of transformers: "):
        LLM(folder, model_impl="transformers", **SETTINGS)


def test_only_the_part_for_images_is_left_out(whole, tmp_path):
    folder = with_names(whole("Mistral3ForConditionalGeneration"), tmp_path / "more", "since")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.audio_tower.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightLoadError, match=r"unknown to the model .*model\.audio_tower\.weight"):
        LLM(model=str(folder), **SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no 'text_config', which describes its language model"),
        ({"model_type": "qwen2"}, "must be of model_type 'mistral' or 'ministral3', got 'qwen2'"),
        ({"num_hidden_layers": 2**40}, "'num_hidden_layers' must be a whole number from 1 to 1024"),
    ],
)
def test_a_language_model_that_cannot_run_is_named(text, message, whole, tmp_path):
    config = json.loads((whole("Mistral3ForConditionalGeneration") / "config.json").read_text())
    config["text_config"] = None if text is None else config["text_config"] | text
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(tmp_path), **SETTINGS)
