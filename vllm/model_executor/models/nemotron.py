"""Nemotron-4 and Minitron: decoders with layer norms and squared ReLU."""

from dataclasses import replace

from vllm.config import ModelArch
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, layer_norm
from vllm.model_executor.models.fused_weights import add_one_to_norms


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 15B and 340B, Minitron 4B and 8B (NVIDIA 2024, arXiv 2402.16819, 2406.11704 and
    2407.14679)."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), norm=layer_norm, is_gated=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Add 1 to the weights of norms, which the checkpoint stores minus 1."""
        return add_one_to_norms(name, source)
