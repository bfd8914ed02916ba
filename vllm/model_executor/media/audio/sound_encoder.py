"""The base class of sound encoders built on the encoder of Whisper."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from vllm.model_executor.media.audio.whisper_encoder import WhisperEncoder
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.multimodal.audio.whisper_config import WhisperEncoderConfig


class SoundEncoder(MediaEncoder):
    """Encodes pieces of sound, each on its own, into embeddings of the language model.

    Args:
        config: config.json of the whole model.
        hidden_size: hidden size of the language model's embeddings.
        sizes: sizes of the Whisper encoder.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("audio_tower.", "multi_modal_projector.")
    unit: ClassVar[str] = "pieces of sound"
    reads: ClassVar[str] = "sounds"
    max_at_once: int = 4

    def __init__(
        self, config: Mapping[str, Any], hidden_size: int, sizes: WhisperEncoderConfig
    ) -> None:
        super().__init__(config, hidden_size)
        self.sizes = sizes
        self.audio_tower = WhisperEncoder(sizes)

    def size_of(self, item: Mapping[str, Tensor]) -> int:
        return 1

    def encode_parts(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode pieces a few at a time, since encoding a long sound at once would take
        gigabytes.
        """
        found: list[Tensor] = []
        for first in range(0, len(parts), self.max_at_once):
            found += self.encode_together(parts[first : first + self.max_at_once])
        return found

    def encode_together(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode pieces in one forward pass without padding; return the embeddings [n, width] of
        each.
        """
        return self.split(self.run(**self.prepare(items)), items)

    def run(self, **tensors: Tensor) -> Tensor:
        tensors["features"] = tensors["features"].to(self.dtype)
        return self.encode(**tensors).flatten(0, 1)

    @abstractmethod
    def encode(self, **tensors: Tensor) -> Tensor:
        """Encode pieces of sound: their embeddings [B, n, hidden_size].

        Args:
            tensors: tensors that `prepare` returns; `features` [B, num_mel_bins, F] have the dtype
                of the weights.
        """


def pad_pieces(features: Tensor, size: int | None) -> Tensor:
    """Pad the features [B, num_mel_bins, F] with empty pieces to `size` pieces.

    None: do not pad.
    """
    missing = 0 if size is None else size - features.shape[0]
    assert missing >= 0, f"{features.shape[0]} pieces do not fit {size}"
    return F.pad(features, (0, 0, 0, 0, 0, missing))
