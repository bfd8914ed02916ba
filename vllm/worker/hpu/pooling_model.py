"""Pooling of whole prompts on the device: from the packed input of one bucket to pooled values."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.attention import AttentionMetadata
from vllm.attention.backends.packed_fields import Array, PackedFields, packed
from vllm.attention.backends.padded import PaddedPrefill
from vllm.attention.backends.padded_encoder import PaddedEncoder
from vllm.attention.backends.sdpa import SDPAKernel
from vllm.config import PoolerConfig
from vllm.messages import IntArray
from vllm.model_executor.models.interface import PoolingModel
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.hpu.launches.input import (
    HPUInputBuilder,
    PrefillInput,
    padded_sizes,
    unpack_prefill,
)
from vllm.worker.hpu.launches.model import LaunchModel, PreparedLaunch
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.pooling_runner import TokenTypes


@dataclass(frozen=True)
class TypedPrefillInput(PrefillInput[Array]):
    """The inputs of a prefill whose tokens have types."""

    token_types: Array = packed("T")
    """[T]"""


TYPED: PackedFields[TypedPrefillInput[Any]] = PackedFields(TypedPrefillInput)


class TypedInputBuilder(HPUInputBuilder):
    """Packs prefills with the types of their tokens.

    Args:
        batch: batch; see `HPUInputBuilder`.
        block_size: tokens per block; see `HPUInputBuilder`.
        types: types of the tokens in the batch.
    """

    def __init__(self, batch: InputBatch, block_size: int, types: TokenTypes) -> None:
        super().__init__(batch, block_size)
        self._types = types.values

    def _fields(self, shape: PaddedShape) -> PackedFields[Any]:
        return TYPED

    def _prefill(self, launch: PaddedLaunch, sample_rows: IntArray) -> PrefillInput[IntArray]:
        given = super()._prefill(launch, sample_rows)
        types = np.zeros((launch.bucket.batch, launch.bucket.query_len), np.int32)
        column = np.arange(launch.bucket.query_len)
        index, column = np.nonzero(column < launch.num_scheduled_tokens[:, None])
        types[index, column] = self._types[launch.rows[index], column]
        return TypedPrefillInput(**vars(given), token_types=types.ravel())


class WholePromptModel(LaunchModel):
    """Pools whole prompts; each prompt is one sequence of a prefill.

    Args:
        model: the model; see `LaunchModel`.
        block_size: tokens per block; see `LaunchModel`.
        kernel: kernel; see `LaunchModel`.
        dtype: data type; see `LaunchModel`.
        pooler: how it pools. With several types of tokens, inputs come from a `TypedInputBuilder`.

    Shape: packed input and, for a pipeline stage after the first, the hidden states [B * Q, hidden]
    of the previous stage -> (outputs [B, size], or [B * Q, size] with one result per token, hidden
    states [B * Q, hidden]). A stage before the last one returns the hidden states instead of
    outputs.
    """

    def __init__(
        self,
        model: PoolingModel,
        pooler: PoolerConfig,
        block_size: int,
        kernel: SDPAKernel,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, block_size, kernel, dtype=dtype)
        self._has_head = model.stage.is_last
        self._has_types = model.num_token_types > 1
        self._pooler = pooler

    def forward(
        self, packed: Tensor, shape: PaddedShape, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        given: PrefillInput[Tensor]
        types: tuple[Tensor, ...] = ()
        if self._has_types:
            given = typed = TYPED.unpack(packed, padded_sizes(shape))
            types = (typed.token_types,)
        else:
            given = unpack_prefill(packed, shape)
        launch = PreparedLaunch(
            self._attention(given, shape),
            given.token_ids,
            given.positions,
            given.metadata.slot_mapping.flatten(),
        )
        hidden_states = self._run(launch, given.token_ids if before is None else before, *types)
        assert isinstance(self.model, PoolingModel)
        if not self._has_head:
            return hidden_states, hidden_states
        return self.model.head(self._pool(hidden_states, given, shape)), hidden_states

    def _attention(self, given: PrefillInput[Tensor], shape: PaddedShape) -> AttentionMetadata:
        if self._pooler.is_causal:
            return PaddedPrefill.derive(given.metadata, self._kinds, self._block_size, self._kernel)
        size = (shape.bucket.batch, shape.bucket.query_len)
        return PaddedEncoder.derive(given.metadata.query_lens, size, self._kernel)

    def _pool(
        self, hidden_states: Tensor, given: PrefillInput[Tensor], shape: PaddedShape
    ) -> Tensor:
        """Pool the hidden states to [B, hidden], or to [B * Q, hidden] with one result per
        token.
        """
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
