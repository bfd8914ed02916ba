"""Baichuan 1 and 2."""

from typing import ClassVar

import torch.nn.functional as F

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions
from vllm.model_executor.models.fused_weights import FusedLayers, qkv_parts

_VOCAB_SIZE_OF_1 = 64000


class BaichuanForCausalLM(DecoderForCausalLM):
    """Baichuan 1 and 2 (Yang et al. 2023, arXiv 2309.10305): a Llama. The 13B models have ALiBi
    instead of rotary positions. The rows of the output head of Baichuan 2 are normalized to length
    1.
    """

    checkpoint_names: ClassVar[dict[str, str]] = {".W_pack.": ".qkv_proj."}
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.has_normed_head = arch.vocab_size != _VOCAB_SIZE_OF_1

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(alibi_scale=1.0 if arch.rope is None else 0.0)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Normalize the rows of Baichuan 2's output head."""
        if name == "lm_head.weight" and self.has_normed_head:
            return ((name, source.mapped(F.normalize)),)
        return super().convert(name, source)
