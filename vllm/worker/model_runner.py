"""Runs scheduler steps of a model that generates tokens.

It makes drafts, samples from each forward pass, and records the tokens in the batch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from torch import Tensor

from vllm.config import VllmConfig
from vllm.messages import IntArray, LogprobRows, ModelRunnerOutput, SchedulerOutput, StepTokens
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.restrictions.masks import RowDrafts
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import ExpectedTokens
from vllm.worker.batch.launch import Launch, LaunchInput
from vllm.worker.batch.launch_result import LaunchResult, PendingLaunch, join_logprobs
from vllm.worker.drafts.stage_drafts import StageDrafts, makes_drafts
from vllm.worker.parts.row_parts import SamplingRows
from vllm.worker.runner import Runner, RunnerParts, run_launch


class Drafter(Protocol):
    """Makes draft tokens with a separate model."""

    def propose(self, step: SchedulerOutput) -> None:
        """Write the drafts of a step into the batch, after the known tokens of their requests."""
        ...


class Sampled(NamedTuple):
    """The tokens sampled from a forward pass: the fields of `LaunchResult`."""

    rows: IntArray
    indices: IntArray
    sampled: SamplerOutput | None
    accepted: Tensor | None = None


class SamplesTokens(Protocol):
    """Samples tokens from the results of forward passes on a device.

    Attributes:
        state: sampling parameters of the requests.
        sampler: sampler of the device.
    """

    state: SamplingState
    sampler: Sampler

    def sample(
        self, given: Any, output: Any, num_output: IntArray, drafts: RowDrafts | None
    ) -> Sampled:
        """Sample a token for each request that samples, and one after each of its drafts.

        Args:
            given: the inputs of the forward pass, of n requests.
            output: output of the forward pass.
            num_output: [n] index of the output token that each request samples first.
            drafts: drafts of requests whose sampling depends on them.
        """
        ...


def sampling_rows(
    config: VllmConfig, model: CausalLM, sampling: SamplingState, grammars: GrammarMatchers
) -> Iterator[SamplingRows]:
    """Yield the part with sampling parameters, if this pipeline stage samples tokens or drafts."""
    samples = model.stage.is_last
    if samples or makes_drafts(config, model.stage):
        yield SamplingRows(sampling, grammars, samples)


class ModelRunner(Runner):
    """Runs one generating model on one device.

    Args:
        config: config of the engine.
        model: loaded, on the device.
        made: the parts of the runner.
        sampling: samples on the device.
    """

    model: CausalLM

    def __init__(
        self, config: VllmConfig, model: CausalLM, made: RunnerParts, sampling: SamplesTokens
    ) -> None:
        super().__init__(model, made)
        self.tokens, self.sampling = sampling, sampling.state
        self.vocab_size = config.model.resolved_arch.vocab_size
        self.drafter: Drafter | None = None
        """Makes the drafts of steps; None: steps bring them."""
        self.stage_drafts: StageDrafts | None = None
        """Sends drafts of a draft model between stages; None: there is no such model, or only one
        stage."""
        if self.stage.count > 1 and config.speculative.draft_model is not None:
            self.stage_drafts = StageDrafts(config, self.stage, self.batch, sampling.state.device)
        self._awaited: dict[int, list[ExpectedTokens]] = {}
        """Tokens that the last stage samples, by the id of their step."""

    def _prepare_step(self, step: SchedulerOutput) -> None:
        if self.drafter is not None:
            self.drafter.propose(step)
        if self.stage_drafts is not None:
            self.stage_drafts.exchange(step)

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start the forward passes of a step; the returned function waits for the tokens."""
        if step.num_decodes > 1:
            return self._start_decodes(step)
        launches = [self._launch(launch) for launch in self.launches.plan(step)]
        # Read errors now: a later step may remove a row before the result of this step is read.
        failed = self.parts.errors_of(step.rows)
        if not self.stage.is_last:
            expected = [each for _, each in launches]
            if any(len(each.rows) for each in expected):
                self._awaited[step.step_id] = expected
            launches = []
        return lambda: self._collect(step.step_id, launches, failed)

    def _start_decodes(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start the decodes of a step one after another.

        If their tokens are known at once, no decode follows the first one that finishes a request.
        """
        waits = self._needs_tokens(step)
        decodes: list[tuple[list[PendingLaunch], ModelRunnerOutput | None]] = []
        failed: dict[int, str] = {}
        for index in range(step.num_decodes):
            part = msgspec.structs.replace(
                step, num_decodes=1, num_computed_tokens=step.num_computed_tokens + np.int32(index)
            )
            launches = [self._launch(launch) for launch in self.launches.plan(part)]
            failed = failed or self.parts.errors_of(step.rows)
            output = self._collect(step.step_id, launches, failed) if waits else None
            decodes.append((launches, output))
            if output is None:
                continue
            if output.errors or self.batch.ends(output.rows, output.token_ids):
                self._skip_decodes(step, index + 1)
                break
        return lambda: self._join_decodes(step.step_id, decodes, failed)

    def _skip_decodes(self, step: SchedulerOutput, num_done: int) -> None:
        """Correct the count of tokens if only the first `num_done` decodes of a step have run."""
        self._num_useful_tokens -= (step.num_decodes - num_done) * len(step.rows)

    def _join_decodes(
        self,
        step_id: int,
        decodes: list[tuple[list[PendingLaunch], ModelRunnerOutput | None]],
        failed_rows: Mapping[int, str],
    ) -> ModelRunnerOutput:
        """Join the results of several decodes of the same requests.

        If sampling fails after the first token of a request, its output ends before that token. It
        fails when it runs again, after the earlier tokens were sent.
        """
        outputs = [
            self._collect(step_id, launches, failed_rows) if output is None else output
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

    def _retract(self, expected: ExpectedTokens, indices: IntArray) -> None:
        """Remove the last tokens of some requests; see `InputBatch.retract`."""
        self.batch.retract(expected, indices)

    def record_tokens(self, tokens: StepTokens) -> None:
        """Record the tokens that another pipeline stage has sampled; see `Worker.record_tokens`."""
        start = first = 0
        for expected in self._awaited.pop(tokens.step_id):
            end = start + len(expected.rows)
            counts = None if tokens.num_tokens is None else tokens.num_tokens[start:end]
            stop = first + (end - start if counts is None else int(counts.sum()))
            if expected.num_drafts is None:
                counts = None
            self.batch.record(expected, tokens.token_ids[first:stop], counts)
            start, first = end, stop

    def _launch(self, launch: Launch) -> PendingLaunch:
        result = run_launch(launch, self.launches, self._begin)
        return result, self.batch.expect(result.sampled_rows, result.num_drafts)

    def _begin(self, given: LaunchInput) -> Callable[[Any], LaunchResult]:
        """Start to fill grammar masks; return a function that samples from the output."""
        launch, rows, num_drafts = given.launch, given.rows, given.num_drafts
        if not self.stage.is_last:
            return lambda _: LaunchResult.unsampled(rows, num_drafts)
        drafts = self._followed_drafts(rows, num_drafts)
        self.sampling.start_masks(rows, drafts)

        def finish(output: Any) -> LaunchResult:
            pending = self.parts.read(launch, output.hidden_states)
            num_output = launch.num_known - self.batch.num_prompt_tokens[launch.rows]
            found = self.tokens.sample(given, output, num_output, drafts)
            return LaunchResult(
                found.rows,
                found.indices,
                found.sampled,
                pending,
                num_drafts=num_drafts,
                accepted=found.accepted,
            )

        return finish

    def _followed_drafts(self, rows: IntArray, num_drafts: IntArray | None) -> RowDrafts | None:
        """Return the drafts of a forward pass if the sampling of some request depends on them.

        Args:
            rows: [m] batch indices of the requests that sample.
            num_drafts: [m] drafts of each; None: no request has drafts.
        """
        if num_drafts is None or not self.sampling.follows_output(rows[num_drafts > 0]):
            return None
        return self.batch.drafts(rows[num_drafts > 0], num_drafts[num_drafts > 0])

    def _collect(
        self, step_id: int, launches: list[PendingLaunch], failed: Mapping[int, str]
    ) -> ModelRunnerOutput:
        """Copy the tokens to the host, and record them in the batch.

        Args:
            step_id: id of the step.
            launches: forward passes of the step, on its last stage.
            failed: why requests have failed before they sampled, by batch index.
        """
        row_parts: list[IntArray] = []
        token_parts: list[IntArray] = []
        count_parts: list[IntArray] = []
        has_drafts = False
        logprobs: dict[int, LogprobRows] = {}
        prompt_logprobs: defaultdict[int, list[LogprobRows]] = defaultdict(list)
        errors = dict(failed)
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
            found_errors = self.sampling.errors_of(result.rows, result.sampled, host_ids)
            errors = {**found_errors, **errors}
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
