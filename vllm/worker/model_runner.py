"""Runs scheduler steps: batch state, launches, forward, sampling. Each of them is an object of
its own; this is the order of the calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.attention import Attention, attention_metadata
from vllm.config import VllmConfig
from vllm.messages import IntArray, LogprobRows, ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.worker.input_batch import InputBatch
from vllm.worker.launch import Launch, LaunchPlanner, RaggedPlanner
from vllm.worker.model_input import ModelInput, build_ragged_input
from vllm.worker.prompt_logprobs import PromptLogprobs


class StepHandle:
    """A step in flight.

    `result` waits for the device and returns the tokens; further calls return the same.
    """

    def __init__(self, finish: Callable[[], ModelRunnerOutput]) -> None:
        self._finish = finish
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """The result of the step; waits for it."""
        if self._output is None:
            self._output = self._finish()
        return self._output


@dataclass(frozen=True, slots=True)
class _LaunchResult:
    """What one launch leaves on the device."""

    rows: IntArray
    """[m] rows that sampled."""
    sampled: SamplerOutput | None
    prompt_logprobs: dict[int, LogprobRows]


class ModelRunner:
    """One model on one device.

    Args:
        config: of the engine.
        model: loaded, on the device.
        device: where it is.
    """

    def __init__(self, config: VllmConfig, model: CausalLM, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.block_size = config.cache.block_size
        max_num_seqs = config.scheduler.max_num_seqs
        self.batch = InputBatch(
            max_num_seqs, config.scheduler.max_model_len, config.max_blocks_per_request
        )
        vocab_size = config.model.resolved_arch.vocab_size
        self.sampling = SamplingState(max_num_seqs, vocab_size, device)
        self.sampler = Sampler()
        self.prompt_logprobs = PromptLogprobs(model)
        self.planner: LaunchPlanner = RaggedPlanner()
        self._in_flight: StepHandle | None = None

    @property
    def attention_layers(self) -> list[Attention]:
        """The layers that own a KV cache, in the order of the model."""
        return [module for module in self.model.modules() if isinstance(module, Attention)]

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Start a step.

        Inputs of a step are built from the tokens of the one before, so one that is still in
        flight is waited for first.
        """
        if self._in_flight is not None:
            self._in_flight.result()
        self._update_state(step)
        results = [self._run(launch) for launch in self.planner.plan(step)]
        self._in_flight = StepHandle(lambda: self._collect(step.step_id, results))
        return self._in_flight

    def _update_state(self, step: SchedulerOutput) -> None:
        for row in step.freed_rows:
            self.sampling.remove(row)
            self.prompt_logprobs.remove(row)
        self.batch.update(step)
        for new in step.new_requests:
            self.sampling.add(new.row, new.request, new.output_token_ids)
            self.prompt_logprobs.add(new.row, new.request)

    @torch.inference_mode()
    def _run(self, launch: Launch) -> _LaunchResult:
        model_input = build_ragged_input(self.batch, launch, self.block_size, self.device)
        hidden_states = self._forward(model_input)
        prompt_logprobs = self.prompt_logprobs.compute(self.batch, launch, hidden_states)
        rows = launch.rows[model_input.sampled]
        sampled = None
        if len(rows):
            if model_input.logits_indices is not None:
                hidden_states = hidden_states[model_input.logits_indices]
            logits = self.model.compute_logits(hidden_states)
            num_output = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
            sampled = self.sampler(logits, self.sampling.metadata(rows, num_output))
        return _LaunchResult(rows, sampled, prompt_logprobs)

    def _forward(self, model_input: ModelInput) -> Tensor:
        with attention_metadata(model_input.metadata):
            return self.model(model_input.input_ids, model_input.positions)

    def _collect(self, step_id: int, results: list[_LaunchResult]) -> ModelRunnerOutput:
        """Copy the tokens to the host and append them to their rows."""
        self._in_flight = None
        parts: list[IntArray] = []
        logprobs: dict[int, LogprobRows] = {}
        prompt_logprobs: dict[int, LogprobRows] = {}
        errors: dict[int, str] = {}
        for result in results:
            prompt_logprobs.update(result.prompt_logprobs)
            if result.sampled is None:
                continue
            token_ids = result.sampled.token_ids.cpu().numpy().astype(np.int32)
            self.batch.record(result.rows, token_ids)
            self.sampling.record(result.rows, token_ids)
            parts.append(token_ids)
            logprobs.update(self.sampling.logprob_rows(result.rows, result.sampled))
            errors.update(self.sampling.errors_of(result.rows, result.sampled))
        rows = [result.rows for result in results if result.sampled is not None]
        return ModelRunnerOutput(
            step_id=step_id,
            rows=np.concatenate(rows) if rows else np.empty(0, np.int32),
            token_ids=np.concatenate(parts) if parts else np.empty(0, np.int32),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )
