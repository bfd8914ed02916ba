"""The encoder of Whisper (Radford et al.
2022, arXiv 2212.04356). Qwen2-Audio and Voxtral use it as well.

Shapes: B pieces of sound, F frames of each, N = F / 2 hidden states of size C.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.media.layer_stack import LayerStack
from vllm.model_executor.media.vision.layers import PositionTable, TowerAttention, TowerLinear
from vllm.multimodal.audio.whisper_config import WhisperEncoderConfig

_KERNEL_SIZE = 3
_FLOAT16_LIMIT = torch.finfo(torch.float16).max - 1000


class TimeConvolution(nn.Module):
    """A convolution over three neighbouring frames, computed as one matmul.

    Args:
        input_size: values of a frame.
        output_size: values of the result.
        stride: frames from one result to the next.

    Shape: [B, T, input_size] -> [B, T / stride, output_size]; the input is padded with zeros.
    """

    weight: nn.Parameter
    """[output_size, input_size, 3], as checkpoints have it."""
    bias: nn.Parameter
    """[output_size]"""

    def __init__(self, input_size: int, output_size: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        weight = torch.empty(output_size, input_size, _KERNEL_SIZE)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        padded = F.pad(x, (0, 0, 1, 1))
        shifted = [padded[:, k : k + length : self.stride] for k in range(_KERNEL_SIZE)]
        return F.linear(torch.stack(shifted, -1).flatten(2), self.weight.flatten(1), self.bias)


class WhisperEncoderLayer(nn.Module):
    """One pre-norm transformer layer.

    Shape: [B, N, C] -> [B, N, C]
    """

    activation: Callable[[Tensor], Tensor]

    def __init__(self, config: WhisperEncoderConfig) -> None:
        super().__init__()
        size = config.d_model
        self.self_attn = TowerAttention(size, config.encoder_attention_heads, has_key_bias=False)
        self.self_attn_layer_norm = LayerNorm(size)
        self.activation = get_activation(config.activation_function)
        self.fc1 = TowerLinear(size, config.encoder_ffn_dim)
        self.fc2 = TowerLinear(config.encoder_ffn_dim, size)
        self.final_layer_norm = LayerNorm(size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        x = x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))
        if x.dtype == torch.float16:  # with published weights, sums exceed the range of float16
            x = x.clamp(-_FLOAT16_LIMIT, _FLOAT16_LIMIT)
        return x


class WhisperEncoder(nn.Module):
    """Encodes log-mel features to hidden states. Parameters are named as in checkpoints.

    Args:
        config: sizes of the encoder.
    """

    def __init__(self, config: WhisperEncoderConfig) -> None:
        super().__init__()
        size = config.d_model
        self.conv1 = TimeConvolution(config.num_mel_bins, size)
        self.conv2 = TimeConvolution(size, size, stride=2)
        self.activation = get_activation("gelu")
        self.embed_positions = PositionTable(config.max_source_positions, size)
        self.layers = LayerStack(WhisperEncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = LayerNorm(size)
        for module in self.layers.modules():
            if isinstance(module, TowerLinear):
                module.keeps_precision = False

    def hidden_states(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, N, C] after the last layer, before the final norm.

        Args:
            features: [B, num_mel_bins, F], F at most 2 * max_source_positions.
            mask: bool, broadcasts to [B, heads, N, N]: which hidden states each one attends to, at
                least one. None: all.
        """
        x = self.activation(self.conv1(features.transpose(1, 2)))
        x = self.activation(self.conv2(x))
        x = x + self.embed_positions.weight[: x.shape[1]]
        return self.layers.run(x, (len(self.layers),), mask)[len(self.layers)]

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, N, C] after the final norm.

        For the arguments see `hidden_states`.
        """
        return self.layer_norm(self.hidden_states(features, mask))
