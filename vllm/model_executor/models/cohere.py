"""Command R and its successors."""

from dataclasses import replace

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    ParallelLayer,
    layer_norm_without_bias,
)
from vllm.model_executor.models.llama import llama_options


class CohereForCausalLM(DecoderForCausalLM):
    """Command R: parallel attention and MLP, rotary pairs of neighbouring elements, scaled
    logits.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        config = arch.hf_config
        options = replace(
            llama_options(arch),
            norm=layer_norm_without_bias,
            is_neox=False,
            has_norm_per_head=bool(config.get("use_qk_norm", False)),
            logit_scale=arch.config_number("logit_scale"),
        )
        super().__init__(arch, tp, options, ParallelLayer)


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and Command A: most layers have a sliding window; the others have no rotary
    positions."""
