"""A model as the device runs it: packed input of one bucket in, logits out.

Everything between the one copy to the device and the logits happens in here, on the device, with
shapes that depend on the bucket alone. So this is what a graph captures and what is compiled.
"""

import torch
from torch import Tensor, nn

from vllm.attention import Attention, AttentionMetadata, LaunchContext, share_context
from vllm.attention.backends.flat_pa import Normaliser
from vllm.attention.backends.padded import (
    MergedPrefill,
    PaddedDecode,
    PaddedPrefill,
    layer_kinds,
)
from vllm.attention.backends.sdpa import SDPAKernel
from vllm.bucketing import Phase
from vllm.model_executor.models.interface import CausalLM
from vllm.worker.hpu.input import unpack_decode, unpack_merged, unpack_prefill
from vllm.worker.hpu.planner import LaunchShape


class HPUModel(nn.Module):
    """A causal language model over padded launches.

    Args:
        model: on the device; its attention layers have their caches when a launch runs.
        last_token_ids: [rows + 1] int32 on the device: the newest token of each row, if it was
            sampled there. The last entry is for padding.
        block_size: tokens per KV block.
        kernel: attention of prompts.
        normaliser: of the softmax of decodes, see `flat_paged_attention`.

    Raises:
        ConfigError: a layer asks for what no launch has.

    Shape: packed input of a launch -> (logits [B, V], of a decode [B * Q, V]; hidden states
    [B * Q, hidden])
    """

    def __init__(
        self,
        model: CausalLM,
        last_token_ids: Tensor,
        block_size: int,
        kernel: SDPAKernel,
        normaliser: Normaliser | float | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.launch_holder = share_context(model)
        self.last_token_ids = last_token_ids
        self._block_size = block_size
        self._kernel = kernel
        self._normaliser = normaliser
        self._kinds = layer_kinds(m for m in model.modules() if isinstance(m, Attention))
        self._dtype = next(model.parameters()).dtype

    def forward(self, packed: Tensor, shape: LaunchShape) -> tuple[Tensor, Tensor]:
        if shape.bucket.phase is Phase.DECODE:
            return self._decode(packed, shape)
        if shape.merged_prompts:
            return self._merged_prefill(packed, shape)
        return self._prefill(packed, shape)

    def _decode(self, packed: Tensor, shape: LaunchShape) -> tuple[Tensor, Tensor]:
        given = unpack_decode(packed, shape)
        query_len, positions = shape.bucket.query_len, None
        resident = self.last_token_ids.index_select(0, given.rows)
        if query_len > 1:
            positions = given.positions.unflatten(0, (-1, query_len))
            resident = resident.unsqueeze(-1).expand(positions.shape).flatten()
        token_ids = torch.where(given.token_ids < 0, resident, given.token_ids)
        attention = PaddedDecode.derive(
            given.metadata,
            self._kinds,
            self._block_size,
            self._dtype,
            self._normaliser,
            positions,
        )
        hidden_states = self._run(attention, token_ids, given.positions)
        return self.model.compute_logits(hidden_states), hidden_states

    def _prefill(self, packed: Tensor, shape: LaunchShape) -> tuple[Tensor, Tensor]:
        given = unpack_prefill(packed, shape)
        attention = PaddedPrefill.derive(
            given.metadata, self._kinds, self._block_size, self._kernel
        )
        hidden_states = self._run(attention, given.token_ids, given.positions)
        last = hidden_states.index_select(0, given.last_tokens)
        return self.model.compute_logits(last), hidden_states

    def _merged_prefill(self, packed: Tensor, shape: LaunchShape) -> tuple[Tensor, Tensor]:
        given = unpack_merged(packed, shape)
        metadata = given.metadata
        attention = MergedPrefill.derive(metadata, self._kinds, self._block_size, self._kernel)
        hidden_states = self._run(attention, given.token_ids, metadata.positions)
        last = hidden_states.index_select(0, metadata.last_token_indices)
        return self.model.compute_logits(last), hidden_states

    def _run(self, attention: AttentionMetadata, token_ids: Tensor, positions: Tensor) -> Tensor:
        # No `with`: not every compiler traces one. Should this raise, `Execution.run` clears it.
        self.launch_holder.context = LaunchContext(attention, positions)
        hidden_states: Tensor = self.model(token_ids, positions)
        self.launch_holder.context = None
        return hidden_states
