"""Makes the drafts of a step: the common base of draft-model and speculator runners."""

from abc import ABC, abstractmethod

import torch

from vllm.attention import CachedLayer
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import VllmConfig
from vllm.messages import IntArray, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.speculators.interface import Speculator
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.drafts.draft_progress import DraftProgress, DraftSpans, NewestTokens


class DraftMaker(ABC):
    """Makes drafts after the newest tokens of the requests of a step.

    A draft is sampled from the draft model's distribution, with the random number that the model
    will use at the same position: if the two distributions are equal, so are the tokens. Masks,
    penalties and other changes of logits are applied only by the model.

    Args:
        config: config of the draft model or speculator.
        model: the draft model or speculator, on the device.
        batch: the running requests of the target model.
        reads_states: whether drafts come from a speculator, which needs a hidden state of the model
            for each token.

    Attributes:
        config, model, batch: the arguments.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM | Speculator,
        batch: InputBatch,
        *,
        reads_states: bool = False,
    ) -> None:
        self.config, self.model, self.batch = config, model, batch
        self._reads_states = reads_states
        self._progress: DraftProgress | NewestTokens | None = None

    @property
    def attention_layers(self) -> list[CachedLayer]:
        """The layers that own a KV cache, in the order of the model."""
        return layers_with_cache(self.model)

    def start(self, num_blocks: int) -> None:
        """Prepare for a KV cache with `num_blocks` blocks, which is bound now."""
        config, max_len = self.config, self.config.model.max_model_len
        assert max_len is not None
        if not self.attention_layers:
            self._progress = NewestTokens()
            return
        self._progress = DraftProgress(
            self.batch,
            config.cache.block_size,
            num_blocks,
            max_len,
            reads_states=self._reads_states,
        )

    @torch.inference_mode()
    def propose(self, step: SchedulerOutput) -> None:
        """Write the drafts of a step into the batch, after the known tokens of their requests.

        Args:
            step: the step; the batch must be updated with it already.
        """
        assert self._progress is not None, "the KV cache is not bound"
        spans = self._progress.plan(step)
        if spans is None:
            return
        num_tokens = self.batch.num_tokens
        known = num_tokens[spans.rows]
        num_tokens[spans.rows] = spans.num_known
        try:
            self._run_known(spans)
            for index in range(1, int(spans.num_drafts.max())):
                self._run_newest(spans.rows[spans.num_drafts > index], index)
        finally:
            num_tokens[spans.rows] = known
        self._write_drafts()
        self._note_drafts(self._progress, spans)

    @abstractmethod
    def _run_known(self, spans: DraftSpans) -> None:
        """Run known tokens, and append the first draft of the requests that get drafts."""

    @abstractmethod
    def _run_newest(self, rows: IntArray, index: int) -> None:
        """Run the newest token of each request, and append the token that follows.

        Args:
            rows: batch indices of the requests.
            index: index of the draft that is appended.
        """

    def _write_drafts(self) -> None:  # noqa: B027
        """Write all drafts that are not in the batch yet."""

    def _note_drafts(self, progress: DraftProgress | NewestTokens, spans: DraftSpans) -> None:
        """Note which drafts have keys and values in the draft model's cache now."""
        progress.add_drafts(spans)
