"""Sends drafts through a pipeline: one stage makes them, and the first stage needs them.

The first stage embeds drafts, and the last one verifies them; stages in between need only their
number, which is part of the step. A draft model is on the first stage, which knows all tokens, so
its drafts are sent along with the hidden states. A speculator reads hidden states of the last
layer, so it is on the last stage, and the first stage waits for its drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.config.arch.speculators import SPECULATORS
from vllm.distributed import Stage
from vllm.messages import SchedulerOutput
from vllm.worker.batch.input_batch import InputBatch


def makes_drafts(config: VllmConfig, stage: Stage) -> bool:
    """Return whether this pipeline stage has the draft model or speculator."""
    if config.speculative.draft_model is None:
        return False
    return stage.is_last if config.speculative.method in SPECULATORS else stage.is_first


@dataclass(frozen=True)
class InnerLayers:
    """Target layers whose inputs [T, hidden] a speculator needs in addition to the model's result.

    Each stage appends the inputs of its own layers to the hidden states that it sends, after those
    it received. The last stage has the speculator.
    """

    own: tuple[int, ...] = ()
    """Indices of the layers of this stage, ascending and distinct."""
    num_before: int = 0
    """Number of layers whose inputs the previous stages have appended."""

    @classmethod
    def of(cls, config: VllmConfig, stage: Stage) -> "InnerLayers":
        """Return the inner layers of a pipeline stage."""
        row, draft = SPECULATORS.get(config.speculative.method or ""), config.of_draft_model
        if draft is None or row is None or row.inner_layers is None:
            return cls()
        num_layers = config.model.resolved_arch.num_layers
        layers = sorted({*row.inner_layers(draft.model.resolved_arch.hf_config, num_layers)})
        own = [layer for layer in layers if stage.first_layer <= layer < stage.end_layer]
        return cls(tuple(own), sum(layer < stage.first_layer for layer in layers))

    def split(self, received: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Split the data of the previous stage into hidden states and the inputs of inner
        layers.
        """
        if not self.num_before:
            return received, []
        first, *others = received.chunk(1 + self.num_before, dim=1)
        return first.contiguous(), others


class StageDrafts:
    """Transfers the drafts of each step between the first and last stage of a pipeline.

    Args:
        config: config of the engine.
        stage: stage of this rank, one of several.
        batch: contains the drafts.
        device: device of the hidden states, which carry the drafts.
    """

    def __init__(
        self, config: VllmConfig, stage: Stage, batch: InputBatch, device: torch.device
    ) -> None:
        self._stage, self._batch, self._device = stage, batch, device
        self._sends = makes_drafts(config, stage)

    def exchange(self, step: SchedulerOutput) -> None:
        """Send the drafts of a step from the batch, or wait for them and write them to the
        batch.
        """
        stage = self._stage
        if step.draft_token_ids is None or not (stage.is_first or stage.is_last):
            return
        if self._sends:
            drafts = torch.from_numpy(self._batch.drafts_of(step))
            stage.connected.send_drafts(drafts.to(self._device))
            return
        drafts = torch.empty(len(step.draft_token_ids), dtype=torch.int32, device=self._device)
        stage.connected.receive_drafts(drafts)
        self._batch.write_drafts(step, drafts.cpu().numpy())
