"""MiMo-V2-Flash: experts like GLM-4.5, and sliding windows with attention sinks in most layers."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import ModelArch
from vllm.distributed import divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.slice import Slice, SlicedModule
from vllm.model_executor.models.decoder import DecoderOptions, LayerSpec
from vllm.model_executor.models.deepseek import DeepseekMixture, RoutedForCausalLM
from vllm.model_executor.models.routed import BalancedLayer
from vllm.ops.attention_options import AttentionOptions


class NarrowValuesAttention(SlicedModule):
    """Attention whose values have fewer features than its keys.

    In the KV cache, values are padded with zeros to the size of keys.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        arch, tp = spec.arch, spec.tp
        self.head_size, self.value_size = arch.head_size, arch.config_size("v_head_dim")
        if self.value_size > self.head_size:
            raise ConfigError(
                f"v_head_dim in config.json must be at most head_dim ({self.head_size}), got "
                f"{self.value_size}. Correct the file"
            )
        if spec.rotary_emb is None:
            raise ConfigError(f"{arch.architecture} needs rope_parameters in config.json")
        self.rotary_emb = spec.rotary_emb
        self.value_scale = arch.config_number("attention_value_scale")
        replicas = max(1, tp.size // arch.num_kv_heads)
        self.qkv_proj = ColumnParallelLinear(
            arch.hidden_size,
            {
                "q_proj": arch.num_heads * self.head_size,
                "k_proj": arch.num_kv_heads * self.head_size,
                "v_proj": arch.num_kv_heads * self.value_size,
            },
            tp,
            num_replicas={"k_proj": replicas, "v_proj": replicas},
            bias=spec.options.qkv_bias,
        )
        self.o_proj = RowParallelLinear(arch.num_heads * self.value_size, arch.hidden_size, tp)
        num_heads = divide(arch.num_heads, tp.size)
        self.register_parameter("sinks", None)
        if spec.window is not None:
            scores = torch.empty(num_heads, dtype=torch.float32)
            self.sinks = nn.Parameter(scores, requires_grad=False)
            self.slices["sinks"] = {"": Slice(0, 0, num_heads, arch.num_heads)}
        self.attn = Attention(
            num_heads,
            self.head_size,
            divide(arch.num_kv_heads * replicas, tp.size),
            AttentionOptions(sliding_window=spec.window),
            sinks=self.sinks,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden_states).split(self.qkv_proj.split_sizes, dim=-1)
        q, k = (x.unflatten(-1, (-1, self.head_size)) for x in (q, k))
        v = v.unflatten(-1, (-1, self.value_size)) * self.value_scale
        q, k = self.rotary_emb(positions, q, k)
        attended = self.attn(q, k, F.pad(v, (0, self.head_size - self.value_size)))
        return self.o_proj(attended[..., : self.value_size].contiguous().flatten(1))


class MiMoV2Layer(BalancedLayer):
    """A layer with its own number of key/value heads, and experts without a shared expert."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return NarrowValuesAttention(spec)

    def make_mixture(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        size = arch.config_size("moe_intermediate_size")
        return DeepseekMixture(arch, self.routing(arch), size, 0, spec.tp)


class MiMoV2FlashForCausalLM(RoutedForCausalLM):
    """MiMo-V2-Flash (Xiaomi 2026). Layers with a sliding window have more key/value heads, and keep
    all tokens in the cache. Layers that predict draft tokens are not loaded.
    """

    layer_type = MiMoV2Layer
    checkpoint_names: ClassVar[Mapping[str, str]] = {".attention_sink_bias": ".sinks"}
    ignored_prefixes: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = arch.config_flag("attention_bias")
        return DecoderOptions(qkv_bias=has_bias)
