"""Measure the padding of forward passes of an image encoder on a card, by family.

Photographs have the sizes of usual cameras, telephones and screens, at several scales and cropped a
little (seeded). Each goes through the image processor of the family, with the settings of a
published checkpoint, and is padded to the sizes that a card prepares by default. A card runs each
by itself, which is the worst case: images of one step share a forward pass. Nothing is encoded, and
no weights are needed.

One JSON object on stdout, a table on stderr.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from vllm.bucketing.encoder_sizes import encoder_sizes, fraction_of_padding
from vllm.multimodal.images.settings import with_defaults
from vllm.multimodal.job import family_class

PHOTOGRAPHS = [
    *((4000, 3000), (4032, 3024), (6000, 4000), (3840, 2160), (1920, 1080), (2560, 1440)),
    *((1366, 768), (1280, 720), (1170, 2532), (1080, 2400), (1024, 1024), (800, 600)),
    *((640, 480), (512, 512), (320, 240)),
]
"""Width and height."""
SCALES = (1, 1, 0.75, 0.5, 0.25)
LIMIT = 0.25
"""More padding ends the program with status 1."""


@dataclass(frozen=True)
class Kind:
    """A family with images of several sizes."""

    module: str
    vision: dict[str, Any]
    """Values of `vision_config`."""
    settings: dict[str, Any]
    """Values of `preprocessor_config.json`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Other values of config.json."""


_QWEN = {"depth": 32, "num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
_PIXTRAL = {"model_type": "pixtral", "image_size": 1540, "patch_size": 14}
_TILES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def qwen(processor: str, least: int, most: int) -> dict[str, Any]:
    """Return image processor settings with limits on the pixels of an image."""
    return {
        "image_processor_type": processor,
        "size": {"shortest_edge": least, "longest_edge": most},
    }


KINDS = {
    "Qwen2-VL": Kind(
        "qwen2_vl",
        {**_QWEN, "patch_size": 14},
        qwen("Qwen2VLImageProcessor", 56 * 56, 12_845_056),
    ),
    "Qwen2.5-VL, at most 1,003,520 pixels": Kind(
        "qwen2_5_vl",
        {**_QWEN, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        qwen("Qwen2VLImageProcessor", 56 * 56, 1_003_520),
    ),
    "Qwen3-VL": Kind(
        "qwen3_vl",
        {**_QWEN, "patch_size": 16},
        qwen("Qwen2VLImageProcessor", 256 * 256, 16_777_216) | {"patch_size": 16},
    ),
    "GLM-4.1V": Kind(
        "glm4v",
        {"depth": 24, "num_heads": 12, "hidden_size": 1536, "image_size": 336, "patch_size": 14}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2},
        qwen("Glm4vImageProcessor", 112 * 112, 9_633_792),
    ),
    "Mistral Small 3.1": Kind(
        "mistral3",
        _PIXTRAL,
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}}
        | {"patch_size": {"height": 28, "width": 28}},
        {"vision_feature_layer": -1, "spatial_merge_size": 2},
    ),
    "Pixtral 12B": Kind(
        "pixtral",
        {**_PIXTRAL, "image_size": 1024, "patch_size": 16},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}}
        | {"patch_size": {"height": 16, "width": 16}},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "LLaVA-NeXT": Kind(
        "llava_next",
        _CLIP,
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}}
        | {"crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": _TILES},
        {"image_grid_pinpoints": _TILES},
    ),
    "InternVL 3": Kind(
        "internvl",
        {"model_type": "internvl_vision", "image_size": 448, "patch_size": 14},
        {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True}
        | {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12},
        {"downsample_ratio": 0.5},
    ),
    "Idefics3": Kind(
        "idefics3",
        {"model_type": "idefics3_vision", "image_size": 364, "patch_size": 14},
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 1456}}
        | {"max_image_size": {"longest_edge": 364}},
        {"scale_factor": 2},
    ),
}


def photographs(count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield widths and heights of photographs."""
    rng = random.Random(seed)
    for _ in range(count):
        width, height = rng.choice(PHOTOGRAPHS)
        scale = rng.choice(SCALES)
        cropped = scale * rng.uniform(0.8, 1), scale * rng.uniform(0.8, 1)
        yield int(width * cropped[0]), int(height * cropped[1])


def measure(kind: Kind, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the fraction of padding, and the sizes to which photographs were padded."""
    config = {"vision_config": kind.vision, **kind.config}
    family = family_class(kind.module)(config, with_defaults(kind.settings))
    unit = import_module(f"vllm.model_executor.media.families.{kind.module}").Encoder.unit
    smallest, largest = (len(each.tensors["pixels"]) for each in (family.small(), family.largest()))
    sizes = encoder_sizes(smallest, largest, unit)
    black = [np.zeros((height, width, 3), np.uint8) for width, height in set(shapes)]
    found = {each.shape: len(family.process(each).tensors["pixels"]) for each in black}
    counts = [found[height, width, 3] for width, height in shapes]
    return {
        "unit": unit,
        "num_sizes": len(sizes),
        "largest": largest,
        "mean": sum(counts) / len(counts),
        "padding": fraction_of_padding(counts, sizes),
    }


def main() -> int:
    """Print the figures of all families; return the status of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photographs", type=int, default=100, help="How many there are.")
    parser.add_argument("--seed", type=int, default=20261127, help="Of their sizes.")
    args = parser.parse_args()
    shapes = list(photographs(args.photographs, args.seed))
    results = {}
    for name, kind in KINDS.items():
        results[name] = result = measure(kind, shapes)
        print(
            f"{name:40} {result['padding']:6.1%} of {result['unit']}, {result['num_sizes']} sizes",
            file=sys.stderr,
        )
    print(json.dumps({"photographs": args.photographs, "families": results}))
    return int(any(result["padding"] >= LIMIT for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
