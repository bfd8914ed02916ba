"""Activation functions by their names in Hugging Face configs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.errors import ConfigError
from vllm.ops import get_ops


def _gelu(x: Tensor) -> Tensor:
    return get_ops().gelu(x, False)


def _gelu_tanh(x: Tensor) -> Tensor:
    return get_ops().gelu(x, True)


def _quick_gelu(x: Tensor) -> Tensor:
    return get_ops().quick_gelu(x)


def _squared_relu(x: Tensor) -> Tensor:
    return get_ops().squared_relu(x)


class XIELU(nn.Module):
    """The activation xIELU (Huang and Schlag 2024, arXiv 2411.13010), with learned parameters.

    Shape: [...] -> [...]
    """

    alpha_p: nn.Parameter
    """[1]"""
    alpha_n: nn.Parameter
    """[1]"""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().xielu(x, self.alpha_p, self.alpha_n)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
    "silu": F.silu,
    "swish": F.silu,
}
_LEARNED: dict[str, type[nn.Module]] = {"xielu": XIELU}
"""Activations with parameters in each layer."""


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function with this Hugging Face name; a module if it has parameters.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    if name in _LEARNED:
        return _LEARNED[name]()
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"activation function {name!r} is not supported; supported: "
            f"{', '.join((*_ACTIVATIONS, *_LEARNED))}"
        )
    return _ACTIVATIONS[name]


def get_gated_activation(name: str) -> nn.Module:
    """Return the module that computes `act(gate) * up` for the activation with this name.

    Raises:
        ConfigError: no gated MLP has it; the message lists the known ones.
    """
    if name not in _GATED:
        raise ConfigError(
            f"hidden_act {name!r} is not supported in a gated MLP; supported: {', '.join(_GATED)}"
        )
    return _GATED[name]()


class SiluAndMul(nn.Module):
    """Compute silu(gate) * up, the activation of a gated MLP.

    Shape: gate then up, [..., 2 * I] -> [..., I]
    """

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().silu_and_mul(x)


class GeluAndMul(nn.Module):
    """Compute gelu(gate) * up (GEGLU, Shazeer 2020, arXiv 2002.05202).

    Args:
        is_tanh: use the tanh approximation of gelu.

    Shape: gate then up, [..., 2 * I] -> [..., I]
    """

    def __init__(self, is_tanh: bool = False) -> None:
        super().__init__()
        self.is_tanh = is_tanh

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().gelu_and_mul(x, self.is_tanh)


_GATED: dict[str, Callable[[], nn.Module]] = {
    "silu": SiluAndMul,
    "swish": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_fast": partial(GeluAndMul, is_tanh=True),
    "gelu_new": partial(GeluAndMul, is_tanh=True),
    "gelu_pytorch_tanh": partial(GeluAndMul, is_tanh=True),
}
