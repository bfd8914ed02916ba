"""Gemma 3 (arXiv 2503.19786): every image is one square of a fixed size, without crops."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.multimodal.images.settings import check_fixed_size, setting_bool
from vllm.multimodal.images.tiles import SingleTileFamily
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import config_whole, wrong_config, wrong_setting
from vllm.multimodal.interface.family import Expansion, TokenLookup

TOWERS = ("siglip_vision_model",)
"""`model_type` of the towers of Gemma 3."""


def tokens_per_side(config: Mapping[str, Any], tower: TowerConfig) -> int:
    """Return how many tokens one side of an image has.

    Raises:
        ConfigError: the patches of the tower cannot be pooled to the tokens of config.json.
    """
    side = tower.patches_per_side
    num_tokens = config_whole(config, "mm_tokens_per_image", 256, side * side)
    root = math.isqrt(num_tokens)
    if root * root != num_tokens or side % root:
        raise wrong_config(
            "mm_tokens_per_image",
            num_tokens,
            f"the square of a divisor of {side}, the number of patches in a row of an image",
        )
    return root


class Gemma3Family(SingleTileFamily):
    """Images of Gemma 3."""

    image_processor = "Gemma3ImageProcessor"
    placeholder = "<start_of_image>"
    text_of_image = "<start_of_image>"
    text_around = ("\n\n", "\n\n")
    towers: ClassVar[tuple[str, ...]] = TOWERS

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        check_fixed_size(settings, self.tower.image_size)
        if setting_bool(settings, "do_pan_and_scan"):
            raise wrong_setting("do_pan_and_scan", True, "false: crops are not supported")
        self.grid = (tokens_per_side(config, self.tower) ** 2,)

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        (num_tokens,) = grid
        first, last = token_id(self.placeholder), token_id("<end_of_image>")
        soft = [token_id("<image_soft_token>")] * num_tokens
        return Expansion([first, *soft, last], [False, *[True] * num_tokens, False])


Family = Gemma3Family
