"""Runs a speculator on the CPU: a network that predicts draft tokens from hidden states."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.attention import LaunchContext, share_context
from vllm.config import VllmConfig
from vllm.kv_cache_spec import KVCacheLayout
from vllm.messages import IntArray
from vllm.model_executor.speculators.interface import Speculator
from vllm.utils.ragged import positions_within, split_spans
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import build_ragged_input
from vllm.worker.cpu.draft_sampling import append_drafts
from vllm.worker.cpu.model_runner import CPUModelRunner
from vllm.worker.drafts.draft_maker import DraftMaker
from vllm.worker.drafts.draft_progress import DraftProgress, DraftSpans, NewestTokens
from vllm.worker.drafts.hidden_state_store import (
    BlockHiddenStates,
    HiddenStateStore,
    LastHiddenStates,
)
from vllm.worker.kv_cache import cache_dtype, cache_layout
from vllm.worker.parts.position_rows import draft_parts


class SpeculatorRunner(DraftMaker):
    """Runs a speculator in ragged forward passes; see `DraftMaker`.

    The token at position p + 1 is its input together with the hidden state of position p; the keys
    and values of that step are stored at position p. A speculator without attention runs only the
    newest token.

    Args:
        config: config of the speculator.
        speculator: speculator with its weights.
        target: the runner of the target model, whose batch, blocks and random numbers this one
            uses.
        max_drafts: largest number of drafts of a request in one step.
    """

    def __init__(
        self, config: VllmConfig, speculator: Speculator, target: CPUModelRunner, max_drafts: int
    ) -> None:
        super().__init__(config, speculator, target.batch, reads_states=True)
        self.sampling, self.sampler = target.sampling, target.tokens.sampler
        self._speculator, self._device = speculator, target.sampling.device
        self.rank = speculator.tp.rank
        self._parts = draft_parts(target.parts, config.model.resolved_arch)
        self._launch_holder = share_context(speculator)
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._num_latest = max_drafts + 1
        self._dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self._states: HiddenStateStore | None = None
        self._rows: IntArray = np.empty(0, np.int32)
        """[n] batch indices of the requests that got the latest draft."""
        self._newest = torch.empty(0)
        """[n, elements] states from which that draft was computed."""

    @property
    def cache_layout(self) -> KVCacheLayout:
        """Layout of the speculator's KV cache; the bytes of a block include its hidden states."""
        dtype = cache_dtype(self.config)
        layout = cache_layout(self.config, self.attention_layers, dtype, keeps_all=True)
        if not self.attention_layers:
            return layout
        token_bytes = self._speculator.kept_size * self._dtype.itemsize
        return replace(layout, block_bytes=layout.block_bytes + layout.block_size * token_bytes)

    @property
    def kept_states(self) -> list[Tensor]:
        """Hidden states that are kept of tokens, in addition to keys and values."""
        return [] if self._states is None else [self._states.memory]

    def start(self, num_blocks: int) -> None:
        """Prepare for a KV cache with `num_blocks` blocks, which is bound now."""
        super().start(num_blocks)
        batch, size, dtype = self.batch, self._speculator.kept_size, self._dtype
        if not self.attention_layers:
            self._states = LastHiddenStates(batch, size, dtype, self._num_latest)
            return
        block_size = self.config.cache.block_size
        self._states = BlockHiddenStates(batch, size, dtype, num_blocks, block_size)

    @torch.inference_mode()
    def read(self, launch: Launch, result: Tensor, inner: Sequence[Tensor]) -> None:
        """Store the hidden states of a forward pass for the speculator."""
        assert self._states is not None, "the KV cache is not bound"
        self._states.write(launch, self._speculator.keep(result, inner))

    def _run_known(self, spans: DraftSpans) -> None:
        """Run known tokens, with the hidden states that the model has computed for them."""
        assert self._states is not None, "the KV cache is not bound"
        rows, first = spans.rows, spans.first
        last = torch.empty(0)
        for chosen, done, taken in split_spans(spans.count, self._max_tokens):
            order = np.argsort(taken > 1, kind="stable")  # rows with a single token go first
            chosen, done, taken = chosen[order], done[order], taken[order]
            launch = Launch(rows[chosen], first[chosen] + done, taken)
            positions = np.repeat(launch.num_computed_tokens, taken) + positions_within(taken)
            states = self._states.read(np.repeat(launch.rows, taken), positions)
            result = self._run(0, launch, states)
            if not len(last):
                last = result.new_empty(len(rows), result.shape[1])
            ends = torch.from_numpy(np.cumsum(taken, dtype=np.int64) - 1)
            last[torch.from_numpy(chosen.astype(np.int64))] = result[ends]
        has_drafts = np.flatnonzero(spans.num_drafts > 0)
        self._append(rows[has_drafts], last[torch.from_numpy(has_drafts)], 0)

    def _run_newest(self, rows: IntArray, index: int) -> None:
        states = self._newest[torch.from_numpy(np.flatnonzero(np.isin(self._rows, rows)))]
        first = self.batch.num_tokens[rows] - 2
        launch = Launch(rows, first, np.ones_like(rows, dtype=np.int32))
        self._append(rows, self._run(index, launch, states), index)

    def _note_drafts(self, progress: DraftProgress | NewestTokens, spans: DraftSpans) -> None:
        """Do nothing: once drafts are accepted, they run again with hidden states of the model."""

    def _append(self, rows: IntArray, states: Tensor, index: int) -> None:
        """Append the drafts that follow from the newest states of the requests."""
        self._rows, self._newest = rows, states
        append_drafts(self, rows, self._speculator.compute_logits(index, states))

    def _run(self, index: int, launch: Launch, states: Tensor) -> Tensor:
        """Run one speculator step for the tokens after the tokens of a forward pass."""
        rows, count = launch.rows, launch.num_scheduled_tokens
        indices = np.repeat(launch.num_computed_tokens, count) + positions_within(count)
        next_ids = self.batch.token_ids[np.repeat(rows, count), indices + 1]
        input_ids = torch.from_numpy(next_ids.astype(np.int64)).to(self._device)
        context: LaunchContext | None = None
        at = torch.from_numpy(indices.astype(np.int64)).to(self._device)[None]
        if self.attention_layers:
            context = build_ragged_input(
                self.batch,
                launch,
                self.config.cache.block_size,
                self._device,
                self._parts.of_launch(launch),
            ).context
            at = context.positions
        with self._launch_holder.running(context):
            return self._speculator.step(index, input_ids, states, at)
