"""Small random models with a part for images, complete with tokenizer and image processor."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import randomize

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


def make_tokenizer(*special: str, chat_image: str = "<image>") -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with some more tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", chat_image)
    return tokenizer


def make_llava(folder: Path, *, seed: int = 0, text_type: str = "llama", **config: Any) -> Path:
    """Write a LLaVA 1.5 with images of 4 x 4 patches."""
    tokenizer = make_tokenizer("<image>")
    text = {"model_type": text_type, **TEXT, "vocab_size": len(tokenizer)}
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 16,
    }
    whole = transformers.LlavaConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **config,
    )
    model = transformers.LlavaForConditionalGeneration(whole)
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    }
    return _save(model, folder, tokenizer, processor, seed)


def _save(
    model: Any,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    processor: dict[str, Any],
    seed: int,
) -> Path:
    randomize(model, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def draw_image(seed: int, height: int = 40, width: int = 48) -> np.ndarray:
    """Return a picture of random blocks and a gradient, [height, width, 3] in RGB."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (-(-height // 8), -(-width // 8), 3))
    pixels = np.kron(blocks, np.ones((8, 8, 1)))[:height, :width]
    return (0.8 * pixels + 0.2 * np.linspace(0, 255, width)[None, :, None]).astype(np.uint8)


@torch.inference_mode()
def llava_reference(
    folder: Path, prompts: Sequence[tuple[list[int], list[np.ndarray]]], max_tokens: int
) -> list[list[int]]:
    """Return the greedy outputs of transformers.

    Args:
        folder: of a model.
        prompts: tokens with one placeholder for each image, and the images.
        max_tokens: of each output.
    """
    model = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    name = settings.pop("image_processor_type")
    processor_class = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    processor = processor_class(**settings)
    tower = model.config.vision_config
    per_image = (tower.image_size // tower.patch_size) ** 2
    image_token = model.config.image_token_index
    outputs = []
    for token_ids, images in prompts:
        ids = [
            t for token in token_ids for t in [token] * (per_image if token == image_token else 1)
        ]
        pixels = {}
        if images:
            found = processor(images=images, return_tensors="pt", input_data_format="channels_last")
            pixels = {"pixel_values": found["pixel_values"]}
        inputs = torch.tensor([ids])
        out = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            **pixels,
        )
        outputs.append(out[0, len(ids) :].tolist())
    return outputs
