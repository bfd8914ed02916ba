"""The encoder of Llama 3.2 Vision (Meta 2024)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.media.vision.layers import TowerLinear, normalize
from vllm.model_executor.media.vision.mllama import MllamaTower, Sequences, padded_length
from vllm.multimodal.families.mllama import TOWERS, read_layouts
from vllm.multimodal.images.tower_config import read_tower_config
from vllm.multimodal.interface.checks import (
    config_object,
    config_whole,
    layer_indices,
    wrong_config,
)

_MAX_LAYERS = 2**10
_MAX_WIDTH = 2**20
_WITHIN = "vision_config."


class MllamaEncoder(MediaEncoder):
    """A vision tower, and a matmul that projects several of its hidden states.

    The results are hidden states for cross-attention layers: the same number for each tile that the
    image fills.

    Tensors of an image: `pixels` [tiles, 3, S, S] uint8; `statistics` [2, 3] float32, mean and
    deviation of each channel; `layout` [1], index of the layout of its tiles.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")
    unit: ClassVar[str] = "images"

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        tower = read_tower_config(config, TOWERS)
        vision = config_object(config, "vision_config")
        layouts = read_layouts(config)
        self.num_tiles = layouts[-1][0]
        self.states_of_tile = tower.patches_per_side**2 + 1
        self.max_states = self.num_tiles * self.states_of_tile
        self.length = padded_length(tower)
        key, num_layers = "intermediate_layers_indices", tower.num_hidden_layers
        wanted = layer_indices(vision, key, (3, 7, 15, 23, 30))
        if not wanted or wanted[-1] >= num_layers:
            accepted = f"indices of the {num_layers} layers, in ascending order"
            raise wrong_config(_WITHIN + key, list(wanted), accepted)
        width = tower.hidden_size * (1 + len(wanted))
        if config_whole(vision, "vision_output_dim", 7680, _MAX_WIDTH, _WITHIN) != width:
            raise wrong_config(
                f"{_WITHIN}vision_output_dim",
                vision.get("vision_output_dim"),
                f"hidden_size times one more than {key} has ({width})",
            )
        num_global = config_whole(vision, "num_global_layers", 8, _MAX_LAYERS, _WITHIN)
        self.vision_model = MllamaTower(tower, num_global, self.num_tiles, 1 + len(layouts), wanted)
        self.multi_modal_projector = TowerLinear(width, hidden_size)

    def size_of(self, item: Mapping[str, Tensor]) -> int:
        return 1

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        """Build the arguments of `run`, padded to `size` images.

        These are `pixels` [B, T, 3, S, S], `statistics` [B, 2, 3], `layouts` [B], `filled` [B, T]
        (which tiles images fill), and the order of positions, `first` and `others`.

        For one image without padding, `first` are exactly the positions with content, so attention
        needs no mask. Otherwise `padding` [B, positions] marks the positions without content.
        """
        missing = 0 if size is None else size - len(items)
        assert missing >= 0, f"{len(items)} images do not fit {size}"
        counts = [len(item["pixels"]) for item in items]
        pixels = [
            F.pad(item["pixels"], (0, 0) * 3 + (0, self.num_tiles - count))
            for item, count in zip(items, counts, strict=True)
        ]
        statistics = torch.stack([item["statistics"] for item in items])
        # An image that only pads counts as one filled tile.
        num_filled = torch.tensor(counts + [1] * missing)[:, None]
        filled = torch.arange(self.num_tiles) < num_filled
        tile = torch.arange(self.num_tiles).repeat_interleave(self.length)
        is_state = torch.arange(len(tile)) % self.length < self.states_of_tile
        needs_mask = size is not None or len(items) > 1
        is_first = is_state if needs_mask else is_state & (tile < counts[0])
        first, others = is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]
        tensors = {
            "pixels": F.pad(torch.stack(pixels), (0, 0) * 4 + (0, missing)),
            # A standard deviation of 0 would divide by zero and give NaN.
            "statistics": F.pad(statistics, (0, 0) * 2 + (0, missing), value=1.0),
            "layouts": F.pad(torch.cat([item["layout"] for item in items]), (0, missing)),
            "filled": filled,
            "first": first,
            "others": others,
        }
        if needs_mask:
            shows = is_state & (tile < num_filled)
            tensors["padding"] = ~shows[:, torch.cat([first, others])]
        return tensors

    def run(self, **tensors: Tensor) -> Tensor:
        pixels, filled, first = (tensors[name] for name in ("pixels", "filled", "first"))
        statistics = tensors["statistics"].repeat_interleave(self.num_tiles, 0)
        scaled = normalize(pixels.flatten(0, 1), statistics, self.dtype)
        scaled = scaled.unflatten(0, filled.shape) * filled[:, :, None, None, None]
        order = torch.cat([first, tensors["others"]])
        sequences = Sequences(order, len(first), tensors.get("padding"))
        states = self.vision_model(scaled, tensors["layouts"], sequences)
        return self.multi_modal_projector(states).flatten(0, 1)

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        starts = range(0, len(items) * self.max_states, self.max_states)
        counts = [len(item["pixels"]) * self.states_of_tile for item in items]
        return [
            embeddings[start : start + count] for start, count in zip(starts, counts, strict=True)
        ]

    def encode_parts(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode images one after another, which needs no masks; return the states [n, width] of
        each.
        """
        return [super(MllamaEncoder, self).encode_parts([part])[0] for part in parts]


Encoder = MllamaEncoder
