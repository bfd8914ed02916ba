"""Gemma 1 to 3 (text): GEGLU, scaled embeddings, and norms whose stored weights are minus 1."""

from dataclasses import replace
from typing import ClassVar

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    PrePostNormLayer,
    rms_norm,
)
from vllm.model_executor.models.fused_weights import add_one_to_norms
from vllm.model_executor.models.llama import llama_options
from vllm.ops.attention_options import AttentionOptions


class _Gemma(DecoderForCausalLM):
    def __init__(
        self, arch: ModelArch, tp: TPGroup, layer_type: type[Layer], options: DecoderOptions
    ) -> None:
        super().__init__(arch, tp, options, layer_type)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Add 1 to the stored weight of a norm."""
        return add_one_to_norms(name, source)


class GemmaForCausalLM(_Gemma):
    """Gemma (arXiv 2403.08295)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        options = replace(llama_options(arch), table_scale=arch.hidden_size**0.5)
        super().__init__(arch, tp, DecoderLayer, options)


class Gemma2ForCausalLM(_Gemma):
    """Gemma 2 (arXiv 2408.00118): a sliding window in every second layer, soft caps on scores and
    logits.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, PrePostNormLayer, _options(arch))


class VaultGemmaForCausalLM(_Gemma):
    """VaultGemma 1B (Google 2025, arXiv 2510.15001): Gemma 2 without norms after attention
    and MLP."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".pre_feedforward_layernorm.": ".post_attention_layernorm."
    }

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, DecoderLayer, _options(arch))


class Gemma3ForCausalLM(_Gemma):
    """Gemma 3, text only (arXiv 2503.19786). Five layers with a sliding window alternate with one
    without; each kind has its own rotary parameters. Heads are normed.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, PrePostNormLayer, _options(arch, has_head_norm=True))


def _options(arch: ModelArch, has_head_norm: bool = False) -> DecoderOptions:
    config = arch.hf_config
    scalar = config.get("query_pre_attn_scalar")
    return replace(
        llama_options(arch),
        head_norm=rms_norm if has_head_norm else None,
        attention=AttentionOptions(
            None if scalar is None else float(scalar) ** -0.5,
            logits_soft_cap=config.get("attn_logit_softcapping"),
        ),
        table_scale=arch.hidden_size**0.5,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )
