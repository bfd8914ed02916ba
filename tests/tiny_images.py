"""Small random models with a part for images, complete with tokenizer and image processor."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.kept_folders import kept
from tests.multimodal import grid_models
from tests.tiny_models import randomize, spelled
from vllm.transformers_utils.transformers_version import is_version_4

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


LINE_BREAKS = (("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"))
"""Merges of up to four line breaks to a token."""


def make_tokenizer(
    *special: str,
    chat_image: str = "<image>",
    merges: Sequence[tuple[str, str]] = (),
    names: dict[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with some special tokens.

    Args:
        special: special tokens of images.
        chat_image: text for an image in the chat template.
        merges: sequences of bytes that become one token.
        names: attributes of the tokenizer that contain such tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = list(map("".join, merges))
    tokens = ["<pad>", "<s>", "</s>", *alphabet, *merged]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    # With merges, use no regular expression: it separates the last line break from a word.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        **({"extra_special_tokens": names} if names else {}),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", chat_image)
    return tokenizer


_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
}
_CROPPED = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


@dataclass(frozen=True)
class TinyImages:
    """A family with images, and the sizes of its small model."""

    architecture: str
    vision: dict[str, Any]
    """Values of `vision_config`."""
    processor: dict[str, Any]
    """Values of `preprocessor_config.json`."""
    text: dict[str, Any]
    """Values of `text_config`, in addition to `TEXT`."""
    image: str = "<image>"
    """Token of one image, before it is expanded."""
    others: tuple[str, ...] = ()
    """Other tokens around images."""
    in_text: str = "<image>"
    """An image in a text."""
    token_key: str = "image_token_index"
    """Key of config.json with the id of the token of an image."""
    config: dict[str, Any] = field(default_factory=dict)
    """Other values of config.json, where a text is the token whose id it is."""
    merges: Sequence[tuple[str, str]] = ()
    """Of the tokenizer."""
    names: dict[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer, for the Processor of transformers."""
    is_in_head: bool = True
    """The output head has the token of an image; False: its id is the size of the vocabulary."""


_VIDEO_IDS = ("video_token_id", "video_start_token_id", "video_end_token_id")
_GLM = (
    *("glm4v", "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    ("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
)


def _grid(
    name: str,
    image: str = "<|image_pad|>",
    begin: str = "<|vision_start|>",
    end: str = "<|vision_end|>",
    video: Sequence[str] = ("<|video_pad|>",),
    **text: Any,
) -> TinyImages:
    kind = grid_models.KINDS[name]
    vision = {
        key: TEXT["hidden_size"] if value == grid_models.HIDDEN_SIZE else value
        for key, value in kind.vision.items()
    }
    limits = {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28}
    return TinyImages(
        kind.architecture,
        vision,
        {**kind.settings, "size": limits},
        text,
        image,
        (begin, end, *video),
        begin + image + end,
        "image_token_id",
        {"vision_start_token_id": begin, "vision_end_token_id": end}
        | {"image_start_token_id": begin, "image_end_token_id": end}
        | dict(zip(_VIDEO_IDS, video, strict=False)),
    )


def _pixtral(name: str, **values: Any) -> TinyImages:
    kind = grid_models.KINDS[name]
    return TinyImages(
        kind.architecture,
        kind.vision,
        {**kind.settings, "size": {"longest_edge": 64}},
        {**kind.text, **values},
        "[IMG]",
        ("[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        config=kind.whole,
    )


_MROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 2, 2]}
_TOWER = {key: value for key, value in _CLIP.items() if key != "projection_dim"}
_IDEFICS3 = TinyImages(
    "Idefics3ForConditionalGeneration",
    {**_TOWER, "model_type": "idefics3_vision"},
    {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64}}
    | {"max_image_size": {"longest_edge": 32}},
    {"model_type": "llama"},
    "<image>",
    (
        *("<fake_token_around_image>", "<global-img>"),
        *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    ),
    "<image>",
    "image_token_id",
    {"scale_factor": 2},
)
_INTERLEAVED = {**_MROPE, "mrope_interleaved": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**_INTERLEAVED, "partial_rotary_factor": 1.0},
}

FAMILIES = {
    "llava": TinyImages(
        "LlavaForConditionalGeneration",
        _CLIP,
        {"image_processor_type": "CLIPImageProcessor", **_CROPPED},
        {"model_type": "llama"},
    ),
    "llava of Qwen 2": TinyImages(
        "LlavaForConditionalGeneration",
        {**_CLIP, "model_type": "siglip_vision_model"},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}},
        {"model_type": "qwen2"},
        config={"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "llava_next": TinyImages(
        "LlavaNextForConditionalGeneration",
        _CLIP,
        {"image_processor_type": "LlavaNextImageProcessor", **_CROPPED}
        | {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        {"model_type": "llama"},
        config={"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    ),
    "qwen2_vl": _grid("qwen2_vl", rope_parameters=_MROPE),
    "qwen2_5_vl": _grid("qwen2_5_vl", rope_parameters=_MROPE),
    "glm4v": _grid(
        *_GLM,
        head_dim=12,
        rope_parameters={**_MROPE, "partial_rotary_factor": 1.0},
    ),
    "glm4v_moe": replace(
        _grid(
            *_GLM,
            head_dim=12,
            rope_parameters={**_MROPE, "partial_rotary_factor": 1.0},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        architecture="Glm4vMoeForConditionalGeneration",
    ),
    "qwen3_5": _grid("qwen3_5", **_DELTA_NET),
    "qwen3_5_moe": replace(
        _grid("qwen3_5", **_DELTA_NET, **_EXPERTS, shared_expert_intermediate_size=24),
        architecture="Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen3_vl": _grid("qwen3_vl", num_hidden_layers=4, head_dim=12, rope_parameters=_INTERLEAVED),
    "qwen3_vl_moe": replace(
        _grid(
            *("qwen3_vl",),
            **_EXPERTS,
            num_hidden_layers=4,
            head_dim=12,
            rope_parameters=_INTERLEAVED,
        ),
        architecture="Qwen3VLMoeForConditionalGeneration",
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": replace(
        _IDEFICS3,
        architecture="SmolVLMForConditionalGeneration",
        vision={**_IDEFICS3.vision, "model_type": "smolvlm_vision"},
    ),
    "internvl": TinyImages(
        "InternVLForConditionalGeneration",
        {**_TOWER, "model_type": "internvl_vision"},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}}
        | {"crop_to_patches": True, "max_patches": 4},
        {"model_type": "qwen2"},
        "<IMG_CONTEXT>",
        ("<img>", "</img>"),
        "<IMG_CONTEXT>",
        "image_token_id",
        {"downsample_ratio": 0.5},
    ),
    "mllama": TinyImages(
        "MllamaForConditionalGeneration",
        {
            **{key: value for key, value in _TOWER.items() if key != "num_attention_heads"},
            "model_type": "mllama_vision_model",
            "attention_heads": 2,
            "num_global_layers": 2,
            "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 96,
        },
        {"image_processor_type": "MllamaImageProcessor", "size": {"height": 32, "width": 32}},
        {
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "<|image|>",
        in_text="<|image|>",
        is_in_head=False,
    ),
    "gemma3": TinyImages(
        "Gemma3ForConditionalGeneration",
        {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 4},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
        {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 20}
        | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 12},
        "<start_of_image>",
        ("<image_soft_token>", "<end_of_image>"),
        "<start_of_image>",
        "image_token_id",
        {"mm_tokens_per_image": 16, "image_token_id": "<image_soft_token>"}
        | {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        LINE_BREAKS,
        {"image_token": "<image_soft_token>"}
        | {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "mistral3": _pixtral("mistral3", head_dim=12),
    "llava with the tower of Pixtral": _pixtral("pixtral", head_dim=12),
}


@kept
def make_tiny_images(family: str, folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """Write config, weights, tokenizer and image processor of a small random model.

    Args:
        family: one of `FAMILIES`.
        folder: folder of the model, created if it does not exist.
        seed: seed of the weights.
        text: values of `text_config` instead of the family's.
    """
    made = FAMILIES[family]
    tokenizer = make_tokenizer(
        made.image, *made.others, chat_image=made.image, merges=made.merges, names=made.names
    )
    vocabulary, vocab_size = tokenizer.get_vocab(), len(tokenizer)
    if not made.is_in_head:
        vocab_size = vocabulary[made.image]
    ids = {
        key: vocabulary.get(value, value) if isinstance(value, str) else value
        for key, value in {made.token_key: made.image, **made.config}.items()
    }
    if is_version_4() and family.startswith("glm4v"):
        pytest.skip("this transformers spells rotations of parts of heads in another way")
    if not hasattr(transformers, made.architecture):
        pytest.skip(f"this transformers has no {made.architecture}")
    model_class = getattr(transformers, made.architecture)
    if "text_config" not in model_class.config_class.sub_configs:
        pytest.skip(f"in this transformers, {made.architecture} has no part for the text")
    config = model_class.config_class(
        text_config=spelled({**TEXT, **made.text, "vocab_size": vocab_size, **text}),
        vision_config=made.vision,
        **ids,
    )
    model = model_class(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made.processor))
    return folder


def _given_videos(
    config: dict[str, Any], processor: Any, films: Sequence[tuple[np.ndarray, float]]
) -> dict[str, torch.Tensor]:
    """Return the videos of one prompt for a model of transformers."""
    from tests.tiny_videos import expected_patches

    found = [expected_patches(processor, frames) for frames, _ in films]
    given = {
        "pixel_values_videos": torch.cat([patches for patches, _ in found]),
        "video_grid_thw": torch.tensor([grid for _, grid in found]),
    }
    if "tokens_per_second" in config["vision_config"]:
        given["second_per_grid_ts"] = torch.tensor([2 / rate for _, rate in films])
    return given


def draw_image(seed: int, height: int = 40, width: int = 48) -> np.ndarray:
    """Return a picture of random blocks and a gradient, [height, width, 3] in RGB."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (-(-height // 8), -(-width // 8), 3))
    pixels = np.kron(blocks, np.ones((8, 8, 1)))[:height, :width]
    return (0.8 * pixels + 0.2 * np.linspace(0, 255, width)[None, :, None]).astype(np.uint8)


def expected_outputs(
    folder: Path,
    prompts: Sequence[tuple[list[int], list[np.ndarray]]],
    max_tokens: int,
    videos: Sequence[Sequence[tuple[np.ndarray, float]]] = (),
) -> list[list[int]]:
    """Return the greedy outputs of transformers; see `expected_generations`."""
    found = expected_generations(folder, prompts, max_tokens, videos)
    return [token_ids for token_ids, _ in found]


@torch.inference_mode()
def expected_generations(
    folder: Path,
    prompts: Sequence[tuple[list[int], list[np.ndarray]]],
    max_tokens: int,
    videos: Sequence[Sequence[tuple[np.ndarray, float]]] = (),
) -> list[tuple[list[int], list[float]]]:
    """Return the greedy outputs of transformers, with the log-probability of each token.

    Args:
        folder: folder of the model.
        prompts: tokens, including the tokens of all images and videos, and the images.
        videos: for each prompt, frames and frames per second. Empty: no prompt has videos.
        max_tokens: length of each output.
    """
    config = json.loads((folder / "config.json").read_text())
    named = config if "architectures" in config else config["text_config"]
    model_class = getattr(transformers, named["architectures"][0])
    model = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None  # the outputs continue after an end token
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    name = settings.pop("image_processor_type")
    processor_class = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    processor = processor_class(**settings)
    image_token = config.get("image_token_id", config.get("image_token_index"))
    outputs = []
    for (token_ids, images), films in zip(prompts, videos or [()] * len(prompts), strict=True):
        ids = torch.tensor([token_ids])
        given = {}
        if images:
            given = dict(
                processor(images=images, return_tensors="pt", input_data_format="channels_last")
            )
            given.pop("num_patches", None)  # the model does not accept this entry
            if "num_tiles" in given:
                given["cross_attention_mask"] = seen_tiles(token_ids, given.pop("num_tiles"))
                hide_images_before_the_first(model)
            if given.pop("num_crops", None) is not None:
                given["token_type_ids"] = (ids == image_token).int()
        if films:
            given |= _given_videos(config, processor, films)
        if ("image_grid_thw" in given or films) and not is_version_4():
            is_video = ids == config.get("video_token_id")
            is_image = ids == image_token
            # GLM uses the image token for the frames of videos.
            if "video_start_token_id" in config:
                inside = (ids == config["video_start_token_id"]).int()
                inside -= (ids == config["video_end_token_id"]).int()
                is_video = is_image & (inside.cumsum(1) > 0)
                is_image &= ~is_video
            given["mm_token_type_ids"] = is_image.int() + 2 * is_video.int()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **given,
        )
        generated = out.sequences[0, len(token_ids) :]
        logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, generated[:, None])
        outputs.append((generated.tolist(), logprobs[:, 0].tolist()))
    return outputs


def seen_tiles(token_ids: list[int], num_tiles: list[list[int]]) -> torch.Tensor:
    """Return the `cross_attention_mask` [1, tokens, images, 4] for Llama 3.2 Vision.

    Args:
        token_ids: tokens of a prompt; the largest id is the token of an image.
        num_tiles: number of tiles of each image of the prompt.
    """
    from transformers.models.mllama import processing_mllama as rules

    ranges = rules.get_cross_attention_token_mask(token_ids, max(token_ids))
    dense = rules.convert_sparse_cross_attention_mask_to_dense
    return torch.from_numpy(dense([ranges], num_tiles, 4, len(token_ids)))


def hide_images_before_the_first(model: Any) -> None:
    """Hide all images from tokens before the first image, as Meta's own code does.

    In transformers these tokens read all images of the prompt, so they depend on later tokens.
    """
    for layer in model.model.language_model.layers:
        if not hasattr(layer, "cross_attn") or layer._forward_pre_hooks:
            continue

        def note(layer: Any, args: Any, given: dict[str, Any]) -> None:
            layer.sees = given["full_text_row_masked_out_mask"]

        def clear(attention: Any, args: Any, found: Any, layer: Any = layer) -> Any:
            return found[0] * layer.sees[:, 0], *found[1:]

        layer.register_forward_pre_hook(note, with_kwargs=True)
        layer.cross_attn.register_forward_hook(clear)
