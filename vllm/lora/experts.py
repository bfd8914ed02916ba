"""Apply LoRA adapters in a mixture of experts; they add to both matmuls of every expert."""

from torch import Tensor

from vllm.attention import ContextHolder
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.ops.lora_weights import AdaptedExperts
from vllm.ops.prepared import ExpertMatmuls, SingleExperts


def can_adapt(layer: Experts) -> bool:
    """Return whether adapters can change the experts of a loaded layer."""
    return layer.method.matmuls(layer) is not None


class ExpertsWithAdapters(ExpertsMethod):
    """Adds LoRA adapters to the matmuls of experts.

    Tokens without such an adapter get the unchanged output. Tokens with one are computed once more,
    expert by expert, because an adapter also adds before the activation. The batch decides which
    tokens and experts are computed.

    Args:
        inner: method of the layer, whose weights are loaded; `can_adapt` must be True.
        adapted: the experts of this rank.
        launch: has the adapters of the running batch.
    """

    def __init__(
        self, inner: ExpertsMethod, adapted: AdaptedExperts, launch: ContextHolder
    ) -> None:
        self.inner = inner
        self.adapted = adapted
        self.launch = launch

    def create_weights(self, layer: Experts) -> None:
        raise AssertionError("create_weights() must be called before LoRA wraps the layer")

    def matmuls(self, layer: Experts) -> ExpertMatmuls | None:
        return self.inner.matmuls(layer)

    def apply(self, layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = self.inner.apply(layer, x, ids, weights)
        adapters = self.launch.adapters
        if adapters is None:
            return y
        matmuls = self.inner.matmuls(layer)
        assert matmuls is not None
        single = SingleExperts(matmuls, layer.options, layer.biases)
        return adapters.adapt_experts(self.adapted, single, x, ids, weights, y)
