"""Runs a speculator on the CPU: a network that guesses next tokens from hidden states."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.attention import CachedLayer, LaunchContext, share_context
from vllm.config import VllmConfig
from vllm.kv_cache_spec import KVCacheLayout
from vllm.messages import IntArray, SchedulerOutput
from vllm.model_executor.speculators.interface import Speculator
from vllm.utils.ragged import positions_within, split_spans
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import build_ragged_input
from vllm.worker.cpu.draft_sampling import append_drafts
from vllm.worker.cpu.model_runner import CPUModelRunner
from vllm.worker.drafts.draft_progress import DraftProgress, NewestTokens
from vllm.worker.drafts.kept_states import KeptStates, LatestStates, StatesInBlocks
from vllm.worker.kv_cache import cache_dtype, cache_layout, layers_with_cache


class SpeculatorRunner:
    """Makes the drafts of a step behind the newest tokens of its rows.

    The token at position p + 1 goes through the speculator with the hidden state of position p,
    and keys and values of that step are at the place of p. Drafts are sampled as `DraftRunner`
    says. Of a speculator without attention only the newest token goes through it.

    Args:
        config: of the speculator.
        speculator: with its weights.
        target: the runner of the model, whose rows, blocks and random numbers this one uses.
        max_drafts: of a row in one step.
    """

    def __init__(
        self,
        config: VllmConfig,
        speculator: Speculator,
        target: CPUModelRunner,
        max_drafts: int,
    ) -> None:
        self.config = config
        self.batch: InputBatch = target.batch
        self.sampling, self.sampler = target.sampling, target.sampler
        self._speculator, self._device = speculator, target.device
        self.rank = speculator.tp.rank
        self._launch_holder = share_context(speculator)
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._num_latest = max_drafts + 1
        self._dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self.attention_layers: list[CachedLayer] = layers_with_cache(speculator)
        self._states: KeptStates | None = None
        self._progress: DraftProgress | NewestTokens | None = None

    @property
    def cache_layout(self) -> KVCacheLayout:
        """Of its keys and values; the hidden states are part of a block's bytes."""
        dtype = cache_dtype(self.config)
        layout = cache_layout(self.config, self.attention_layers, dtype, keeps_all=True)
        if not self.attention_layers:
            return layout
        token_bytes = self._speculator.kept_size * self._dtype.itemsize
        return replace(layout, block_bytes=layout.block_bytes + layout.block_size * token_bytes)

    @property
    def kept_states(self) -> list[Tensor]:
        """What is kept of tokens besides keys and values: hidden states."""
        return [] if self._states is None else [self._states.memory]

    def start(self, num_blocks: int) -> None:
        """The KV cache is bound, with so many blocks."""
        config, size = self.config, self._speculator.kept_size
        if not self.attention_layers:
            self._states = LatestStates(self.batch, size, self._dtype, self._num_latest)
            self._progress = NewestTokens()
            return
        block_size, max_len = config.cache.block_size, config.model.max_model_len
        assert max_len is not None
        self._states = StatesInBlocks(self.batch, size, self._dtype, num_blocks, block_size)
        self._progress = DraftProgress(
            self.batch, block_size, num_blocks, max_len, reads_states=True
        )

    @torch.inference_mode()
    def read(self, launch: Launch, result: Tensor, inner: Sequence[Tensor]) -> None:
        """See `StateReader`."""
        assert self._states is not None, "the KV cache is not bound"
        self._states.write(launch, self._speculator.keep(result, inner))

    @torch.inference_mode()
    def propose(self, step: SchedulerOutput) -> None:
        """Write the drafts of a step into the batch, behind the known tokens of their rows.

        Args:
            step: the batch is up to date with it, and all tokens of its rows with drafts are known.
        """
        assert self._progress is not None, "the KV cache is not bound"
        spans = self._progress.plan(step)
        if spans is None:
            return
        rows, counts = spans.rows, spans.num_drafts
        states = self._run_known(rows, spans.first, spans.count)
        known = self.batch.num_tokens[rows]
        places = np.flatnonzero(counts > 0)
        try:
            for place in range(int(counts.max())):
                if place:
                    states = states[torch.from_numpy(np.flatnonzero(counts[places] > place))]
                    places = places[counts[places] > place]
                    one = np.ones_like(places, dtype=np.int32)
                    first = self.batch.num_tokens[rows[places]] - 2
                    states = self._run(place, Launch(rows[places], first, one), states)
                else:
                    states = states[torch.from_numpy(places)]
                logits = self._speculator.compute_logits(place, states)
                append_drafts(self, rows[places], logits)
        finally:
            self.batch.num_tokens[rows] = known

    def _run_known(self, rows: IntArray, first: IntArray, count: IntArray) -> Tensor:
        """Run tokens with hidden states of the model.

        Args:
            rows: [n]
            first: [n] position of the first hidden state.
            count: [n]

        Returns:
            What the last token of each row has become, [n, elements].
        """
        assert self._states is not None, "the KV cache is not bound"
        last = torch.empty(0)
        for places, done, taken in split_spans(count, self._max_tokens):
            order = np.argsort(taken > 1, kind="stable")  # single tokens go first
            places, done, taken = places[order], done[order], taken[order]
            launch = Launch(rows[places], first[places] + done, taken)
            positions = np.repeat(launch.num_computed_tokens, taken) + positions_within(taken)
            states = self._states.read(np.repeat(launch.rows, taken), positions)
            result = self._run(0, launch, states)
            if not len(last):
                last = result.new_empty(len(rows), result.shape[1])
            ends = torch.from_numpy(np.cumsum(taken, dtype=np.int64) - 1)
            last[torch.from_numpy(places.astype(np.int64))] = result[ends]
        return last

    def _run(self, place: int, launch: Launch, states: Tensor) -> Tensor:
        """One step of the tokens behind those of a launch."""
        rows, count = launch.rows, launch.num_scheduled_tokens
        positions = np.repeat(launch.num_computed_tokens, count) + positions_within(count)
        next_ids = self.batch.token_ids[np.repeat(rows, count), positions + 1]
        input_ids = torch.from_numpy(next_ids.astype(np.int64)).to(self._device)
        context: LaunchContext | None = None
        at = torch.from_numpy(positions.astype(np.int64)).to(self._device)
        if self.attention_layers:
            context = build_ragged_input(
                self.batch, launch, self.config.cache.block_size, self._device
            ).context
            at = context.positions
        with self._launch_holder.running(context):
            return self._speculator.step(place, input_ids, states, at)
