"""Compute ragged attention through the operator table: any device, no padding.

The operator table chooses the implementation: torch, or the C++ kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.metadata import AttentionLayer
from vllm.messages import IntArray
from vllm.ops import get_ops
from vllm.ops.attention_options import AttentionTensors
from vllm.ops.native.attention import attend_prompt


@dataclass(frozen=True)
class RaggedMetadata:
    """Metadata of a ragged batch of B requests and T tokens: decodes first, then prefills.

    B_d requests are decodes, with one token each: requests 0 to B_d - 1 and tokens 0 to B_d - 1.
    """

    num_decodes: int
    """B_d, the number of decodes."""
    slot_mapping: Tensor
    """[T] int64 on the device: where each token's key and value go, block_id * S + offset."""
    block_tables: Tensor
    """[B, max_blocks] int32 on the device."""
    seq_lens: Tensor
    """[B] int32 on the device: tokens of the request, this launch's included."""
    query_start_loc: IntArray
    """[B + 1] on the host: the tokens of request b are query_start_loc[b] up to [b + 1]."""
    host_seq_lens: IntArray
    """[B] `seq_lens` on the host."""
    last_keys: IntArray | None = None
    """[T] on the host: the last key that each token sees, as an index in its request; None: its
    own."""
    more_groups: tuple[tuple[Tensor, Tensor], ...] = ()
    """`slot_mapping` and `block_tables` of each further group of layers."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        stores: bool = True,
    ) -> Tensor:
        """Compute attention with the operators of the table."""
        assert layer.key_cache is not None and layer.value_cache is not None
        ops, num_decodes = get_ops(), self.num_decodes
        key_cache, value_cache = layer.key_cache, layer.value_cache
        scales = (layer.key_scales, layer.value_scales)
        value_target = None if isinstance(value_cache, int) else value_cache
        if isinstance(value_cache, int):
            value_cache, scales = key_cache[..., :value_cache], (layer.key_scales, layer.key_scales)
        options = (layer.options, AttentionTensors(layer.alibi_slopes, layer.sinks, *scales))
        # All writes come before all reads, so a request may read blocks that another request of the
        # same launch writes.
        slot_mapping, block_tables = self.slot_mapping, self.block_tables
        if layer.cache_group:
            slot_mapping, block_tables = self.more_groups[layer.cache_group - 1]
        if stores:
            ops.reshape_and_cache(key, value, key_cache, value_target, slot_mapping, *scales)
        outputs = []
        if num_decodes:
            outputs.append(
                ops.paged_attention_decode(
                    query[:num_decodes],
                    key_cache,
                    value_cache,
                    block_tables[:num_decodes],
                    self.seq_lens[:num_decodes],
                    *options,
                )
            )
        if len(self.host_seq_lens) > num_decodes:
            last_keys = None if self.last_keys is None else self.last_keys[num_decodes:]
            outputs.append(
                ops.paged_attention_prefill(
                    query[num_decodes:],
                    key_cache,
                    value_cache,
                    block_tables[num_decodes:],
                    self.query_start_loc[num_decodes:] - num_decodes,
                    self.host_seq_lens[num_decodes:],
                    *options,
                    last_keys,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def prompt_attention(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor | None
) -> Tensor:
    """Compute causal attention within one prompt, without a cache.

    Args:
        layer: layer with the options; its caches are not used.
        query: [T, H, D].
        key: [T, G, D].
        value: [T, G, D]; None if values are a part of the keys.

    Returns:
        [T, H, D], or [T, H, V] if values are the first V elements of the keys.
    """
    if value is None:
        assert isinstance(layer.value_cache, int)
        value = key[..., : layer.value_cache]
    attended = attend_prompt(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        layer.options,
        AttentionTensors(layer.alibi_slopes, layer.sinks),
    )
    return attended[0].transpose(0, 1)
