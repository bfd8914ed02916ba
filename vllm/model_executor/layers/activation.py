"""Activation functions by their Hugging Face names."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from vllm.errors import ConfigError
from vllm.ops import get_ops

_gelu_tanh = partial(F.gelu, approximate="tanh")

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The elementwise function of this name.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"activation function {name!r} is not supported; "
            f"supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


class SiluAndMul(nn.Module):
    """silu(gate) * up, the middle of a gated MLP.

    Shape: gate then up, [..., 2 * I] -> [..., I]
    """

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().silu_and_mul(x)
