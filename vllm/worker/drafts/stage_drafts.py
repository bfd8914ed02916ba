"""Sends drafts through a pipeline: one stage makes them, and the first stage needs them as well.

The first stage embeds them, and the last one verifies them; stages in between need only their
number, which a step says. A draft model is on the first stage, which knows all tokens, so what it
guesses goes the way of the hidden states. A speculator reads hidden states of the last layer, so it
is on the last stage, and the first one waits for what it guesses.
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
    """Whether the model that makes drafts, if there is one, is on this stage."""
    if config.speculative.draft_model is None:
        return False
    return stage.is_last if config.speculative.method in SPECULATORS else stage.is_first


@dataclass(frozen=True)
class InnerLayers:
    """Layers whose inputs [T, hidden] a speculator reads in addition to the result of the model.
    Each stage appends the inputs of its own layers to the hidden states that it sends, after the
    inputs that it received, up to the last stage, which has the speculator."""

    own: tuple[int, ...] = ()
    """Of this stage, ascending and distinct."""
    num_before: int = 0
    """Number of such layers of the stages before."""

    @classmethod
    def of(cls, config: VllmConfig, stage: Stage) -> "InnerLayers":
        """Return the inner layers of a stage."""
        row, draft = SPECULATORS.get(config.speculative.method or ""), config.of_draft_model
        if draft is None or row is None or row.inner_layers is None:
            return cls()
        num_layers = config.model.resolved_arch.num_layers
        layers = sorted({*row.inner_layers(draft.model.resolved_arch.hf_config, num_layers)})
        own = [layer for layer in layers if stage.first_layer <= layer < stage.end_layer]
        return cls(tuple(own), sum(layer < stage.first_layer for layer in layers))

    def split(self, received: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Split the data of the stage before: hidden states, and the inputs of inner layers."""
        if not self.num_before:
            return received, []
        first, *others = received.chunk(1 + self.num_before, dim=1)
        return first.contiguous(), others


class StageDrafts:
    """Carries the drafts of each step between the ends of a pipeline.

    Args:
        config: of the engine.
        stage: of this rank, one of several.
        batch: where drafts are.
        device: of the hidden states, whose way drafts go.
    """

    def __init__(
        self, config: VllmConfig, stage: Stage, batch: InputBatch, device: torch.device
    ) -> None:
        self._stage, self._batch, self._device = stage, batch, device
        self._sends = makes_drafts(config, stage)

    def exchange(self, step: SchedulerOutput) -> None:
        """Send the drafts of a step, which are in the batch, or wait for them and write them
        there."""
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
