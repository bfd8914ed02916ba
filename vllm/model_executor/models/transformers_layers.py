"""Replaces layers of transformers by this package's, split over ranks by the plan of transformers.

A config class of transformers says which linear layers can be split over ranks
(`base_model_tp_plan`): by columns, by rows, or not at all. Layers that the plan does not name are
not split.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import ModelArch
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    whole_linear,
)

_COLUMNS, _ROWS, _WHOLE = "columns", "rows", "whole"
_KINDS = {
    **dict.fromkeys(("colwise", "local_colwise"), _COLUMNS),
    **dict.fromkeys(("rowwise", "local_rowwise"), _ROWS),
    # These styles gather the output or split a whole input, so a whole layer on every rank gives
    # the same values.
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), _WHOLE),
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input", "replicated"), _WHOLE),
}
"""Style of transformers -> how our layer is split."""


class ParallelPlan:
    """The tensor-parallel plan of a transformers decoder: which linear layers are split over ranks.

    Args:
        config: config of transformers.
        tp: the ranks.

    Raises:
        ConfigError: there are several ranks, and transformers has no plan for the model.
    """

    def __init__(self, config: Any, tp: TPGroup) -> None:
        self.tp = tp
        plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
        if tp.size > 1 and not plan:
            raise ConfigError(
                f"it cannot be split over {tp.size} ranks, because transformers has no plan for "
                "that (base_model_tp_plan). Set tensor_parallel_size=1"
            )
        self._styles = [
            (re.compile(re.escape(path).replace(r"\*", r"\d+")), style)
            for path, style in (plan or {}).items()
        ]

    def kind(self, path: str) -> str:
        """Return how the linear layer with this path in the decoder is split.

        Raises:
            ConfigError: the plan has an unknown kind of split.
        """
        style = next((style for each, style in self._styles if each.fullmatch(path)), "replicated")
        if self.tp.size == 1:
            return _WHOLE
        if style not in _KINDS:
            raise ConfigError(
                f"it cannot be split over {self.tp.size} ranks, because its plan splits {path} in "
                f"the unsupported way {style!r}. Set tensor_parallel_size=1"
            )
        return _KINDS[style]

    def has(self, path: str) -> bool:
        """Return whether the plan names the module with this path."""
        return any(each.fullmatch(path) for each, _ in self._styles)

    def heads_of(self, path: str, module: nn.Module, arch: ModelArch) -> tuple[int, int]:
        """Return how many query heads, and key and value heads, of an attention module this rank
        has.
        """
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        if not any(self.kind(f"{path}.{name}") == _COLUMNS for name in linear):
            return arch.num_heads, arch.num_kv_heads
        return divide(arch.num_heads, self.tp.size), max(1, arch.num_kv_heads // self.tp.size)


def replace_linear_layers(decoder: nn.Module, plan: ParallelPlan, arch: ModelArch) -> None:
    """Replace linear layers of the decoder by ours, which support quantization and splitting.

    Raises:
        ConfigError: a layer cannot be split.
    """
    attending = {id(m): m for m in decoder.modules() if hasattr(m, "vllm_attention")}
    for path, layer in list(decoder.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, name = path.rpartition(".")
            holder = decoder.get_submodule(parent)
            attention: Attention | None = getattr(attending.get(id(holder)), "vllm_attention", None)
            try:
                ours = _linear(layer, plan.kind(path), plan.tp, attention, arch)
            except ValueError as error:
                raise ConfigError(
                    f"its layer {path}: {error}. Choose another tensor_parallel_size"
                ) from error
            setattr(holder, name, ours)


def _linear(
    layer: nn.Linear, kind: str, tp: TPGroup, attention: Attention | None, arch: ModelArch
) -> ParallelLinear:
    sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
    if kind == _WHOLE:
        return whole_linear(*sizes, tp, bias)
    if kind == _ROWS:
        return RowParallelLinear(*sizes, tp, bias)
    replicas = 1
    if attention is not None and arch.num_kv_heads < tp.size:
        is_of_keys = layer.out_features == arch.num_kv_heads * attention.head_size
        replicas = divide(tp.size, arch.num_kv_heads) if is_of_keys else 1
    return ColumnParallelLinear(sizes[0], {"": sizes[1]}, tp, {"": replicas}, bias)


def replace_experts(decoder: nn.Module, plan: ParallelPlan) -> None:
    """Replace experts by ours, which are packed and compute all experts of a batch in one call.

    Other modules of the layer are not changed, and are not split over ranks.
    """
    for path, module in list(decoder.named_modules()):
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
            continue
        experts, hidden, size = down.shape
        is_plain = gate_up.shape == (experts, 2 * size, hidden) and path.endswith(".experts")
        has_silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        if is_plain and has_silu and len(list(module.parameters())) == 2:
            parent, _, name = path.rpartition(".")
            tp = plan.tp if plan.has(path) else TPGroup()
            ours = ExpertsOfTransformers(experts, hidden, size, tp)
            setattr(decoder.get_submodule(parent), name, ours)


class ExpertsOfTransformers(Experts):
    """Experts that accept the arguments with which modules of transformers call them."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts; the weights may have any dtype."""
        return super().forward(x, ids.contiguous(), weights.float().contiguous())
