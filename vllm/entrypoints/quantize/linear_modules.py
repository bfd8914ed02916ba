"""Convert transformers modules to `nn.Linear` layers, so that each weight can be measured and
rounded.
"""

from typing import Any

import torch
from torch import Tensor, nn


def use_linear_modules(model: nn.Module) -> None:
    """Replace layers with transposed weights (GPT-2), and experts stored in one tensor, by linear
    layers.

    Experts become numbered modules with `gate_proj`, `up_proj` and `down_proj`. Experts that are
    stored differently, or have biases, are not changed.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                weight = child.get_parameter("weight").data.T
                setattr(module, name, _linear(weight, child.get_parameter("bias").data))
            elif _are_gated_experts(child):
                setattr(module, name, _LinearExperts(child))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    num_out, num_in = weight.shape
    linear = nn.Linear(num_in, num_out, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _are_gated_experts(module: nn.Module) -> bool:
    """Return whether a module has weights [E, 2 * I, hidden] for gate and up projections, and [E,
    hidden, I] for down.
    """
    weights = dict(module.named_parameters(recurse=False))
    if weights.keys() != {"gate_up_proj", "down_proj"}:
        return False
    gate_up, down = weights["gate_up_proj"].shape, weights["down_proj"].shape
    return len(gate_up) == len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])


class _LinearExperts(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.act_fn: Any = experts.act_fn
        weights = (experts.get_parameter(name).data for name in ("gate_up_proj", "down_proj"))
        for number, (gate_up, down) in enumerate(zip(*weights, strict=True)):
            expert = nn.Module()
            gate, up = gate_up.chunk(2)
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                expert.add_module(name, _linear(weight))
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the experts.

        Args:
            hidden_states: [T, hidden]
            ids: [T, k] experts that each token uses.
            weights: [T, k] weight of each of these experts.

        Returns:
            [T, hidden]
        """
        out = torch.zeros_like(hidden_states)
        experts: list[Any] = [each for each in self.children() if each is not self.act_fn]
        for number, expert in enumerate(experts):
            tokens, choices = torch.where(ids == number)
            if len(tokens):
                x = hidden_states[tokens]
                x = expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))
                out.index_add_(0, tokens, (x * weights[tokens, choices, None]).to(out.dtype))
        return out
