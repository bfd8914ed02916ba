"""Cross-attention: tokens read the hidden states of the images, sounds or videos of their requests.

The keys and values of an item are computed once, after the item has been encoded. They are kept in
a pool of the layer while requests need them. Independent of requests and model families.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.context import ContextHolder, ReadsContext
from vllm.distributed import TPGroup, divide
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.ops.attention_options import AttentionOptions

HeadNorm = Callable[[], nn.Module]
"""Makes the norm of a head."""


class CrossAttention(nn.Module, ReadsContext):
    """Cross-attention of text tokens to media items, with its projections.

    It uses no rotary embedding; the only mask is which items a token may see.

    Its parameters are `q_proj`, `k_proj`, `v_proj` and `o_proj`.

    Args:
        hidden_size: hidden size of the decoder.
        num_heads: query heads over all ranks.
        num_kv_heads: key and value heads over all ranks.
        head_size: D.
        tp: the ranks that share the layer.
        state_size: size of the encoder's hidden states; None: hidden_size.
        head_norm: norm of each query and key head; None: no norm.
        qvo_bias: whether queries, values and outputs have biases; keys have none.

    Shape: hidden_states [T, hidden] -> [T, hidden]
    """

    pool_names: ClassVar[tuple[str, ...]] = ("item_keys", "item_values")
    """Attributes that are no weights."""
    item_keys: Tensor | None
    """[slots, G, D] of the items; None until the worker has bound it."""
    item_values: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        tp: TPGroup,
        *,
        state_size: int | None = None,
        head_norm: HeadNorm | None = None,
        qvo_bias: bool = False,
    ) -> None:
        super().__init__()
        self.launch = ContextHolder()
        self.head_size = head_size
        replicas = max(1, tp.size // num_kv_heads)
        self.num_kv_heads = divide(num_kv_heads * replicas, tp.size)
        """Heads of keys and values on this rank."""
        q_size, kv_size = num_heads * head_size, num_kv_heads * head_size
        self.state_size = hidden_size if state_size is None else state_size
        of_states = (self.state_size, {"": kv_size}, tp, {"": replicas})
        self.q_proj = ColumnParallelLinear(hidden_size, {"": q_size}, tp, bias=qvo_bias)
        self.k_proj = ColumnParallelLinear(*of_states)
        self.v_proj = ColumnParallelLinear(*of_states, bias=qvo_bias)
        self.k_proj.is_of_items = self.v_proj.is_of_items = True
        self.o_proj = RowParallelLinear(q_size, hidden_size, tp, bias=qvo_bias)
        self.q_norm = None if head_norm is None else head_norm()
        self.k_norm = None if head_norm is None else head_norm()
        self.item_options = AttentionOptions()
        self.item_keys = self.item_values = None

    @property
    def is_read(self) -> bool:
        """Whether any token of the batch may see an item. If False, the layer adds nothing."""
        context = self.launch.context
        return context is not None and context.items is not None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the attention output; tokens that see no item get zeros, plus the output bias if
        any.
        """
        context = self.launch.context
        assert context is not None and context.items is not None
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_size))
        if self.q_norm is not None:
            query = self.q_norm(query)
        return self.o_proj(context.items.attend_to_items(self, query).flatten(1))

    def clear_unseeing(self, x: Tensor) -> Tensor:
        """Return x [T, ...] with zeros for tokens that see no item."""
        context = self.launch.context
        assert context is not None and context.items is not None
        return context.items.clear_unseeing(x)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [n, G, D] each, of the hidden states [n, state_size] of an
        item."""
        key, value = (
            proj(states).unflatten(-1, (-1, self.head_size)) for proj in (self.k_proj, self.v_proj)
        )
        return (key if self.k_norm is None else self.k_norm(key)), value

    def bind_pool(self, keys: Tensor, values: Tensor) -> None:
        """Use these tensors [slots, G, D] as the pool of item keys and values."""
        self.item_keys, self.item_values = keys, values

    def release_pool(self) -> None:
        """Drop the tensors of the pool, until `bind_pool` sets others."""
        self.item_keys = self.item_values = None

    @property
    def pool_tensors(self) -> list[Tensor]:
        """Return the key and value tensors of the pool; empty before the worker has bound them."""
        pool = (self.item_keys, self.item_values)
        return [tensor for tensor in pool if tensor is not None]

    def store(self, states: Tensor, slots: Tensor) -> None:
        """Compute keys and values from an item's hidden states [n, state_size], and store them in
        slots [n].
        """
        assert self.item_keys is not None and self.item_values is not None
        keys, values = self.keys_values(states)
        self.item_keys.index_copy_(0, slots.long(), keys)
        self.item_values.index_copy_(0, slots.long(), values)


def cross_attention_layers(model: nn.Module) -> list[CrossAttention]:
    """Return the cross-attention layers of a model, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, CrossAttention)]


def slot_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes that one hidden state of an item takes in the pools of all layers."""
    layers = cross_attention_layers(model)
    return sum(2 * layer.num_kv_heads * layer.head_size * dtype.itemsize for layer in layers)
