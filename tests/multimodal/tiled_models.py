"""Tiny models of transformers whose images are tiles, and their encoders in this package."""

from importlib import import_module

import numpy as np
import pytest
import torch

SIDE = 28
"""Pixels of a tile."""

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 7,
}
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 64,
    "pad_token_id": 0,
}
LLAMA = {"model_type": "llama", **TEXT}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28], [84, 112]]
"""Heights and widths of what LLaVA-NeXT cuts into tiles."""
MEAN, DEVIATION = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)


def make_model(name, **config):
    """Return a model of the classes {name}Config and {name}ForConditionalGeneration, with weights
    that are large enough to matter."""
    import transformers

    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    config = getattr(transformers, f"{name}Config")(**config)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.2)
    return model


def make_encoder(family, model, rename=lambda name: name, dtype=torch.float32):
    """Return the encoder of a family with the weights of a model of transformers.

    Check that the checkpoint has every parameter, and that every tensor with one of the encoder's
    prefixes is a parameter.
    """
    module = import_module(f"vllm.model_executor.media.families.{family}")
    torch.set_default_dtype(dtype)
    try:
        encoder = module.Encoder(model.config.to_dict(), TEXT["hidden_size"])
    finally:
        torch.set_default_dtype(torch.float32)
    missing = dict(encoder.named_parameters())
    for name, tensor in model.state_dict().items():
        name = rename(name).removeprefix("model.")
        if name.startswith(encoder.prefixes):
            name = encoder.parameter_name(name)
            if name is not None:
                missing.pop(name).data.copy_(tensor)
    assert not missing, f"not in the checkpoint: {list(missing)}"
    return encoder


def make_items(tiles_of_images, side=SIDE, **small):
    """Return the tensors of images with random pixels, one for each number of tiles.

    Args:
        tiles_of_images: numbers.
        side: pixels of a tile.
        small: other tensors of the images, a list of each.
    """
    generator = np.random.default_rng(0)
    statistics = torch.tensor([MEAN, DEVIATION]) * 255
    items = []
    for index, num_tiles in enumerate(tiles_of_images):
        pixels = generator.integers(0, 256, (num_tiles, 3, side, side), dtype=np.uint8)
        items.append(
            {"pixels": torch.from_numpy(pixels), "statistics": statistics}
            | {name: values[index] for name, values in small.items()}
        )
    return items


def normalised(item):
    """Return the normalised pixels of an image, as its image processor computes them."""
    mean, deviation = (torch.tensor(each)[:, None, None] for each in (MEAN, DEVIATION))
    return (item["pixels"] * (1 / 255) - mean) / deviation
