"""Nemotron-4 and Minitron: decoders with layer norms and squared ReLU."""

from dataclasses import replace

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderForCausalLM, layer_norm
from vllm.model_executor.models.fused_weights import add_one_to_norms
from vllm.model_executor.models.llama import llama_options


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 15B and 340B, Minitron 4B and 8B (NVIDIA 2024, arXiv 2402.16819, 2406.11704 and
    2407.14679)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        options = replace(llama_options(arch), norm=layer_norm, is_gated=False)
        super().__init__(arch, tp, options)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Add 1 to the weights of norms, which the checkpoint stores minus 1."""
        return add_one_to_norms(name, source)
