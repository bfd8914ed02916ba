"""The encoder of Whisper (Radford et al. 2022, arXiv 2212.04356), for its own decoder."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm.model_executor.media.audio.sound_encoder import SoundEncoder, pad_pieces
from vllm.multimodal.families.whisper import Family

_PREFIX = "encoder."


class WhisperSoundEncoder(SoundEncoder):
    """The encoder of Whisper without a projector."""

    prefixes: ClassVar[tuple[str, ...]] = (_PREFIX,)

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, Family.read_encoder(config))
        self.max_states = self.sizes.max_source_positions

    def parameter_name(self, name: str) -> str | None:
        return "audio_tower." + name.removeprefix(_PREFIX)

    def prepare(
        self, items: Sequence[Mapping[str, Tensor]], size: int | None = None
    ) -> dict[str, Tensor]:
        return {"features": pad_pieces(torch.stack([item["features"] for item in items]), size)}

    def encode(self, **tensors: Tensor) -> Tensor:
        return self.audio_tower(tensors["features"])

    def split(self, embeddings: Tensor, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return list(embeddings.split(self.max_states)[: len(items)])


Encoder = WhisperSoundEncoder
