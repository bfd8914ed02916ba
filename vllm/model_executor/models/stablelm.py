"""StableLM."""

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    ParallelLayer,
    layer_norm,
)


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM 3B and 2 (Bellagente et al. 2024, arXiv 2402.17834): a Llama with layer norms, which
    rotates part of each head."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        config = arch.hf_config
        if config.get("qk_layernorm"):
            raise ConfigError("qk_layernorm is not supported for StableLmForCausalLM")
        is_parallel = config.get("use_parallel_residual", False)
        layer: type[Layer] = ParallelLayer if is_parallel else DecoderLayer
        options = DecoderOptions(norm=layer_norm, qkv_bias=bool(config.get("use_qkv_bias", False)))
        super().__init__(arch, tp, options, layer)
