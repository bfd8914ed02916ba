"""Runs a model on the device: from the packed input of one bucket to logits or pooled values.

Everything between the one copy to the device and this result is computed here, on the device, with
shapes that depend only on the bucket. So this is what a graph captures and what is compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vllm.attention import (
    Attention,
    AttentionMetadata,
    LaunchContext,
    PaddedReplays,
    PaddedStates,
    StateLayer,
    TableEmbeddings,
    share_context,
)
from vllm.attention.backends.flat_pa import FusedBlocks, Softmax
from vllm.attention.backends.normalisers import parse_normaliser
from vllm.attention.backends.padded import PaddedDecode, PaddedPrefill, fit_kernel, layer_kinds
from vllm.attention.backends.sdpa import SDPAKernel
from vllm.attention.padded_items import PaddedItems
from vllm.bucketing import Phase
from vllm.config import HPUConfig
from vllm.lora.launches import DeviceSlots, SlottedAdapters
from vllm.model_executor.layers.rotary import number_rotary_tables
from vllm.model_executor.loader.stage import PPMissingLayer, present_layers
from vllm.model_executor.models.interface import CausalLM, LayeredModel, PoolingModel
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.habana.kernels import FusedKernels
from vllm.worker.drafts.stage_drafts import InnerLayers
from vllm.worker.hpu.launches.device_tokens import DeviceTokens
from vllm.worker.hpu.launches.embeddings import FIRST_GIVEN
from vllm.worker.hpu.launches.input import DecodeInput, unpack_decode, unpack_merged, unpack_prefill
from vllm.worker.hpu.launches.planner import PaddedShape


def softmax_normaliser(config: HPUConfig, kernels: FusedKernels) -> Softmax:
    """Return how decodes of an engine normalise attention scores, on a card with these kernels."""
    if config.softmax_const_norm is not None:
        return config.softmax_const_norm
    if config.pa_softmax_impl:
        return parse_normaliser(config.pa_softmax_impl)
    if not config.fused_block_softmax_adjustment or not kernels.has("block_softmax_adjustment"):
        return None
    return FusedBlocks(kernels, config.fused_block_softmax and kernels.has("block_softmax"))


@dataclass(frozen=True)
class PreparedLaunch:
    """An unpacked forward pass of T tokens, with the data that its layers share."""

    attention: AttentionMetadata
    """Metadata of the attention of its tokens."""
    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[P, T] positions for rotary embeddings, see `LaunchContext`."""
    slots: Tensor
    """[T] of the KV cache."""
    last_tokens: Tensor | None = None
    """[L] which tokens the head gets; None: all."""
    adapters: SlottedAdapters | None = None
    """Adapters of the tokens; None: no model has any."""
    states: PaddedStates | None = None
    """Recurrent states of the requests; None: no layer has any."""
    replaced: TableEmbeddings | None = None
    """Embeddings that are given; None: all are looked up."""
    items: PaddedItems | None = None
    """Images or sounds that the tokens see; None: no layer reads any."""

    def context(self, rotary_angles: Sequence[tuple[Tensor, Tensor]]) -> LaunchContext:
        """Return the context of the forward pass that the layers read."""
        has_added = self.replaced is not None and self.replaced.num_layers > 0
        added = self.replaced if has_added else None
        return LaunchContext(
            self.attention,
            self.positions,
            self.replaced,
            added=added,
            rotary_angles=rotary_angles,
            adapters=self.adapters,
            states=self.states,
            items=self.items,
        )

    def context_of_head(self) -> LaunchContext:
        """Return the context for the output head, which only processes `last_tokens`."""
        adapters = self.adapters
        if adapters is not None and self.last_tokens is not None:
            adapters = adapters.select(self.last_tokens)
        return LaunchContext(self.attention, self.positions, adapters=adapters)


class LaunchModel(nn.Module):
    """A model that runs padded forward passes; subclasses define their inputs and results.

    Args:
        model: the model on the device; its KV caches are bound when a forward pass runs.
        block_size: tokens per KV block.
        kernel: attention kernel for prompts.
        adapters: LoRA adapters on the device; None: there are none.
        dtype: data type of the hidden states; None: of the first parameter, which is the embedding.

    Raises:
        ConfigError: a layer needs an input that forward passes do not have.

    Shape: packed input -> (result, hidden states [B * Q, hidden])
    """

    def __init__(
        self,
        model: LayeredModel,
        block_size: int,
        kernel: SDPAKernel,
        adapters: DeviceSlots | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model: LayeredModel = model
        self.launch_holder = share_context(model)
        self._block_size = block_size
        self._adapters = adapters
        self._rotary_tables = number_rotary_tables(model)
        self._dtype = dtype or next(model.parameters()).dtype
        self._kinds = layer_kinds(m for m in model.modules() if isinstance(m, Attention))
        self._kernel = fit_kernel(kernel, self._kinds)

    @property
    def size_before(self) -> int:
        """Values per token that the previous pipeline stage sends."""
        return self.model.arch.hidden_size

    def compile_regions(self, bridge: HabanaBridge, **options: Any) -> None:
        """Compile the parts of a forward pass separately.

        The parts are the layers, and the modules outside them, such as embeddings, the last norm
        and the head.

        Args:
            bridge: has the compiler.
            options: options; see `HabanaBridge.compile`.
        """
        for module in regions_of(self.model):
            bridge.compile_module(module, **options)

    def _run(self, launch: PreparedLaunch, inputs: Tensor, *more: Any) -> Any:
        # No `with`: not every compiler can trace it. If this raises, `Execution.run` clears the
        # context.
        angles = [table.angles(launch.positions, self._dtype) for table in self._rotary_tables]
        self.launch_holder.context = launch.context(angles)
        result = self._forward(inputs, launch.positions, *more)
        self.launch_holder.context = None
        return result

    def _forward(self, inputs: Tensor, positions: Tensor, *more: Any) -> Any:
        """Run the model; `prepare` has set the context of the forward pass."""
        return self.model(inputs, positions, *more)


def regions_of(model: LayeredModel) -> list[nn.Module]:
    """Return the modules of this pipeline stage that are compiled separately.

    They are the layers, and the largest modules outside the layers.
    """
    layers = present_layers(model)
    inside = {id(module) for layer in layers for module in layer.modules()}

    def outside_layers(parent: nn.Module) -> list[nn.Module]:
        found = []
        for child in parent.children():
            if id(child) in inside or isinstance(child, PPMissingLayer):
                continue
            is_list = isinstance(child, nn.ModuleList)
            has_layers = is_list or any(id(module) in inside for module in child.modules())
            found += outside_layers(child) if has_layers else [child]
        return found

    return layers + outside_layers(model)


class HiddenStateKeeper(Protocol):
    """Stores hidden states of tokens on the card, as a part of the forward pass."""

    def keep(self, slots: Tensor, result: Tensor, inner: Sequence[Tensor]) -> None:
        """Store hidden states for the speculator.

        Args:
            slots: [T] slots of the KV cache, one for each token.
            result: [T, hidden] of the forward pass.
            inner: [T, hidden] each, inputs of the layers that are read in addition to the result.
        """
        ...


class HPUModel(LaunchModel):
    """A decoder, or a pipeline stage of one, that runs prefills and decodes and computes logits.

    Args:
        model: the model; see `LaunchModel`.
        block_size: tokens per block; see `LaunchModel`.
        kernel: kernel; see `LaunchModel`.
        adapters: adapters; see `LaunchModel`.
        dtype: data type; see `LaunchModel`.
        normaliser: normaliser of the softmax of decodes; see `flat_paged_attention`.
        device_tokens: the newest tokens of the requests, as sampled on the device. None: nothing
            is sampled.
        num_positions: positions that requests may give for each prompt token; 0: none.
        sees_ahead: tokens of images attend to later ones.

    Attributes:
        keeper: stores the hidden states of all tokens; None: they are not stored.
        inner_layers: layers whose inputs a speculator reads.
        embeddings: `DeviceEmbeddings.table`; None: prompts give no embeddings.
        items: table of the items that requests see, see `DeviceItems`; None: no cross-attention.
        keeps_states: recurrent states of prefixes are kept.

    Shape: packed input and, for a stage after the first, the output of the previous stage, hidden
    states [B * Q, hidden] followed by inputs of inner layers -> (logits [B, V], of a decode [B * Q,
    V]; hidden states [B * Q, hidden]). A stage before the last one returns the data that it sends
    instead of logits.
    """

    def __init__(
        self,
        model: CausalLM | PoolingModel,
        block_size: int,
        kernel: SDPAKernel,
        normaliser: Softmax = None,
        device_tokens: DeviceTokens | None = None,
        adapters: DeviceSlots | None = None,
        dtype: torch.dtype | None = None,
        num_positions: int = 0,
        *,
        sees_ahead: bool = False,
    ) -> None:
        super().__init__(model, block_size, kernel, adapters, dtype)
        self._num_positions, self._sees_ahead = num_positions, sees_ahead
        self.keeper: HiddenStateKeeper | None = None
        self.embeddings: Tensor | None = None
        self.items: Tensor | None = None
        self.inner_layers = InnerLayers()
        self.device_tokens = device_tokens
        self._normaliser = normaliser
        self.keeps_states = False
        self._has_states = any(isinstance(module, StateLayer) for module in model.modules())
        self._has_head = model.stage.is_last

    def forward(
        self, packed: Tensor, shape: PaddedShape, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        launch = self.prepare(packed, shape)
        inner: list[Tensor] = []
        inputs = launch.token_ids
        if before is not None:
            inputs, inner = self.inner_layers.split(before)
        result = self._run(launch, inputs)
        hidden_states = result
        if self.inner_layers.own:
            hidden_states, own = result
            inner = inner + own
        if self.keeper is not None:
            self.keeper.keep(launch.slots, hidden_states, inner)
        if not self._has_head:
            if inner:
                hidden_states = torch.cat((hidden_states, *inner), dim=1)
            return hidden_states, hidden_states
        rows = hidden_states
        if launch.last_tokens is not None:
            rows = hidden_states.index_select(0, launch.last_tokens)
        if launch.adapters is None:
            return self._head(rows), hidden_states
        self.launch_holder.context = launch.context_of_head()
        logits = self._head(rows)
        self.launch_holder.context = None
        return logits, hidden_states

    @property
    def size_before(self) -> int:
        return super().size_before * (1 + self.inner_layers.num_before)

    def _forward(self, inputs: Tensor, positions: Tensor, *more: Any) -> Any:
        """Run the model; return the hidden states, and the inputs of inner layers if there
        are any.
        """
        if not self.inner_layers.own:
            return super()._forward(inputs, positions, *more)
        assert isinstance(self.model, CausalLM)
        return self.model.forward_and_inputs(inputs, positions, self.inner_layers.own)

    def compile_regions(self, bridge: HabanaBridge, **options: Any) -> None:
        super().compile_regions(bridge, **options)
        self.prepare = bridge.compile(self.prepare, **options)  # type: ignore[method-assign]

    def prepare(self, packed: Tensor, shape: PaddedShape) -> PreparedLaunch:
        """Unpack the input of a forward pass, and compute the data that its layers share."""
        if shape.bucket.phase is Phase.DECODE:
            return self._prepare_decode(packed, shape)
        if shape.merged_prompts:
            return self._prepare_merged(packed, shape)
        return self._prepare_prefill(packed, shape)

    def _head(self, rows: Tensor) -> Tensor:
        # Looked up here and not stored in an attribute: older compilers cannot trace a method of
        # another module that is stored as an attribute.
        if isinstance(self.model, PoolingModel):
            return self.model.head(rows)
        assert isinstance(self.model, CausalLM)
        return self.model.compute_logits(rows)

    def _token_ids(self, token_ids: Tensor) -> Tensor:
        """Convert the tokens [T] of a forward pass to the ids that the model's embedding knows."""
        return token_ids

    def _separate(self, token_ids: Tensor) -> tuple[Tensor, TableEmbeddings | None]:
        """Separate the tokens [T] of a prefill from given embeddings that replace some of them."""
        if self.embeddings is None:
            return self._token_ids(token_ids), None
        replaced = TableEmbeddings(FIRST_GIVEN - token_ids, self.embeddings)
        return self._token_ids(token_ids.clamp_min(0)), replaced

    def _prepare_decode(self, packed: Tensor, shape: PaddedShape) -> PreparedLaunch:
        given = unpack_decode(packed, shape)
        if self.device_tokens is not None:
            given = self.device_tokens.fill_in(given, shape)
        query_len, by_row = shape.bucket.query_len, None
        if query_len > 1 or any(layer.options.needs_indices for layer in self._kinds.values()):
            by_row = given.indices.unflatten(0, (-1, query_len))
        positions = given.indices[None]
        if self._num_positions:
            offsets = given.position_offsets[:, None].expand(-1, query_len).flatten()
            positions = positions + offsets
        attention = PaddedDecode.derive(
            given.metadata, self._kinds, self._block_size, self._dtype, self._normaliser, by_row
        )
        adapters = self._adapters_of(given.adapter_slots, query_len)
        states = None
        if self._has_states:
            states = self._states_of(given, query_len)
        return PreparedLaunch(
            attention,
            self._token_ids(given.token_ids),
            positions,
            given.metadata.slot_mapping,
            adapters=adapters,
            states=states,
            items=self._items_of(shape, given.rows, given.indices.unflatten(0, (-1, query_len))),
        )

    def _states_of(self, given: DecodeInput[Tensor], query_len: int) -> PaddedStates:
        """Return the recurrent states that a decode reads and updates."""
        rows = given.rows.long()
        if query_len == 1:
            return PaddedStates(rows, given.indices == 0)
        indices = given.indices.unflatten(0, (-1, query_len))
        counts, before, kept_rows = given.replays.unbind(0)
        replays = PaddedReplays(counts, before if self.keeps_states else None, kept_rows.long())
        first = indices[:, 0]
        return PaddedStates(rows, first == 0, indices[:, -1] - first + 1, replays)

    def _prepare_prefill(self, packed: Tensor, shape: PaddedShape) -> PreparedLaunch:
        given = unpack_prefill(packed, shape, self._num_positions, sees_ahead=self._sees_ahead)
        token_ids, replaced = self._separate(given.token_ids)
        attention = PaddedPrefill.derive(
            given.metadata, self._kinds, self._block_size, self._kernel
        )
        adapters = self._adapters_of(given.adapter_slots, shape.bucket.query_len)
        states = items = None
        if self._has_states:
            is_new = given.metadata.context_lens == 0
            states = PaddedStates(given.rows.long(), is_new, given.metadata.query_lens)
        if self.items is not None:
            column = torch.arange(shape.bucket.query_len, dtype=torch.int32, device=packed.device)
            items = self._items_of(shape, given.rows, given.metadata.context_lens[:, None] + column)
        return PreparedLaunch(
            attention,
            token_ids,
            given.positions,
            given.metadata.slot_mapping.flatten(),
            given.last_tokens,
            adapters,
            states,
            replaced,
            items,
        )

    def _prepare_merged(self, packed: Tensor, shape: PaddedShape) -> PreparedLaunch:
        given = unpack_merged(packed, shape, self._num_positions, sees_ahead=self._sees_ahead)
        token_ids, replaced = self._separate(given.token_ids)
        metadata = given.metadata
        attention = PaddedPrefill.derive_merged(
            metadata, self._kinds, self._block_size, self._kernel
        )
        return PreparedLaunch(
            attention,
            token_ids,
            given.positions if self._num_positions else metadata.positions[None],
            metadata.slot_mapping,
            metadata.last_token_indices,
            self._adapters_of(given.adapter_slots),
            replaced=replaced,
        )

    def _items_of(self, shape: PaddedShape, rows: Tensor, indices: Tensor) -> PaddedItems | None:
        """Return the items that tokens with the indices [B, Q] of the requests `rows` [B] see."""
        if self.items is None:
            return None
        tables = self.items.index_select(0, rows)
        if shape.item_slots:
            tables = tables[:, :, : shape.item_slots]
        return PaddedItems.derive(tables, indices, self._kernel)

    def _adapters_of(self, slots: Tensor, query_len: int = 1) -> SlottedAdapters | None:
        """Return the adapters of each token, given the adapter slot of each request."""
        if self._adapters is None:
            return None
        if query_len > 1:
            slots = slots[:, None].expand(-1, query_len).flatten()
        return self._adapters.of_tokens(slots)
