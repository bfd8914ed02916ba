"""The absorbed projection from latent vectors to the keys and values of all heads (MLA).

DeepSeek-AI 2024 (arXiv 2405.04434, section 2.1.2): a score is q . (U c) = (U^T q) . c. So the query
is projected down to the latent space, instead of every key up. The attention output, still a latent
vector, is projected up to values afterwards.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.context import ContextHolder, ReadsContext
from vllm.distributed import TPGroup
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearMethod, ParallelLinear
from vllm.ops import get_ops
from vllm.ops.lora_weights import LoRAHeads
from vllm.ops.prepared import PreparedHeads


class LatentUpProjection(ColumnParallelLinear, ReadsContext):
    """The layer `kv_b_proj`: for each head the weights of its key, then the weights of its value.

    While weights are loaded it is an ordinary linear layer in the format of the checkpoint. When
    they are complete it becomes two batches of matrices in the model's dtype, one matrix for each
    head, in the layout of the device.

    H heads of this rank, N key size, M value size, V latent size.

    Args:
        latent_size: V.
        num_heads: over all ranks.
        key_size: N, without the rotated part.
        value_size: M.
        tp: the ranks that share the heads.
    """

    key_up: PreparedHeads
    """[N, V] of each head, once the layer is finished."""
    value_up: PreparedHeads
    """[V, M] of each head, once the layer is finished."""
    adapted: tuple[LoRAHeads, LoRAHeads] | None = None
    """Layers of LoRA adapters that may add to both matmuls; None: none."""

    def __init__(
        self, latent_size: int, num_heads: int, key_size: int, value_size: int, tp: TPGroup
    ) -> None:
        super().__init__(latent_size, {"": num_heads * (key_size + value_size)}, tp)
        self.launch = ContextHolder()
        self.head_sizes = (key_size, value_size)
        self._dtype = torch.get_default_dtype()

    def finish(self) -> None:
        device = next(self.parameters()).device
        dense = self.method.dense_weight(self, self._dtype).to(device, self._dtype)
        weight = dense.unflatten(0, (-1, sum(self.head_sizes)))
        key_up, value_up = weight.split(self.head_sizes, dim=1)
        for name in [*self._parameters, *self._buffers, *self._modules]:
            if name != "bias":  # all parameters that the weight format has created
                delattr(self, name)
        self.use_method(_Halves())
        self.key_up = get_ops().prepare_heads(key_up)
        self.value_up = get_ops().prepare_heads(value_up.mT)

    def absorb(self, query: Tensor, rotated: Tensor) -> Tensor:
        """Project queries [T, H, N] to latents, and append their rotated parts: [T, H, V + R]."""
        return self._adapt(0, query, self.key_up.multiply(query, rotated))

    def expand(self, attended: Tensor) -> Tensor:
        """Project the attention output from the latent space [T, H, V] to values [T, H, M]."""
        return self._adapt(1, attended, self.value_up.multiply(attended))

    def _adapt(self, which: int, x: Tensor, y: Tensor) -> Tensor:
        context = self.launch.context
        if self.adapted is None or context is None or context.adapters is None:
            return y
        return context.adapters.adapt_heads(self.adapted[which], x, y)


class _Halves(LinearMethod):
    """The weights of a `LatentUpProjection` after loading: one matrix per head, for keys and
    values.
    """

    def create_weights(self, layer: ParallelLinear) -> None:
        pass

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        assert isinstance(layer, LatentUpProjection)
        weight = torch.cat((layer.key_up.dense(), layer.value_up.dense().mT), dim=1)
        return F.linear(x, weight.flatten(0, 1), bias)
