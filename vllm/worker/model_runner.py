"""Runs scheduler steps: update the batch, plan launches, run the forward pass, sample. Each part
has its own class; this module calls them in order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm.attention import CachedLayer, LaunchContext, share_context
from vllm.config import VllmConfig
from vllm.kv_cache_spec import KVCacheLayout
from vllm.lora.reader import AdapterReader
from vllm.messages import (
    IntArray,
    LogprobRows,
    ModelRunnerOutput,
    RunnerStats,
    SchedulerOutput,
    StepTokens,
)
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.masks import RowDrafts
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import ExpectedTokens, InputBatch
from vllm.worker.batch.launch import Launch, LaunchPlanner, RaggedPlanner
from vllm.worker.batch.launch_result import LaunchResult, PendingLaunch, join_logprobs
from vllm.worker.batch.model_input import ModelInput, build_ragged_input
from vllm.worker.drafts.stage_drafts import InnerLayers, StageDrafts, makes_drafts
from vllm.worker.kv_cache import cache_dtype, cache_layout, layers_with_cache
from vllm.worker.parts.adapters import Adapters, RaggedRows, adapter_reader
from vllm.worker.parts.embedding_rows import EmbeddingRows
from vllm.worker.parts.prompt_logprobs import PromptLogprobs
from vllm.worker.parts.row_parts import RowPart, RowParts, SamplingRows


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


class Drafter(Protocol):
    """Guesses next tokens with a model of its own."""

    def propose(self, step: SchedulerOutput) -> None:
        """Write the drafts of a step into the batch, behind the known tokens of their rows."""
        ...


class StateReader(Protocol):
    """Takes hidden states of the tokens that the model has run."""

    def read(self, launch: Launch, result: Tensor, inner: Sequence[Tensor]) -> None:
        """Called after each launch of T tokens, in the order of its rows.

        Args:
            launch: which tokens.
            result: [T, hidden] of the forward pass.
            inner: [T, hidden] each, the inputs of the layers that it reads besides the result,
                ascending. Belong to the reader.
        """
        ...


class ModelRunner:
    """One model on one device.

    Args:
        config: of the engine.
        model: loaded, on the device.
        device: where it is.
        grammars: of the worker, which begin to load before the model; None makes new ones.
    """

    adapts_experts: ClassVar[bool] = True
    """Adapters may change experts unless `lora_target_modules` says otherwise."""

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        device: torch.device,
        grammars: GrammarMatchers | None = None,
    ) -> None:
        self.model = model
        self.stage = model.stage
        self._dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self._launch_holder = share_context(model)
        self.device = device
        self.block_size = config.cache.block_size
        self.cache_layout = self._plan_cache(config)
        self.batch = self._make_batch(config)
        self.sampling, self.sampler = self._make_sampler(config)
        self.parts = RowParts(self._make_parts(config, grammars or GrammarMatchers(config)))
        self.planner: LaunchPlanner = RaggedPlanner()
        self.vocab_size = config.model.resolved_arch.vocab_size
        self.drafter: Drafter | None = None
        """Makes the drafts of steps; None: steps bring them."""
        self.stage_drafts: StageDrafts | None = None
        """Carries drafts of a model beside this one between stages; None: there is no such model,
        or one stage."""
        if self.stage.count > 1 and config.speculative.draft_model is not None:
            self.stage_drafts = StageDrafts(config, self.stage, self.batch, device)
        self.reader: StateReader | None = None
        """Takes the hidden states of all launches; None: nothing does."""
        self._inner_layers = InnerLayers.of(config, self.stage)
        self._inner: list[Tensor] = []
        """What the last forward pass has of inner layers, up to those of this stage."""
        self._in_flight: StepHandle | None = None
        self._awaited: dict[int, list[ExpectedTokens]] = {}
        """Tokens that the last stage samples, by the id of their step."""
        self._num_steps = 0
        self._num_useful_tokens = 0

    def _make_batch(self, config: VllmConfig) -> InputBatch:
        return InputBatch(
            config.scheduler.max_num_seqs,
            config.scheduler.max_model_len,
            config.max_blocks_per_request,
            len(self.cache_layout.groups),
        )

    def _make_sampler(self, config: VllmConfig) -> tuple[SamplingState, Sampler]:
        vocab_size = config.model.resolved_arch.vocab_size
        return SamplingState(config.scheduler.max_num_seqs, vocab_size, self.device), Sampler()

    def _make_parts(self, config: VllmConfig, grammars: GrammarMatchers) -> Iterator[RowPart]:
        """Make the parts of what requests of this engine may bring, on this stage."""
        samples = self.stage.is_last
        if samples or makes_drafts(config, self.stage):
            yield SamplingRows(self.sampling, grammars, samples)
        yield self._make_prompt_logprobs()
        if config.model.enable_prompt_embeds:
            yield from self._make_embeddings(config)
        if config.lora.enable_lora:
            reader = adapter_reader(config, self.model, has_experts=self.adapts_experts)
            yield self._make_adapters(config, reader)

    def _make_prompt_logprobs(self) -> PromptLogprobs:
        return PromptLogprobs(self.model, self.batch, self.sampler, self._running_head)

    def _make_embeddings(self, config: VllmConfig) -> Iterator[EmbeddingRows]:
        if self.stage.is_first:
            yield EmbeddingRows(self.model, config.scheduler.max_num_seqs, self.device)

    def _make_adapters(self, config: VllmConfig, reader: AdapterReader) -> Adapters:
        return RaggedRows(config, reader)

    def _plan_cache(self, config: VllmConfig) -> KVCacheLayout:
        """How the blocks of the KV cache are shared out. The stages of a pipeline, and a draft
        model beside its target, have one set of block tables and need not have the same windows,
        so they keep all tokens."""
        has_drafter = config.speculative.draft_model is not None
        keeps_all = has_drafter or self.stage.count > 1
        return cache_layout(config, self.attention_layers, cache_dtype(config), keeps_all=keeps_all)

    @property
    def attention_layers(self) -> list[CachedLayer]:
        """The layers that own a KV cache, in the order of the model."""
        return layers_with_cache(self.model)

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Start a step. The step before may be in flight; it is waited for if its tokens are needed
        on the host."""
        if self._in_flight is not None and self._needs_tokens(step):
            self._in_flight.result()
        self.parts.note_step()
        self._update_state(step)
        if self.drafter is not None:
            self.drafter.propose(step)
        if self.stage_drafts is not None:
            self.stage_drafts.exchange(step)
        self._num_steps += 1
        self._num_useful_tokens += step.num_tokens
        self._in_flight = StepHandle(self._start(step), before=self._in_flight)
        return self._in_flight

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Launch a step. Calling the result waits for its tokens."""
        if step.num_decodes > 1:
            return self._start_decodes(step)
        launches = [self._launch(launch) for launch in self.planner.plan(step)]
        if not self.stage.is_last:
            expected = [each for _, each in launches]
            if any(len(each.rows) for each in expected):
                self._awaited[step.step_id] = expected
            launches = []
        return lambda: self._collect(step.step_id, launches)

    def _start_decodes(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Launch the decodes of a step one after the other. Where their tokens are known at once,
        the first that ends a row is the last."""
        waits = self._needs_tokens(step)
        decodes: list[tuple[list[PendingLaunch], ModelRunnerOutput | None]] = []
        for index in range(step.num_decodes):
            part = msgspec.structs.replace(
                step, num_decodes=1, num_computed_tokens=step.num_computed_tokens + np.int32(index)
            )
            launches = [self._launch(launch) for launch in self.planner.plan(part)]
            output = self._collect(step.step_id, launches) if waits else None
            decodes.append((launches, output))
            if output is None:
                continue
            if output.errors or self.batch.ends(output.rows, output.token_ids):
                self._skip_decodes(step, index + 1)
                break
        return lambda: self._join_decodes(step.step_id, decodes)

    def _skip_decodes(self, step: SchedulerOutput, num_done: int) -> None:
        """Only the first decodes of a step have run."""
        self._num_useful_tokens -= (step.num_decodes - num_done) * len(step.rows)

    def _join_decodes(
        self,
        step_id: int,
        decodes: list[tuple[list[PendingLaunch], ModelRunnerOutput | None]],
    ) -> ModelRunnerOutput:
        """The results of several decodes of the same rows. A row whose sampling fails behind its
        first token ends before it: it fails when it is run again, with the tokens before it
        sent."""
        outputs = [
            self._collect(step_id, launches) if output is None else output
            for launches, output in decodes
        ]
        first = outputs[0]
        counts = np.full(len(first.rows), len(outputs), np.int32)
        for index in range(len(outputs) - 1, 0, -1):
            if outputs[index].errors:
                failed = np.isin(first.rows, list(outputs[index].errors))
                counts[failed] = index
                for _, expected in decodes[index][0]:
                    is_failed = np.isin(expected.rows, first.rows[failed])
                    self._retract(expected, np.flatnonzero(is_failed).astype(np.int32))
        token_ids = np.stack([output.token_ids for output in outputs], 1)
        is_output = np.arange(len(outputs)) < counts[:, None]
        return ModelRunnerOutput(
            step_id=step_id,
            rows=first.rows,
            token_ids=token_ids[is_output],
            num_tokens=counts,
            errors=first.errors,
        )

    def _retract(self, expected: ExpectedTokens, places: IntArray) -> None:
        """Take tokens of some rows back; see `InputBatch.retract`."""
        self.batch.retract(expected, places)

    def record_tokens(self, tokens: StepTokens) -> None:
        """See `Worker.record_tokens`."""
        start = first = 0
        for expected in self._awaited.pop(tokens.step_id):
            end = start + len(expected.rows)
            counts = None if tokens.num_tokens is None else tokens.num_tokens[start:end]
            stop = first + (end - start if counts is None else int(counts.sum()))
            if expected.num_drafts is None:
                counts = None
            self.batch.record(expected, tokens.token_ids[first:stop], counts)
            start, first = end, stop

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
        self.parts.update(step)
        self.batch.update(step)

    @torch.inference_mode()
    def _run(self, launch: Launch) -> LaunchResult:
        model_input = build_ragged_input(
            self.batch,
            launch,
            self.block_size,
            self.device,
            self.parts.of_launch(launch),
            has_states=bool(self.cache_layout.state_layers),
        )
        num_drafts = model_input.num_drafts
        if not self.stage.is_last:
            hidden_states = self._forward(model_input)
            if self._inner:
                hidden_states = torch.cat((hidden_states, *self._inner), dim=1)
            self.stage.connected.send(hidden_states)
            return LaunchResult.unsampled(launch.rows[model_input.sampled], num_drafts)
        drafts = self._followed_drafts(launch.rows[model_input.sampled], num_drafts)
        self.sampling.start_masks(launch.rows[model_input.sampled], drafts)
        hidden_states = self._forward(model_input)
        if self.reader is not None:
            self.reader.read(launch, hidden_states, self._inner)
        pending = self.parts.read(launch, hidden_states)
        rows = launch.rows[model_input.sampled]
        num_output = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
        if num_drafts is not None:
            rows = np.repeat(rows, num_drafts + 1)
            num_output = np.repeat(num_output, num_drafts + 1) + positions_within(num_drafts + 1)
        sampled = None
        if len(rows):
            if model_input.logits_indices is not None:
                hidden_states = hidden_states[model_input.logits_indices]
            with self._running_head(rows):
                logits = self.model.compute_logits(hidden_states)
            sampled = self.sampler(logits, self.sampling.metadata(rows, num_output, drafts=drafts))
        indices = np.arange(len(rows), dtype=np.int32)
        return LaunchResult(rows, indices, sampled, pending, num_drafts=num_drafts)

    def _running_head(self, rows: IntArray) -> AbstractContextManager[None]:
        """Return the context in which the output head runs for hidden states of rows [N]."""
        parts = self.parts.of_head(rows)
        if not parts:
            return nullcontext()
        context = LaunchContext(None, torch.empty(0, dtype=torch.int64), **parts)
        return self._launch_holder.running(context)

    def _followed_drafts(self, rows: IntArray, num_drafts: IntArray | None) -> RowDrafts | None:
        """The drafts of a launch, where the sampling of a row depends on them.

        Args:
            rows: [m] that sample.
            num_drafts: [m] of each; None: no row has drafts.
        """
        if num_drafts is None or not self.sampling.follows_output(rows[num_drafts > 0]):
            return None
        return self.batch.drafts(rows[num_drafts > 0], num_drafts[num_drafts > 0])

    def _forward(self, model_input: ModelInput) -> Tensor:
        context = model_input.context
        with self._launch_holder.running(context):
            inputs = self._inputs(model_input.input_ids)
            if not self._inner_layers.own:
                return self.model(inputs, context.positions)
            result, inner = self.model.forward_and_inputs(
                inputs, context.positions, self._inner_layers.own
            )
            self._inner += inner
            return result

    def _inputs(self, input_ids: Tensor) -> Tensor:
        """What the stage of this rank takes: token ids [T], or the hidden states [T, hidden] of the
        stage before. The inputs of inner layers that come with them begin `_inner`."""
        self._inner = []
        if self.stage.is_first:
            return input_ids
        inputs, self._inner = self._inner_layers.split(self._receive(len(input_ids)))
        return inputs

    def _receive(self, num_tokens: int) -> Tensor:
        """What the stage before has sent for a launch: hidden states, and inputs of inner
        layers."""
        size = self.model.arch.hidden_size * (1 + self._inner_layers.num_before)
        return self.stage.receive(num_tokens, size, self._dtype, self.device)

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
            host_ids, counts = result.read(expected)
            found = self.sampling.logprob_rows(result.rows, result.sampled)
            sampled = host_ids[result.indices]
            if counts is not None:
                assert expected.num_drafts is not None
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
            errors.update(self.parts.errors_of(result.rows))
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
