"""Runs the draft model on the CPU: a second, smaller model that predicts draft tokens."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm.attention import RaggedMetadata
from vllm.config import VllmConfig
from vllm.messages import BoolArray, IntArray
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.features import DISTRIBUTION
from vllm.sample.metadata import FeatureArray
from vllm.utils.ragged import split_spans
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import ModelInput
from vllm.worker.cpu.draft_sampling import append_drafts
from vllm.worker.cpu.launches import RaggedLaunches, RaggedOutput
from vllm.worker.cpu.model_runner import CPUModelRunner
from vllm.worker.drafts.draft_maker import DraftMaker
from vllm.worker.drafts.draft_progress import DraftSpans
from vllm.worker.parts.position_rows import draft_parts
from vllm.worker.runner import plan_batch, run_launch


class DraftRunner(DraftMaker):
    """Runs a draft model in ragged forward passes; see `DraftMaker`.

    Args:
        config: config of the draft model.
        model: the draft model.
        target: the runner of the target model, whose batch, blocks and random numbers this one
            uses.
    """

    def __init__(self, config: VllmConfig, model: CausalLM, target: CPUModelRunner) -> None:
        super().__init__(config, model, target.batch)
        self._compute_logits = model.compute_logits
        self.sampling, self.sampler = target.sampling, target.tokens.sampler
        self.cache_layout, _ = plan_batch(config, model, keeps_all=True)
        device = target.sampling.device
        parts = draft_parts(target.parts, model.arch)
        self.launches = RaggedLaunches(config, model, device, self.batch, parts)
        self._features: FeatureArray = np.zeros_like(self.sampling.row_arrays.features)
        self._vocab_size = config.model.resolved_arch.vocab_size
        self._target_vocab_size = target.vocab_size
        self._max_tokens = config.scheduler.max_num_batched_tokens

    @property
    def kept_states(self) -> list[Tensor]:
        """Empty: a draft model keeps only keys and values of tokens."""
        return []

    def _run_known(self, spans: DraftSpans) -> None:
        self.launches.fuse(self.sampling, self._features, DISTRIBUTION)
        features = self.sampling.row_arrays.features
        self._features[spans.rows] = features[spans.rows] & DISTRIBUTION
        has_drafts = spans.num_drafts > 0
        if has_drafts.all() and (spans.count == 1).all():
            self._run_newest(spans.rows, 0)
            return
        for chosen, done, count in split_spans(spans.count, self._max_tokens):
            ends = done + count == spans.count[chosen]
            self._run_ragged(
                spans.rows[chosen], spans.first[chosen] + done, count, has_drafts[chosen] & ends
            )

    def _run_newest(self, rows: IntArray, index: int) -> None:
        newest = self.batch.num_tokens[rows] - 1
        ones = np.ones_like(newest)
        step = self.launches.decode_steps.without if self._are_known(rows, newest) else None
        if step is not None and step.run(rows, newest, ones) is not None:
            self._keep_in_vocabulary(rows)
            return
        self._run_ragged(rows, newest, ones, np.ones(len(rows), np.bool_))

    def _run_ragged(
        self, rows: IntArray, first: IntArray, count: IntArray, samples: BoolArray
    ) -> None:
        order = np.argsort(count > 1, kind="stable")  # rows with a single token go first
        launch, samples = Launch(rows[order], first[order], count[order]), samples[order]

        def begin(given: ModelInput) -> Callable[[RaggedOutput], None]:
            given.input_ids.clamp_(max=self._vocab_size - 1)
            return lambda output: self._sample(given, output, samples)

        run_launch(launch, self.launches, begin)

    def _sample(self, given: ModelInput, output: RaggedOutput, samples: BoolArray) -> None:
        """Append a draft to each request that samples."""
        if not samples.any():
            return
        attention = given.context.attention
        assert isinstance(attention, RaggedMetadata)
        ends = attention.query_start_loc[1:][samples].astype(np.int64) - 1
        logits = self._compute_logits(output.hidden_states[torch.from_numpy(ends)])
        rows = given.launch.rows[samples]
        append_drafts(self, rows, logits)
        self._keep_in_vocabulary(rows)

    def _are_known(self, rows: IntArray, positions: IntArray) -> bool:
        """Return whether the draft model has embeddings of these tokens."""
        if self._vocab_size >= self._target_vocab_size:
            return True
        return bool((self.batch.token_ids[rows, positions] < self._vocab_size).all())

    def _keep_in_vocabulary(self, rows: IntArray) -> None:
        """Replace the newest tokens of requests if they are not in the draft model's vocabulary."""
        if self._vocab_size > self._target_vocab_size:
            newest = self.batch.num_tokens[rows] - 1
            token_ids = self.batch.token_ids[rows, newest]
            self.batch.token_ids[rows, newest] = np.where(
                token_ids < self._target_vocab_size, token_ids, 0
            )
