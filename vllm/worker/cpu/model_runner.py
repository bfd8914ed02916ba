"""Runs scheduler steps on the CPU; a whole step of decodes is one C++ call if possible."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from vllm.attention import LaunchParts
from vllm.config import VllmConfig
from vllm.messages import IntArray, LogprobRows, ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.cpu_sampler import make_sampler
from vllm.sample.features import DISTRIBUTION, MASKS, Feature
from vllm.sample.logprobs import split_rows
from vllm.sample.metadata import LogprobPlan
from vllm.sample.restrictions.masks import RowDrafts
from vllm.sample.state import invalid_rows
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.ragged import positions_within
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import ModelInput
from vllm.worker.cpu.launches import RaggedLaunches, RaggedOutput, adapted_rows, need_modules
from vllm.worker.model_runner import ModelRunner, Sampled, sampling_rows
from vllm.worker.parts.adapters import RaggedRows, adapter_reader
from vllm.worker.parts.embedding_rows import EmbeddingRows, takes_embeddings
from vllm.worker.parts.encoded_media import encoded_media
from vllm.worker.parts.image_attention import ImageAttention
from vllm.worker.parts.item_rows import item_rows
from vllm.worker.parts.position_rows import PositionRows
from vllm.worker.parts.prompt_logprobs import PromptLogprobs
from vllm.worker.parts.row_parts import OutputHead, RowPart, RowParts
from vllm.worker.runner import RunnerParts, plan_batch

_FEATURES_IN_ONE_CALL = DISTRIBUTION | MASKS | Feature.LOGPROBS
"""Sampling features with which a step of decodes may run in one C++ call."""


class RaggedSampling:
    """Samples from the hidden states of ragged forward passes; see `SamplesTokens`.

    Args:
        config: config of the engine.
        device: device of the logits.
        head: the output head, which computes logits.
    """

    def __init__(self, config: VllmConfig, device: torch.device, head: OutputHead) -> None:
        vocab_size = config.model.resolved_arch.vocab_size
        self.state, self.sampler = make_sampler(config.scheduler.max_num_seqs, vocab_size, device)
        self._head = head

    def sample(
        self,
        given: ModelInput,
        output: RaggedOutput,
        num_output: IntArray,
        drafts: RowDrafts | None,
    ) -> Sampled:
        """Compute logits for the tokens that sample, and sample the next tokens."""
        rows, num_output, num_drafts = given.rows, num_output[given.sampled], given.num_drafts
        if num_drafts is not None:
            sizes = num_drafts + 1
            rows = np.repeat(rows, sizes)
            num_output = np.repeat(num_output, sizes) + positions_within(sizes)
        sampled = None
        if len(rows):
            hidden_states = output.hidden_states
            if given.logits_indices is not None:
                hidden_states = hidden_states[given.logits_indices]
            logits = self._head(hidden_states, rows)
            sampled = self.sampler(logits, self.state.metadata(rows, num_output, drafts=drafts))
        return Sampled(rows, np.arange(len(rows), dtype=np.int32), sampled)


class CPUModelRunner(ModelRunner):
    """A `ModelRunner` that records its programs at the first step, when caches are bound.

    Args:
        config: config of the engine.
        model: loaded.
        device: the device of the model.
        grammars: grammars of the worker; their modules are loaded while the model is loaded.
    """

    launches: RaggedLaunches

    def __init__(
        self, config: VllmConfig, model: CausalLM, device: torch.device, grammars: GrammarMatchers
    ) -> None:
        layout, batch = plan_batch(config, model)
        head = OutputHead(model)
        sampling = RaggedSampling(config, device, head)

        def rows() -> Iterator[RowPart]:
            yield from sampling_rows(config, model, sampling.state, grammars)
            yield PromptLogprobs(batch, sampling.sampler, head)
            if model.stage.is_first and takes_embeddings(config):
                media = encoded_media(model)
                yield EmbeddingRows(model, config.scheduler.max_num_seqs, device, media)
            if (items := item_rows(model, config.scheduler.max_num_seqs)) is not None:
                yield items
            if model.arch.num_positions:
                yield PositionRows(model.arch, config.scheduler.max_num_seqs, device)
            if model.arch.media_sees_ahead:
                yield ImageAttention(config.scheduler.max_num_seqs)
            if config.lora.enable_lora:
                yield RaggedRows(config, adapter_reader(config, model))

        head.parts = parts = RowParts(rows())
        launches = RaggedLaunches(config, model, device, batch, parts)
        made = RunnerParts(cache_layout=layout, batch=batch, rows=parts, launches=launches)
        super().__init__(config, model, made, sampling)

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        features = self.sampling.row_arrays.features
        self.launches.fuse(self.sampling, features, _FEATURES_IN_ONE_CALL)
        output = self._decode(step)
        return super()._start(step) if output is None else lambda: output

    def _decode(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step of decodes in one C++ call.

        None: not possible, it must run as a forward pass.
        """
        launches = self.launches
        if step.new_requests or not any(launches.decode_steps):
            return None
        rows, counts, num_drafts = step.rows, step.num_scheduled_tokens, 0
        if step.draft_token_ids is not None:
            num_drafts = len(step.draft_token_ids)
        parts = self.parts.of_launch(Launch(rows, step.num_computed_tokens, counts))
        decode_step = launches.decode_steps.of(parts.get("items"))
        if decode_step is None or (parts and not self._runs_in_one_call(parts, rows)):
            return None
        given = None
        if not self.stage.is_first:
            num_tokens = int(counts.sum())
            if num_tokens != len(rows) + num_drafts:  # some row computes a prompt
                return None
            given = launches.receive(num_tokens)
        plan = self.sampling.logprob_plan(rows)
        if plan is not None and not self._gives_logprobs(step, plan):
            launches.keep_received(given)
            return None
        self.sampling.update_masks(rows)
        found = decode_step.run(
            rows,
            step.num_computed_tokens,
            counts,
            adapted_rows(parts.get("adapters")),
            num_drafts=num_drafts,
            num_decodes=step.num_decodes,
            given=given,
            gives_logits=plan is not None,
        )
        if found is None:
            launches.keep_received(given)
            return None
        self.batch.note_values(rows)
        program = launches.programs.of(parts.get("items"))
        if launches.reader is not None and program is not None:
            for launch in launches.plan(step):
                launches.reader.read(launch, decode_step.hidden, program.tapped)
        if step.num_decodes > 1:
            self._skip_decodes(step, decode_step.num_done)
        token_ids, num_tokens_of = found
        errors = {}
        if decode_step.num_invalid:
            errors = invalid_rows(np.repeat(rows, num_tokens_of), token_ids)
            token_ids = np.maximum(token_ids, 0)
        self.sampling.record(np.repeat(rows, num_tokens_of), token_ids)
        logprobs = {}
        if plan is not None:
            logprobs = self._logprobs(rows, decode_step.logits, token_ids, plan)
        has_counts = step.num_decodes > 1 or step.num_draft_tokens is not None
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=rows,
            token_ids=token_ids,
            num_tokens=num_tokens_of if has_counts else None,
            logprobs=logprobs,
            errors=errors,
        )

    def _gives_logprobs(self, step: SchedulerOutput, plan: LogprobPlan) -> bool:
        """Return whether the logits of a decode step in one call have the log-probabilities.

        They do not if there are several for a request, or if they lack the tokens that the request
        itself forbids.
        """
        features = self.sampling.row_arrays.features[step.rows[plan.indices]]
        is_single = step.num_decodes == 1 and step.num_draft_tokens is None
        return is_single and not (features & Feature.MASK).any()

    def _logprobs(
        self, rows: IntArray, logits: torch.Tensor, token_ids: IntArray, plan: LogprobPlan
    ) -> dict[int, LogprobRows]:
        """Return the log-probabilities of the tokens [n] of requests [n], by batch index."""
        tokens = torch.from_numpy(token_ids)
        if plan.rows is not None:
            logits, tokens = logits[plan.rows], tokens[plan.rows]
        found = self.tokens.sampler.gather_logprobs(logits, tokens, plan.width)
        return split_rows(found, rows, plan)

    def _runs_in_one_call(self, parts: LaunchParts, rows: IntArray) -> bool:
        """Return whether a decode step in one call supports everything that these requests
        bring.
        """
        has_others = "replaced" in parts or need_modules(parts.get("adapters"))
        return not has_others and not self.parts.of_head(rows)
