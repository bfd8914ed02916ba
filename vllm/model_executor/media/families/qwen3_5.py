"""The vision tower of Qwen 3.5 and 3.6 (Qwen team 2026)."""

from typing import ClassVar

from vllm.model_executor.media.families.qwen3_vl import Qwen3VLEncoder


class Qwen3_5Encoder(Qwen3VLEncoder):
    """The vision tower of Qwen3-VL, but without features of intermediate layers (DeepStack)."""

    has_deep_layers: ClassVar[bool] = False


Encoder = Qwen3_5Encoder
