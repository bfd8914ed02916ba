"""Pooling models as the device runs them: packed input of one bucket in, numbers out."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vllm.attention import AttentionMetadata
from vllm.attention.backends.padded import PaddedPrefill
from vllm.attention.backends.padded_encoder import PaddedEncoder
from vllm.config import PoolerConfig
from vllm.messages import IntArray
from vllm.model_executor.models.interface import CausalLM, PoolingModel
from vllm.worker.hpu.input import HPUInputBuilder, PrefillInput, unpack_prefill
from vllm.worker.hpu.model import HPUModel
from vllm.worker.hpu.planner import BucketLaunch, LaunchShape

_TYPE_SHIFT = 24
"""A token's type travels above its position, which is less than 2**24."""


class HeadAsLogits(CausalLM):
    """A pooling model where a generative one is expected: its numbers are the logits.

    Args:
        model: to be wrapped.
        pooler: how it pools.
    """

    def __init__(self, model: PoolingModel, pooler: PoolerConfig) -> None:
        super().__init__(model.arch, model.tp)
        self.pooling_model = model
        self.pooler = pooler

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self.pooling_model.layers

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.pooling_model.embed(input_ids)

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        types = None
        if self.pooling_model.num_token_types > 1:
            types = positions >> _TYPE_SHIFT
            positions = positions & ((1 << _TYPE_SHIFT) - 1)
        return self.pooling_model.run_layers(hidden_states, positions, first, end, types)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Pooled hidden states [N, hidden] -> numbers of the head, [N, size]."""
        return self.pooling_model.head(hidden_states)


class WholePromptModel(HPUModel):
    """Pools whole prompts, each of which is a row of a prefill.

    Shape: packed input of a launch -> (numbers [B, size], or [B * Q, size] with one result per
    token, hidden states [B * Q, hidden])
    """

    def forward(self, packed: Tensor, shape: LaunchShape) -> tuple[Tensor, Tensor]:
        given = unpack_prefill(packed, shape)
        attention = self._attention(given, shape)
        hidden_states = self._run(attention, given.token_ids, given.positions)
        return self.model.compute_logits(self._pool(hidden_states, given, shape)), hidden_states

    @property
    def _pooler(self) -> PoolerConfig:
        assert isinstance(self.model, HeadAsLogits)
        return self.model.pooler

    def _attention(self, given: PrefillInput[Tensor], shape: LaunchShape) -> AttentionMetadata:
        if self._pooler.is_causal:
            return PaddedPrefill.derive(given.metadata, self._kinds, self._block_size, self._kernel)
        size = (shape.bucket.batch, shape.bucket.query_len)
        return PaddedEncoder.derive(given.metadata.query_lens, size, self._kernel)

    def _pool(
        self, hidden_states: Tensor, given: PrefillInput[Tensor], shape: LaunchShape
    ) -> Tensor:
        """[B, hidden], or [B * Q, hidden]."""
        kind, query_len = self._pooler.pooling_type, shape.bucket.query_len
        if kind == "LAST":
            return hidden_states.index_select(0, given.last_tokens)
        if kind not in ("CLS", "MEAN"):
            return hidden_states
        rows = hidden_states.unflatten(0, (shape.bucket.batch, query_len))
        if kind == "CLS":
            return rows[:, 0]
        lens = given.metadata.query_lens[:, None]
        token = torch.arange(query_len, dtype=torch.int32, device=lens.device)
        is_padding = (token >= lens)[:, :, None]
        sums = rows.float().masked_fill(is_padding, 0.0).sum(1)
        return (sums / lens.clamp(min=1)).to(hidden_states.dtype)


class TypedInputBuilder(HPUInputBuilder):
    """Packs the type of each token together with its position.

    Attributes:
        token_types: [rows, max_model_len] as in the batch.
    """

    token_types: IntArray

    def _prefill(self, launch: BucketLaunch, sample_rows: IntArray) -> PrefillInput[IntArray]:
        given = super()._prefill(launch, sample_rows)
        count, query_len = launch.num_scheduled_tokens, launch.bucket.query_len
        index, column = np.nonzero(np.arange(query_len) < count[:, None])
        types = self.token_types[launch.rows[index], column]
        given.positions[index * query_len + column] += types << _TYPE_SHIFT
        return given
