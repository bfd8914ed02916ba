"""StableLM."""

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    ParallelLayer,
    layer_norm,
)

_HEAD_NORM = re.compile(r"(?P<layer>.*)\.(?P<kind>[qk])_layernorm\.norms\.(?P<head>\d+)\.weight")


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM 3B and 2 (Bellagente et al. 2024, arXiv 2402.17834). A Llama with layer norms, in
    which only a part of each head has rotary positions.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self._head_norms: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        """Name of a weight -> weights of the heads that were read so far."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(
            norm=layer_norm,
            qkv_bias=arch.config_flag("use_qkv_bias"),
            has_norm_per_head=arch.config_flag("qk_layernorm"),
        )

    def make_layer(self, spec: LayerSpec) -> nn.Module:
        is_parallel = spec.arch.config_flag("use_parallel_residual")
        return ParallelLayer(spec) if is_parallel else DecoderLayer(spec)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Join the weights of the norms of heads, which are stored separately for each head."""
        found = _HEAD_NORM.fullmatch(name)
        if found is None:
            return ((name, source),)
        weight = f"{found['layer']}.{found['kind']}_norm.weight"
        num_heads = self.arch.num_heads if found["kind"] == "q" else self.arch.num_kv_heads
        heads = self._head_norms[weight]
        heads[int(found["head"])] = source.read(())
        if len(heads) < num_heads:
            return ()
        del self._head_norms[weight]
        stacked = torch.stack([heads[head] for head in sorted(heads)])
        return (
            (weight, CheckpointTensor(stacked.shape, stacked.__getitem__, dtype=stacked.dtype)),
        )
