"""Mistral: Llama without biases, where a query may see only a sliding window of keys."""

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral 7B, Nemo, Small (Jiang et al. 2023, arXiv 2310.06825). The windows are in
    `arch.layer_windows`."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, DecoderOptions())
