"""Runs scheduler steps: update the batch, plan launches, run the forward pass, sample. Each part
has its own class; this module calls them in order.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm.attention import CachedLayer, share_context
from vllm.config import VllmConfig
from vllm.kv_cache_spec import KVCacheLayout
from vllm.messages import IntArray, LogprobRows, ModelRunnerOutput, RunnerStats, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.ragged import positions_within
from vllm.worker.adapters import Adapters
from vllm.worker.embedding_rows import EmbeddingRows
from vllm.worker.input_batch import ExpectedTokens, InputBatch
from vllm.worker.kv_cache import cache_dtype, cache_layout, layers_with_cache
from vllm.worker.launch import Launch, LaunchPlanner, RaggedPlanner
from vllm.worker.model_input import ModelInput, build_ragged_input
from vllm.worker.prompt_logprobs import PendingLogprobs, PromptLogprobs, join_logprobs
from vllm.worker.verification import count_accepted


class StepHandle:
    """A step in flight.

    `result` waits for the device and returns the tokens; further calls return the same.

    Args:
        finish: called once, after the steps before this one have their results.
        before: the step before this one, if it may still be in flight.
    """

    def __init__(
        self, finish: Callable[[], ModelRunnerOutput], before: "StepHandle | None" = None
    ) -> None:
        self._finish = finish
        self._before = before
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """The result of the step; waits for it."""
        if self._output is None:
            if self._before is not None:
                self._before.result()
                self._before = None
            self._output = self._finish()
        return self._output


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The result of one launch, on the device."""

    rows: IntArray
    """[n] the row of each row of the logits; a row with drafts occurs once per position."""
    indices: IntArray
    """[t] indices of the entries that sampled a token, ascending."""
    sampled: SamplerOutput | None
    """The sampled tokens of n rows or more; None when t is 0."""
    prompt_logprobs: list[tuple[int, PendingLogprobs]]
    num_drafts: IntArray | None = field(default=None, kw_only=True)
    """[m] number of drafts of each row of the batch that sampled; the row has one more entry in
    `indices`. None if no row has drafts; m is t then."""

    @property
    def sampled_rows(self) -> IntArray:
        """[m] rows of the batch that sampled."""
        rows = self.rows[self.indices]
        if self.num_drafts is None:
            return rows
        return rows[np.cumsum(self.num_drafts + 1) - 1]


PendingLaunch = tuple[LaunchResult, ExpectedTokens]
"""A launch, and the expected tokens of its `indices` in the batch."""


class ModelRunner:
    """One model on one device.

    Args:
        config: of the engine.
        model: loaded, on the device.
        device: where it is.
        grammars: of the worker, which begin to load before the model; None makes new ones.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        device: torch.device,
        grammars: GrammarMatchers | None = None,
    ) -> None:
        self.model = model
        self._launch_holder = share_context(model)
        self.device = device
        self.block_size = config.cache.block_size
        self.cache_layout = self._plan_cache(config)
        self.batch = InputBatch(
            config.scheduler.max_num_seqs,
            config.scheduler.max_model_len,
            config.max_blocks_per_request,
            len(self.cache_layout.groups),
        )
        self.sampling, self.sampler = self._make_sampler(config)
        self.grammars = grammars or GrammarMatchers(config)
        self.prompt_logprobs = PromptLogprobs(model, self.sampler)
        self.planner: LaunchPlanner = RaggedPlanner()
        self.embeddings: EmbeddingRows | None = None
        """Embeddings of requests; None: the engine accepts no embeddings."""
        if config.model.enable_prompt_embeds:
            self.embeddings = EmbeddingRows(model, device)
        self.adapters: Adapters | None = None
        """LoRA adapters of requests; None: the engine accepts none."""
        if config.lora.enable_lora:
            self.adapters = Adapters(config, model, device)
        self._in_flight: StepHandle | None = None
        self._num_steps = 0
        self._num_useful_tokens = 0

    def _make_sampler(self, config: VllmConfig) -> tuple[SamplingState, Sampler]:
        vocab_size = config.model.resolved_arch.vocab_size
        return SamplingState(config.scheduler.max_num_seqs, vocab_size, self.device), Sampler()

    def _plan_cache(self, config: VllmConfig) -> KVCacheLayout:
        """How the blocks of the KV cache are shared out."""
        return cache_layout(config, self.attention_layers, cache_dtype(config))

    @property
    def attention_layers(self) -> list[CachedLayer]:
        """The layers that own a KV cache, in the order of the model."""
        return layers_with_cache(self.model)

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Start a step. The step before may be in flight; it is waited for if its tokens are needed
        on the host."""
        if self._in_flight is not None and self._needs_tokens(step):
            self._in_flight.result()
        self._update_state(step)
        self._num_steps += 1
        self._num_useful_tokens += step.num_tokens
        self._in_flight = StepHandle(self._start(step), before=self._in_flight)
        return self._in_flight

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Launch a step. Calling the result waits for its tokens."""
        launches = [self._launch(launch) for launch in self.planner.plan(step)]
        return lambda: self._collect(step.step_id, launches)

    def _needs_tokens(self, step: SchedulerOutput) -> bool:
        """Whether the host must know the tokens of the step in flight before this one starts:
        always, where inputs are built from them."""
        return True

    def stats(self) -> RunnerStats:
        """Counters since the start. Nothing is padded or compiled on a device that accepts any
        shape."""
        return RunnerStats(num_steps=self._num_steps, num_useful_tokens=self._num_useful_tokens)

    def _launch(self, launch: Launch) -> PendingLaunch:
        result = self._run(launch)
        return result, self.batch.expect(result.sampled_rows, result.num_drafts)

    def _update_state(self, step: SchedulerOutput) -> None:
        for row in step.freed_rows:
            self.sampling.remove(row)
            self.prompt_logprobs.remove(row)
            if self.embeddings is not None:
                self.embeddings.remove(row)
            if self.adapters is not None:
                self.adapters.remove(row)
        self.batch.update(step)
        for new in step.new_requests:
            matcher = None
            if new.request.sampling_params.guided_decoding is not None:
                matcher = self.grammars.matcher(new.request, new.output_token_ids)
            self.sampling.add(new.row, new.request, new.output_token_ids, matcher)
            self.prompt_logprobs.add(new.row, new.request)
            if self.embeddings is not None:
                self.embeddings.add(new.row, new.request)
            if self.adapters is not None:
                self.adapters.add(new.row, new.request)

    @torch.inference_mode()
    def _run(self, launch: Launch) -> LaunchResult:
        model_input = build_ragged_input(
            self.batch, launch, self.block_size, self.device, self.embeddings, self.adapters
        )
        self.sampling.start_masks(launch.rows[model_input.sampled])
        hidden_states = self._forward(model_input)
        starts = np.cumsum(launch.num_scheduled_tokens) - launch.num_scheduled_tokens
        prompt_logprobs = self.prompt_logprobs.compute(self.batch, launch, hidden_states, starts)
        rows, num_drafts = launch.rows[model_input.sampled], model_input.num_drafts
        num_output = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
        if num_drafts is not None:
            assert not self.sampling.follows_output(rows[num_drafts > 0]), "it takes no drafts"
            rows = np.repeat(rows, num_drafts + 1)
            num_output = np.repeat(num_output, num_drafts + 1) + positions_within(num_drafts + 1)
        sampled = None
        if len(rows):
            if model_input.logits_indices is not None:
                hidden_states = hidden_states[model_input.logits_indices]
            logits = self.model.compute_logits(hidden_states)
            sampled = self.sampler(logits, self.sampling.metadata(rows, num_output))
        indices = np.arange(len(rows), dtype=np.int32)
        return LaunchResult(rows, indices, sampled, prompt_logprobs, num_drafts=num_drafts)

    def _forward(self, model_input: ModelInput) -> Tensor:
        context = model_input.context
        with self._launch_holder.running(context):
            return self.model(model_input.input_ids, context.positions)

    def _collect(self, step_id: int, launches: list[PendingLaunch]) -> ModelRunnerOutput:
        """Copy the tokens to the host and note them in their rows."""
        row_parts: list[IntArray] = []
        token_parts: list[IntArray] = []
        count_parts: list[IntArray] = []
        has_drafts = False
        logprobs: dict[int, LogprobRows] = {}
        prompt_logprobs: defaultdict[int, list[LogprobRows]] = defaultdict(list)
        errors: dict[int, str] = {}
        for result, expected in launches:
            for row, pending in result.prompt_logprobs:
                prompt_logprobs[row].append(pending.result())
            if result.sampled is None:
                continue
            host_ids = result.sampled.host_ids.cpu().numpy()
            found = self.sampling.logprob_rows(result.rows, result.sampled)
            sampled, counts = host_ids[result.indices], None
            if expected.num_drafts is not None:
                assert expected.draft_ids is not None
                counts = count_accepted(sampled, expected.draft_ids, expected.num_drafts)
                within = positions_within(expected.num_drafts + 1)
                sampled = sampled[within < np.repeat(counts, expected.num_drafts + 1)]
                host_ids = host_ids.copy()
                # only rows without a token can have failed
                host_ids[result.indices[within > 0]] = 0
                count_of = dict(zip(expected.rows.tolist(), counts.tolist(), strict=True))
                found = {row: rows.first(count_of[row]) for row, rows in found.items()}
            token_ids = np.maximum(sampled, 0)
            self.sampling.record(*self.batch.record(expected, token_ids, counts))
            row_parts.append(expected.rows)
            token_parts.append(token_ids)
            count_parts.append(np.ones_like(expected.rows) if counts is None else counts)
            has_drafts = has_drafts or counts is not None
            logprobs.update(found)
            errors.update(self.sampling.errors_of(result.rows, result.sampled, host_ids))
            if self.adapters is not None:
                errors.update(self.adapters.errors_of(result.rows.tolist()))
        return ModelRunnerOutput(
            step_id=step_id,
            rows=_joined(row_parts),
            token_ids=_joined(token_parts),
            num_tokens=_joined(count_parts) if has_drafts else None,
            logprobs=logprobs,
            prompt_logprobs={row: join_logprobs(p) for row, p in prompt_logprobs.items()},
            errors=errors,
        )


def _joined(parts: list[IntArray]) -> IntArray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
