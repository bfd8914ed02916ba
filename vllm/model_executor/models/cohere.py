"""Command R and its successors."""

from dataclasses import replace

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    ParallelLayer,
    layer_norm_without_bias,
)


class CohereForCausalLM(DecoderForCausalLM):
    """Command R: parallel attention and MLP, rotary pairs of neighbouring elements, scaled
    logits.
    """

    layer_type = ParallelLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(
            super().options(arch),
            norm=layer_norm_without_bias,
            is_neox=False,
            has_norm_per_head=arch.config_flag("use_qk_norm"),
            logit_scale=arch.config_number("logit_scale"),
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and Command A: most layers have a sliding window; the others have no rotary
    positions."""
