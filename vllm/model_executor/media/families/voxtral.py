"""The encoder of Voxtral (Liu et al. 2025, arXiv 2507.13264)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.media.audio.sound_encoder import SoundEncoder, pad_pieces
from vllm.model_executor.media.families.llava import LlavaProjector
from vllm.multimodal.families.voxtral import Family, joined_states


class VoxtralEncoder(SoundEncoder):
    """The encoder of Whisper, and a projector of joined neighbouring hidden states."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, Family.read_encoder(config))
        self.joined = joined_states(self.sizes)
        self.multi_modal_projector = LlavaProjector(
            {"multimodal_projector_bias": False, **config},
            self.joined * self.sizes.d_model,
            hidden_size,
        )

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        return [{"features": piece[None]} for piece in item["features"]]

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        return {"features": pad_pieces(torch.cat([item["features"] for item in items]), size)}

    def encode(self, **tensors: Tensor) -> Tensor:
        hidden = self.audio_tower(tensors["features"])
        return self.multi_modal_projector(hidden.unflatten(1, (-1, self.joined)).flatten(2))

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return list(embeddings.split(self.sizes.max_source_positions // self.joined)[: len(items)])


Encoder = VoxtralEncoder
