"""The encoder of Qwen2-Audio (Chu et al. 2024, arXiv 2407.10759)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.media.audio.sound_encoder import SoundEncoder, pad_pieces
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.multimodal.families.qwen2_audio import Family


class Qwen2AudioProjector(nn.Module):
    """Projects hidden states with one matmul.

    Shape: [..., input_size] -> [..., hidden_size]
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = TowerLinear(input_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Qwen2AudioEncoder(SoundEncoder):
    """The encoder of Whisper, an average over pairs of hidden states, and a projector."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, Family.read_encoder(config))
        self.multi_modal_projector = Qwen2AudioProjector(self.sizes.d_model, hidden_size)

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        length = _longest(items) if size is None else self.sizes.num_frames
        features = torch.stack(
            [F.pad(item["features"], (0, length - item["features"].shape[1])) for item in items]
        )
        missing = 0 if size is None else size - len(items)
        num_states = torch.cat([item["num_states"] for item in items])
        return {
            "features": pad_pieces(features, size),
            # Padding counts as one state, because attention without any key gives NaN.
            "num_states": F.pad(num_states, (0, missing), value=1),
        }

    def encode(self, **tensors: Tensor) -> Tensor:
        features, num_states = tensors["features"], tensors["num_states"]
        indices = torch.arange(features.shape[2] // 2, device=features.device)
        mask = indices < num_states[:, None]
        hidden = self.audio_tower.hidden_states(features, mask[:, None, None])
        paired = hidden[:, : hidden.shape[1] // 2 * 2].unflatten(1, (-1, 2)).mean(2)
        return self.multi_modal_projector(self.audio_tower.layer_norm(paired))

    def encode_together(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return _cut(self.run(**self.prepare(items)), _longest(items), items)

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return _cut(embeddings, self.sizes.num_frames, items)


def _longest(items: Sequence[Mapping[str, Tensor]]) -> int:
    """Return the number of frames of the longest sound."""
    return max(item["features"].shape[1] for item in items)


def _cut(
    embeddings: Tensor, num_frames: int, items: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """Remove the padding: return the embeddings of each sound, where all have `num_frames`
    frames.
    """
    padded = embeddings.split(num_frames // 4)
    return [padded[index][: int(item["num_states"]) // 2] for index, item in enumerate(items)]


Encoder = Qwen2AudioEncoder
