"""Convert transformers modules to `nn.Linear` layers, so that each weight can be measured and
rounded.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vllm.transformers_utils.transformers_version import is_version_4


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
                setattr(module, name, _LinearExperts(child.act_fn, _gated_matrices(child)))
            elif type(child).__name__ == "DbrxExperts" and not is_version_4():
                setattr(module, name, _dbrx_experts(child.get_submodule("mlp")))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    num_out, num_in = weight.shape
    linear = nn.Linear(num_in, num_out, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _are_gated_experts(module: nn.Module) -> bool:
    """Return whether a module has weights [N, 2 * I, hidden] for gate and up projections, and [E,
    hidden, I] for down. In LongCat-Flash, the last N - E experts return their inputs.
    """
    weights = dict(module.named_parameters(recurse=False))
    if weights.keys() != {"gate_up_proj", "down_proj"}:
        return False
    gate_up, down = weights["gate_up_proj"].shape, weights["down_proj"].shape
    if not len(gate_up) == len(down) == 3:
        return False
    return gate_up[0] >= down[0] and gate_up[1:] == (2 * down[2], down[1])


def _gated_matrices(experts: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Yield the gate, up and down matrices of each expert."""
    weights = (experts.get_parameter(name).data for name in ("gate_up_proj", "down_proj"))
    for gate_up, down in zip(*weights, strict=False):
        yield *gate_up.chunk(2), down


def _dbrx_experts(mlp: nn.Module) -> nn.Module:
    """Return the experts of DBRX, whose parameters are the matrices of all experts, one after the
    other. As in its checkpoints, the experts are in a module `mlp`.
    """
    size: Any = mlp.ffn_hidden_size
    gates, ups, downs = (mlp.get_parameter(name).data.split(size) for name in ("w1", "v1", "w2"))
    matrices = zip(gates, ups, (down.T for down in downs), strict=True)
    experts = _LinearExperts(mlp.activation_fn, matrices)
    return _InnerExperts(experts)


class _InnerExperts(nn.Module):
    def __init__(self, experts: "_LinearExperts") -> None:
        super().__init__()
        self.mlp = experts

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Any:
        """Run the experts; see `_LinearExperts`."""
        flat = hidden_states.flatten(0, -2)
        return self.mlp(flat, ids, weights).view_as(hidden_states)


class _LinearExperts(nn.Module):
    """Experts that are numbered modules.

    Args:
        act_fn: activation function.
        matrices: gate, up and down matrix of each expert.
    """

    def __init__(self, act_fn: Any, matrices: Iterable[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.act_fn = act_fn
        for number, weights in enumerate(matrices):
            expert = nn.Module()
            for name, weight in zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True):
                expert.add_module(name, _linear(weight))
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the experts.

        Args:
            hidden_states: [T, hidden]
            ids: [T, k] experts that each token uses. An expert without a module returns its input.
            weights: [T, k] weight of each of these experts.

        Returns:
            [T, hidden]
        """
        out = torch.zeros_like(hidden_states)
        experts: list[Any] = [each for each in self.children() if each is not self.act_fn]
        for number in ids.unique().tolist():
            tokens, choices = torch.where(ids == number)
            x = hidden_states[tokens]
            if number < len(experts):
                expert = experts[number]
                x = expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))
            out.index_add_(0, tokens, (x * weights[tokens, choices, None]).to(out.dtype))
        return out
