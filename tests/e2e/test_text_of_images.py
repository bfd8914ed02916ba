"""Test that models with a part for images or sounds serve text: the tokens of transformers, with
all names of tensors.
"""

import json
from dataclasses import dataclass
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
from tests.e2e.test_positions import ENGINE as WITH_POSITIONS
from tests.e2e.test_positions import check as check_positions
from tests.e2e.test_positions import one as greedy_of
from tests.e2e.test_positions import requests_of
from tests.multimodal.sound_models import QWEN2_AUDIO, VOXTRAL
from tests.reference_model import load_reference
from tests.tiny_models import (
    DECODER,
    DELTA_NET,
    DELTA_NET_ROPE,
    GEMMA2,
    GEMMA4_SHARING,
    LLAMA3_ROPE,
    YARN_ROPE,
    is_version_4,
    make_tiny_model,
    randomize,
    sparing,
)
from vllm import LLM, SamplingParams
from vllm.config.families import TEXT_TYPES, text_types_of, usual_architecture
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
_QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
}
_MLLAMA_VISION = {
    **{key: value for key, value in _VISION.items() if key != "num_attention_heads"},
    "attention_heads": 2,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 32,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_HALF_SECTIONS = _SECTIONS | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        GEMMA2 | {"num_hidden_layers": 7, "rope_parameters": _ROPES, "tie_word_embeddings": True},
        {"vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4",
        GEMMA4_SHARING | {"tie_word_embeddings": True},
        {"vision_config": _VISION | {"head_dim": 8, "position_embedding_size": 16}},
    ),
    "Llama4ForConditionalGeneration": (
        "llama4",
        DECODER
        | {"num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 4, "floor_scale": 8}
        | {"intermediate_size_mlp": 112, "attention_chunk_size": 20, "attn_scale": 0.5}
        | {"rope_parameters": LLAMA3_ROPE},
        {"vision_config": _VISION | {"vision_output_dim": 16, "projector_output_dim": 16}},
    ),
    "MllamaForConditionalGeneration": (
        "mllama",
        DECODER
        | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
        | {"rope_parameters": LLAMA3_ROPE},
        {"vision_config": _MLLAMA_VISION},
    ),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl",
        DECODER | {"rope_parameters": _SECTIONS},
        {"vision_config": _QWEN_VISION | {"embed_dim": 16, "hidden_size": 64}},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        DECODER | {"rope_parameters": _SECTIONS},
        {"vision_config": _QWEN_VISION},
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3_vl",
        DECODER | {"head_dim": 16, "rope_parameters": _SECTIONS | {"mrope_interleaved": True}},
        {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl_moe",
        DECODER
        | {"head_dim": 16, "rope_parameters": _SECTIONS | {"mrope_interleaved": True}}
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "Glm4vForConditionalGeneration": (
        "glm4v",
        DECODER | {"head_dim": 16, "rope_parameters": _HALF_SECTIONS},
        {"vision_config": _QWEN_VISION | {"image_size": 8}},
    ),
    "Glm4vMoeForConditionalGeneration": (
        "glm4v_moe",
        DECODER
        | {"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": _HALF_SECTIONS}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"vision_config": _QWEN_VISION | {"image_size": 8}},
    ),
    "Qwen3_5ForConditionalGeneration": (
        "qwen3_5",
        DELTA_NET | {"rope_parameters": DELTA_NET_ROPE},
        {"vision_config": _QWEN_VISION},
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "qwen3_5_moe",
        DELTA_NET | {"rope_parameters": DELTA_NET_ROPE},
        {"vision_config": _QWEN_VISION},
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        DECODER | {"model_type": "mistral", "head_dim": 32},
        {"vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8}},
    ),
    "LlavaForConditionalGeneration": (
        "llava",
        DECODER | {"model_type": "llama"},
        {"vision_config": _VISION | {"model_type": "clip_vision_model"}},
    ),
    "InternVLForConditionalGeneration": (
        "internvl",
        DECODER | {"model_type": "qwen2"},
        {"vision_config": _VISION | {"model_type": "internvl_vision", "image_size": 8}},
    ),
    "Idefics3ForConditionalGeneration": (
        "idefics3",
        DECODER | {"model_type": "llama"},
        {"vision_config": _VISION | {"model_type": "idefics3_vision"}, "scale_factor": 2},
    ),
    "SmolVLMForConditionalGeneration": (
        "smolvlm",
        DECODER | {"model_type": "llama"},
        {"vision_config": _VISION | {"model_type": "smolvlm_vision"}, "scale_factor": 2},
    ),
    "LlavaNextForConditionalGeneration": (
        "llava_next",
        DECODER | {"model_type": "llama"},
        {"vision_config": _VISION | {"model_type": "clip_vision_model"}},
    ),
    "Qwen2AudioForConditionalGeneration": (
        "qwen2_audio",
        DECODER | {"model_type": "qwen2"},
        {"audio_config": QWEN2_AUDIO},
    ),
    "VoxtralForConditionalGeneration": (
        "voxtral",
        DECODER | {"model_type": "llama", "head_dim": 16},
        {"audio_config": VOXTRAL},
    ),
}
"""Architecture -> model type of the whole, config of its language model, the rest."""
_MINISTRAL = {
    "model_type": "ministral3",
    "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.5},
}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
_OTHER_TEXTS = {
    "Ministral 3": ("Mistral3ForConditionalGeneration", _MINISTRAL),
    "Gemma 4 with experts": ("Gemma4ForConditionalGeneration", _GEMMA4_EXPERTS),
    "LLaVA of Mistral": ("LlavaForConditionalGeneration", {"model_type": "mistral"}),
    "LLaVA of Qwen 2": ("LlavaForConditionalGeneration", {"model_type": "qwen2"}),
    "InternVL of Qwen 3": ("InternVLForConditionalGeneration", {"model_type": "qwen3"}),
    "InternVL of Qwen 3 with experts": (
        "InternVLForConditionalGeneration",
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32},
    ),
    "InternVL of Llama": ("InternVLForConditionalGeneration", {"model_type": "llama"}),
    "Voxtral of Mistral": ("VoxtralForConditionalGeneration", {"model_type": "mistral"}),
    "LLaVA-NeXT of Granite": ("LlavaNextForConditionalGeneration", {"model_type": "granite"}),
}
"""Architectures with language models of other types."""


WITH_SECTIONS = [
    name
    for name, (_, text, _) in WHOLE.items()
    if text.get("rope_parameters", {}).get("mrope_section")
]
"""Architectures whose tokens have several positions."""
SAME_SECTIONS = [
    "Qwen2VLForConditionalGeneration",
    *(name for name in WITH_SECTIONS if "Moe" in name),
]
"""Families whose positions have the sections of another family. tests/model_executor has their
layers."""


pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of an architecture, which is made once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            architecture, more = _OTHER_TEXTS.get(name, (name, {}))
            model_type, text, rest = WHOLE[architecture]
            config = transformers.AutoConfig.for_model(model_type, text_config=text | more, **rest)
            model = getattr(transformers, architecture)(config)
            randomize(model, 0)
            made[name] = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(made[name])
        return made[name]

    return of


_PARTS = (
    *("language_model", "vision_tower", "vision_model", "visual", "audio_tower"),
    "multi_modal_projector",
)


def with_names(folder: Path, target: Path, layout: str) -> Path:
    """Return a copy with the names of transformers before 4.52, or since then."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    if layout == "before" and config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        config = without_levels(config)
    (target / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for part in _PARTS:
            if name.startswith((f"{part}.", f"model.{part}.")):
                rest = name.removeprefix("model.").removeprefix(f"{part}.")
                if part == "language_model" and not rest.startswith(("model.", "lm_head.")):
                    rest = f"model.{rest}"
                if layout == "before":
                    is_flat = part == "language_model" and "text_config" not in config
                    name = rest if is_flat else f"{part}.{rest}"
                elif part == "language_model":
                    head = rest.startswith("lm_head.")
                    name = rest if head else f"model.language_model.{rest.removeprefix('model.')}"
                else:
                    name = f"model.{part}.{rest}"
                break
        else:
            has_level = layout == "before" and "text_config" in config
            has_level &= not name.endswith("image_newline")
            name = f"language_model.{name}" if has_level else name
        if layout == "before" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            is_transposed = config["model_type"] == "qwen3_vl_moe"
            tensor = tensor.transpose(1, 2).contiguous() if is_transposed else tensor
        tensors[name] = tensor
    if config["model_type"].startswith("qwen3_5"):
        tensors["mtp.fc.weight"] = torch.ones(2, 2)  # a weight of MTP layers, which are not loaded
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def without_levels(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose language-model values are at the top level, as before transformers
    4.52.
    """
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


@dataclass(frozen=True)
class _PutTogether:
    """A checkpoint that contains a tiny language model, and the names of its tensors."""

    model_type: str
    text: str
    """Name of the tiny model."""
    prefix: str
    """Of the names of the language model, instead of `model.`."""
    parts: tuple[str, ...]
    published_as: str | None = None
    """Another name of the architecture. Its config has all values at the top, and its layers have
    adapters for images and sounds."""


_PUT_TOGETHER = {
    "Gemma3nForConditionalGeneration": _PutTogether(
        "gemma3n",
        "gemma3n",
        "model.language_model.",
        tuple(
            f"model.{part}"
            for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    "KimiK25ForConditionalGeneration": _PutTogether(
        "kimi_k25", "deepseek_v3", "language_model.model.", ("vision_tower", "mm_projector")
    ),
    "KimiVLForConditionalGeneration": _PutTogether(
        "kimi_vl", "deepseek_v3", "language_model.model.", ("vision_tower", "multi_modal_projector")
    ),
    "Phi4MultimodalForCausalLM": _PutTogether(
        "phi4mm", "phi3", "model.", ("model.embed_tokens_extend.image_embed",), "Phi4MMForCausalLM"
    ),
}
"""Architectures whose part for images is defined by another package (timm, with Gemma 3n) or by
code in the checkpoint, or is larger than a test needs."""


def test_every_architecture_is_in_the_table():
    assert {*WHOLE, *_PUT_TOGETHER} == set(map(usual_architecture, TEXT_TYPES))
    others = {kind for name in TEXT_TYPES for kind in text_types_of(name)[1:]}
    tested = {more.get("model_type") for _, more in _OTHER_TEXTS.values()}
    assert others <= {*tested, "kimi_k2"}


@pytest.mark.parametrize("name", _PUT_TOGETHER)
def test_a_checkpoint_gives_the_tokens_of_its_language_model(name, tmp_path, caplog):
    given, whole = _PUT_TOGETHER[name], tmp_path / "whole"
    alone = make_tiny_model(given.text, tmp_path / "alone")
    whole.mkdir()
    text = json.loads((alone / "config.json").read_text())
    if name == "KimiK25ForConditionalGeneration":
        text["model_type"] = "kimi_k2"  # the model type in the published config
    config = {"model_type": given.model_type, "architectures": [given.published_as or name]}
    config = text | config if given.published_as else config | {"text_config": text}
    (whole / "config.json").write_text(json.dumps(config))
    tensors = {f"{part}.weight": torch.zeros(2) for part in given.parts}
    for key, tensor in load_file(alone / "model.safetensors").items():
        if key.startswith("model."):
            key = given.prefix + key.removeprefix("model.")
        elif given.prefix.startswith("language_model."):
            key = f"language_model.{key}"
        if given.published_as and "_proj." in key:
            for adapter in ("vision", "speech"):
                tensors[key.replace("_proj.", f"_proj.lora_A.{adapter}.")] = torch.zeros(2)
                tensors[key.replace("_proj.", f"_proj.lora_B.{adapter}.")] = torch.zeros(2)
            key = key.replace("_proj.", "_proj.base_layer.")
        tensors[key] = tensor
    save_file(tensors, whole / "model.safetensors")
    prompts = random_prompts(8, 64 - MAX_TOKENS, vocab_size=4096)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    outputs = LLM(model=str(whole), **SETTINGS).generate(prompts, params, use_tqdm=False)
    assert_all_greedy(outputs, prompts, params, TransformersReference(alone))
    if name in WHY_TEXT:
        assert WHY_TEXT[name] in caplog.text


def test_kimi_k25_as_transformers_saves_it(tmp_path):
    """The class name differs from the published one."""
    alone = json.loads(
        (make_tiny_model("deepseek_v3", tmp_path / "alone") / "config.json").read_text()
    )
    vision = _VISION | {"pos_emb_height": 4, "pos_emb_width": 4}
    config = transformers.AutoConfig.for_model(
        "kimi_k25",
        text_config=alone,
        vision_config=vision,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )
    model = transformers.Kimi_K25ForConditionalGeneration(config)
    randomize(model, 0)
    model.save_pretrained(tmp_path / "whole")
    prompts = random_prompts(4, 64 - MAX_TOKENS, vocab_size=4096)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    outputs = LLM(str(tmp_path / "whole"), **SETTINGS).generate(prompts, params, use_tqdm=False)
    assert_all_greedy(outputs, prompts, params, TransformersReference(tmp_path / "whole"))


BY_TRANSFORMERS = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
ONLY_SINCE = (
    *("Gemma4ForConditionalGeneration", "Gemma 4 with experts"),
    *("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
)
"""Architectures that older versions of transformers did not have, or with the same names."""
CASES = [
    *((name, "vllm") for name in (*WHOLE, *_OTHER_TEXTS)),
    *((name, "transformers") for name in BY_TRANSFORMERS),
]


WHY_TEXT = {
    "Gemma3nForConditionalGeneration": "its image encoder is a MobileNet of the timm package",
    "Llama4ForConditionalGeneration": "its image processor in transformers needs torchvision",
    "Phi4MultimodalForCausalLM": "its image processor in transformers needs torchvision",
}


@pytest.mark.parametrize(("name", "model_impl"), CASES)
def test_text_gives_the_tokens_of_transformers(name, model_impl, whole, tmp_path, caplog):
    folder = whole(name)
    prompts = random_prompts(8, 64 - MAX_TOKENS, vocab_size=4096)
    reference = TransformersReference(folder)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    settings = SETTINGS | {"model_impl": model_impl}
    for layout in ("since",) if name in ONLY_SINCE else ("before", "since"):
        llm = LLM(model=str(with_names(folder, tmp_path / layout, layout)), **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert_all_greedy(outputs, prompts, params, reference)
    lines = [r.getMessage() for r in caplog.records if "serves text input only" in r.getMessage()]
    architecture, _ = _OTHER_TEXTS.get(name, (name, None))
    items = "sounds" if "audio_config" in WHOLE[architecture][2] else "images"
    rest = f"serves text input only: the part of the checkpoint for {items} is not loaded"
    assert len(lines) == (1 if name in ONLY_SINCE else 2)
    begin = f"{architecture} {rest}, because {WHY_TEXT.get(architecture, '')}"
    assert all(line.startswith(begin) for line in lines)


@pytest.mark.parametrize("name", sparing(WITH_SECTIONS, SAME_SECTIONS))
def test_positions_of_requests_are_those_of_transformers(name, whole):
    model: Any = load_reference(whole(name))
    model.model = model.model.language_model
    with torch.inference_mode():
        wanted = {3: [greedy_of(model, given, 3) for given in requests_of(3)]}
    check_positions(LLM(str(whole(name)), **WITH_POSITIONS), 3, wanted)


def test_what_the_modules_of_transformers_cannot_run_is_refused(whole):
    folder = str(whole("Llama4ForConditionalGeneration"))
    with pytest.raises(ConfigError, match="cannot run with the model code of transformers: "):
        LLM(folder, model_impl="transformers", **SETTINGS)


def test_only_the_part_for_images_is_left_out(whole, tmp_path):
    folder = with_names(whole("Mistral3ForConditionalGeneration"), tmp_path / "more", "since")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.other_tower.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightLoadError, match=r"unknown to the model .*model\.other_tower\.weight"):
        LLM(model=str(folder), **SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no 'text_config', which describes its language model"),
        (
            {"model_type": "ministral"},
            "must be of model_type 'mistral' or 'ministral3', got 'ministral'",
        ),
        ({"num_hidden_layers": 2**40}, "'num_hidden_layers' must be an integer from 1 to 1024"),
    ],
)
def test_a_language_model_that_cannot_run_is_named(text, message, whole, tmp_path):
    config = json.loads((whole("Mistral3ForConditionalGeneration") / "config.json").read_text())
    config["text_config"] = None if text is None else config["text_config"] | text
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(tmp_path), **SETTINGS)
