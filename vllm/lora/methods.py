"""Add adapters to linear layers and output heads, by wrapping the layers' own methods.

Hu et al. 2021 (arXiv 2106.09685): y += x @ A.T @ B.T. The batch decides how the matmuls are
computed (`LaunchAdapters`).
"""

from torch import Tensor

from vllm.attention import ContextHolder
from vllm.model_executor.layers.embedding import EmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.ops.lora_weights import AdaptedLayer


class LoRALinearMethod(LinearMethod):
    """A linear method that adds the contribution of LoRA adapters.

    Args:
        inner: method of the layer, whose weights are loaded.
        adapted: index of the layer among the layers of the model.
        launch: has the adapters of the running batch.
    """

    def __init__(self, inner: LinearMethod, adapted: AdaptedLayer, launch: ContextHolder) -> None:
        self.inner = inner
        self.adapted = adapted
        self.launch = launch

    def create_weights(self, layer: ParallelLinear) -> None:
        raise AssertionError("create_weights() must be called before LoRA wraps the layer")

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.inner.apply(layer, x, bias)
        adapters = self.launch.adapters
        if adapters is None:
            return y
        if x.dim() == 2:
            return adapters.adapt(self.adapted, x, y)
        rows = adapters.adapt(self.adapted, x.flatten(0, -2), y.flatten(0, -2))
        return rows.view(y.shape)


class HeadWithAdapters(EmbeddingMethod):
    """An output head that adds the contribution of LoRA adapters.

    Args:
        inner: method of the head, whose weights are loaded.
        adapted: index of the head among the layers of the model.
        launch: has the adapters of the hidden states.
    """

    def __init__(
        self, inner: EmbeddingMethod, adapted: AdaptedLayer, launch: ContextHolder
    ) -> None:
        self.inner = inner
        self.adapted = adapted
        self.launch = launch

    def create_weights(self, layer: VocabParallelEmbedding) -> None:
        raise AssertionError("create_weights() must be called before LoRA wraps the layer")

    def embed(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        return self.inner.embed(layer, ids)

    def multiply(self, layer: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        logits = self.inner.multiply(layer, hidden_states)
        adapters = self.launch.adapters
        return logits if adapters is None else adapters.adapt(self.adapted, hidden_states, logits)
