"""Runs scheduler steps on the CPU. Where the model allows it, a forward pass, or a whole decode
step, is one call of C++.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm.attention import LaunchAdapters, LaunchParts, RaggedMetadata, ReplacedTokens
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.launches import RaggedAdapters
from vllm.messages import IntArray, ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.cpu.decode_step import FusedDecodeStep, RowArrays
from vllm.ops.cpu.program import Program
from vllm.ops.low_rank import AdaptedRows
from vllm.sample.cpu_sampler import make_sampler
from vllm.sample.features import DISTRIBUTION, Feature
from vllm.sample.metadata import FeatureArray
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState, invalid_rows
from vllm.structured_output.matchers import GrammarMatchers
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import ModelInput
from vllm.worker.model_runner import ModelRunner

logger = init_logger(__name__)


class CPUModelRunner(ModelRunner):
    """A `ModelRunner` that fuses its model at the first step, when caches are bound.

    Args: see `ModelRunner`.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        device: torch.device,
        grammars: GrammarMatchers | None = None,
    ) -> None:
        super().__init__(config, model, device, grammars)
        self._is_fused_known = False
        self._fused: Program | None = None
        self._decode_step: FusedDecodeStep | None = None
        self._received: Tensor | None = None
        """Of the stage before, for a step that turned out not to run in one call."""

    def _make_sampler(self, config: VllmConfig) -> tuple[SamplingState, Sampler]:
        vocab_size = config.model.resolved_arch.vocab_size
        return make_sampler(config.scheduler.max_num_seqs, vocab_size, self.device)

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        self._fuse()
        if self._decode_step is None or step.new_requests:
            return super()._start(step)
        rows, counts, num_drafts = step.rows, step.num_scheduled_tokens, 0
        if step.draft_token_ids is not None:
            num_drafts = len(step.draft_token_ids)
        parts = self.parts.of_launch(Launch(rows, step.num_computed_tokens, counts))
        if parts and not self._runs_in_one_call(parts, rows):
            return super()._start(step)
        given = None
        if not self.stage.is_first:
            num_tokens = int(counts.sum())
            if num_tokens != len(rows) + num_drafts:  # it has prompts
                return super()._start(step)
            given = self._receive(num_tokens)
        found = self._decode_step.run(
            rows,
            step.num_computed_tokens,
            counts,
            _adapted_rows(parts.get("adapters")),
            num_drafts=num_drafts,
            num_decodes=step.num_decodes,
            given=given,
        )
        if found is None:
            self._received = given
            return super()._start(step)
        self.batch.note_values(rows)
        if self.reader is not None and self._fused is not None:
            for launch in self.planner.plan(step):
                self.reader.read(launch, self._decode_step.hidden, self._fused.tapped)
        if step.num_decodes > 1:
            self._skip_decodes(step, self._decode_step.num_done)
        output = self._output(step, *found)
        return lambda: output

    def _runs_in_one_call(self, parts: LaunchParts, rows: IntArray) -> bool:
        """Return whether a step of decodes in one call takes what these rows bring."""
        has_others = "replaced" in parts or _need_modules(parts.get("adapters"))
        return not has_others and not self.parts.of_head(rows)

    def _output(
        self, step: SchedulerOutput, token_ids: IntArray, counts: IntArray
    ) -> ModelRunnerOutput:
        """The result of a step in one call, which `FusedDecodeStep.run` has given."""
        assert self._decode_step is not None
        errors = {}
        if self._decode_step.num_invalid:
            errors = invalid_rows(np.repeat(step.rows, counts), token_ids)
            token_ids = np.maximum(token_ids, 0)
        has_counts = step.num_decodes > 1 or step.num_draft_tokens is not None
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=step.rows,
            token_ids=token_ids,
            num_tokens=counts if has_counts else None,
            errors=errors,
        )

    def _receive(self, num_tokens: int) -> Tensor:
        received, self._received = self._received, None
        return super()._receive(num_tokens) if received is None else received

    def _forward(self, model_input: ModelInput) -> Tensor:
        self._fuse()
        context = model_input.context
        metadata = context.attention
        if (
            self._fused is None
            or type(metadata) is not RaggedMetadata
            or _need_modules(context.adapters)
        ):
            return super()._forward(model_input)
        replaced = context.replaced
        embeddings = None
        if isinstance(replaced, ReplacedTokens):
            embeddings = replaced.indices, replaced.embeddings
        slot_mapping, block_tables = metadata.slot_mapping, metadata.block_tables
        if metadata.more_groups:
            more_slots, more_tables = zip(*metadata.more_groups, strict=True)
            slot_mapping = torch.stack([slot_mapping, *more_slots])
            block_tables = torch.stack([block_tables, *more_tables])
        result = self._fused.forward(
            self._inputs(model_input.input_ids),
            context.positions,
            slot_mapping,
            block_tables,
            metadata.seq_lens,
            torch.from_numpy(metadata.query_start_loc),
            metadata.num_decodes,
            embeddings,
            _adapted_rows(context.adapters),
        )
        self._inner += self._fused.tapped
        return result

    def _row_features(self) -> FeatureArray:
        """What a step of decodes in one call knows of each row."""
        features, _, _ = self.sampling.row_arrays
        return features

    def _fuse(self) -> None:
        """Find out which parts of the model can run in one call. Called once."""
        if self._is_fused_known:
            return
        self._is_fused_known = True
        self._fused = fuse(self.model, self._inner_layers.own)
        if self._fused is None or not self.stage.is_last or self._inner_layers.num_before:
            return  # only the last stage samples; inputs of inner layers come with hidden states
        head = fuse_head(self.model, self._fused)
        if head is None:
            return
        batch = self.batch
        _, params, keys = self.sampling.row_arrays
        self._decode_step = FusedDecodeStep(
            self._fused,
            head,
            RowArrays(
                token_ids=batch.token_ids,
                num_tokens=batch.num_tokens,
                num_prompt_tokens=batch.num_prompt_tokens,
                end_tokens=batch.end_tokens,
                block_tables=batch.block_tables,
                features=self._row_features(),
                params=params,
                keys=keys,
            ),
            known_features=DISTRIBUTION,
            random_feature=Feature.RANDOM,
            gives_hidden=self.reader is not None,
        )


def _need_modules(adapters: LaunchAdapters | None) -> bool:
    """Return whether adapters change what no program changes."""
    return isinstance(adapters, RaggedAdapters) and adapters.need_modules


def _adapted_rows(adapters: LaunchAdapters | None) -> AdaptedRows | None:
    """Return adapters as a program takes them."""
    return adapters.rows if isinstance(adapters, RaggedAdapters) else None
