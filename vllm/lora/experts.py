"""LoRA adapters in a mixture of experts: what each adds to both products of every expert."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention import ContextHolder
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.ops import get_ops
from vllm.ops.expert_options import SILU_EXPERTS
from vllm.ops.low_rank import AdaptedLayer
from vllm.ops.prepared import ExpertProducts


@dataclass(frozen=True)
class ExpertPlace:
    """One expert among the layers that adapters can change."""

    gate_up: AdaptedLayer
    down: AdaptedLayer


def can_adapt(layer: Experts) -> bool:
    """Whether adapters can change the experts of a loaded layer."""
    is_plain = layer.options == SILU_EXPERTS and layer.gate_up_bias is None
    return is_plain and layer.method.products(layer) is not None


class ExpertsWithAdapters(ExpertsMethod):
    """Experts whose products are added to for tokens with an adapter of experts.

    Other tokens get what the experts compute without adapters. Those with one are computed once
    more, expert by expert, because an adapter adds before the activation, too.

    Args:
        inner: of the layer, its weights loaded; `can_adapt` says that it is possible.
        places: of the experts of this rank.
        launch: has the adapters of the launch.
    """

    def __init__(
        self, inner: ExpertsMethod, places: Sequence[ExpertPlace], launch: ContextHolder
    ) -> None:
        self.inner = inner
        self.places = places
        self.launch = launch

    def create_weights(self, layer: Experts) -> None:
        raise AssertionError("adapters come after the weights")

    def products(self, layer: Experts) -> ExpertProducts | None:
        return self.inner.products(layer)

    def apply(self, layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = self.inner.apply(layer, x, ids, weights)
        context = self.launch.context
        if context is None or context.adapters is None:
            return y
        chosen = context.adapters.expert_tokens()
        if chosen is None:
            return y
        adapters = context.adapters.select(chosen)
        x, ids, weights = x[chosen], ids[chosen], weights[chosen]
        products = self.inner.products(layer)
        assert products is not None
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, (expert, place) in enumerate(zip(layer.expert_ids, self.places, strict=True)):
            tokens, choices = (ids == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            given, own = x[tokens], adapters.select(tokens)
            gate_up = products.multiply_gate_up(number, given)
            middle = get_ops().silu_and_mul(own.adapt(place.gate_up, given, gate_up))
            result = own.adapt(place.down, middle, products.multiply_down(number, middle))
            total.index_add_(0, tokens, result.float() * weights[tokens, choices, None])
        y[chosen] = total.to(y.dtype)
        return y
