"""Samples from the logits of padded forward passes, in stages that are one recipe each."""

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from vllm.config import VllmConfig
from vllm.messages import IntArray
from vllm.multimodal.job import family_of_model
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.metadata import ALL_GREEDY, SamplingMetadata
from vllm.sample.restrictions.masks import RowDrafts
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.sample.warmup import Stage, basic_launches, heaviest_launch, stages_of, warmup_launches
from vllm.utils.ragged import positions_within
from vllm.worker.hpu.launches.device_tokens import DeviceTokens
from vllm.worker.hpu.launches.host_buffers import HostBuffers
from vllm.worker.hpu.launches.launches import PaddedInput, PaddedLaunches, PaddedOutput, Sampling
from vllm.worker.hpu.launches.model import HPUModel
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.model_runner import Sampled


class PaddedSampling:
    """Samples on one card, for a model and for the model that makes its drafts.

    Args:
        config: config of the engine.
        bridge: the card.

    Attributes:
        state, sampler: see `SamplesTokens`.
    """

    def __init__(self, config: VllmConfig, bridge: HabanaBridge) -> None:
        vocab_size, family = config.model.resolved_arch.vocab_size, family_of_model(config)
        self.state = SamplingState(
            config.scheduler.max_num_seqs,
            vocab_size,
            bridge.device,
            static_shapes=True,
            max_model_len=config.scheduler.max_model_len,
            max_logprobs=config.model.max_logprobs,
            has_rules=family is not None and family.transcribes,
            to_device=HostBuffers(bridge).to_device,
        )
        self.sampler = Sampler(pass_elements=None, end_stage=bridge.mark_step)
        self._bridge = bridge
        self._warms_all = config.hpu.sampling_warmup == "all" or config.hpu.full_warmup
        self._compiled: dict[int, set[Stage]] = {}
        """Stages of the sampler that are compiled, by padded batch."""

    def sample(
        self,
        launches: PaddedLaunches,
        launch: PaddedLaunch,
        output: PaddedOutput,
        metadata: SamplingMetadata,
    ) -> tuple[SamplerOutput, Tensor | None]:
        """Sample from the logits of a forward pass; the next step reads the tokens on the card.

        Args:
            launches: the object that has run it.
            launch: the forward pass, of n requests.
            output: output of the forward pass.
            metadata: how the requests sample.

        Returns:
            The tokens, and the result of `DeviceTokens.accept`.
        """
        device_tokens = _device_tokens(launches)
        num_logits = len(output.result)
        missing = self._note_stages(num_logits, metadata)
        if missing and launches.is_warm:
            launches.warmed.close()  # code from here on may compile
            found = [(name, size) for name, size, _ in sorted(missing)]
            launches.report.miss_sampling(num_logits, found)
        sampled = self.sampler(output.result, metadata)
        return sampled, self._keep(device_tokens, output, launch.shape, sampled)

    def _keep(
        self,
        device_tokens: DeviceTokens,
        output: PaddedOutput,
        shape: PaddedShape,
        sampled: SamplerOutput,
    ) -> Tensor | None:
        accepted = device_tokens.accept(output.packed, shape, sampled)
        self._bridge.mark_step()
        return accepted

    def _note_stages(self, batch: int, metadata: SamplingMetadata) -> frozenset[Stage]:
        """Return the sampling stages that are not compiled yet, and mark them as compiled."""
        known = self._compiled.setdefault(batch, set())
        missing = stages_of(metadata) - known
        known |= missing
        return missing

    # ---- warm-up --------------------------------------------------------------------------

    def launches_to_warm_up(self, batch: int, sampling: Sampling) -> Iterable[SamplingMetadata]:
        """Return the kinds of sampling that a warm-up runs for this batch size."""
        if sampling == "none":
            return [ALL_GREEDY]
        if sampling == "heaviest":
            return [heaviest_launch(self.state, batch)]
        launches = warmup_launches if self._warms_all else basic_launches
        return launches(self.state, batch)

    def uncompiled(self, batch: int) -> Iterator[SamplingMetadata]:
        """Yield the kinds of sampling that are not compiled yet; see `warmup_launches`."""
        for metadata in warmup_launches(self.state, batch):
            if stages_of(metadata) - self._compiled.get(batch, set()):
                yield metadata

    def warm_up(
        self,
        launches: PaddedLaunches,
        shape: PaddedShape,
        output: PaddedOutput,
        metadatas: Iterable[SamplingMetadata],
    ) -> None:
        """Warm up sampling: sample once with each of `metadatas`, from a forward pass that has only
        padding.

        Pipeline stages that do not sample take the same steps as the last stage.
        """
        sampled = None
        for metadata in metadatas:
            self._note_stages(shape.num_rows, metadata)
            if launches.stage.is_last:
                sampled = self.sampler(output.result, metadata)
        if sampled is None:
            return
        device_tokens = _device_tokens(launches)
        accepted = self._keep(device_tokens, output, shape, sampled)
        (sampled.host_ids if accepted is None else accepted).cpu()


class PaddedTokens:
    """Samples the tokens of a model from padded forward passes; see `SamplesTokens`.

    Args:
        sampling: sampling of the card.
        launches: forward passes of the model.
    """

    def __init__(self, sampling: PaddedSampling, launches: PaddedLaunches) -> None:
        self.state, self.sampler = sampling.state, sampling.sampler
        self._sampling, self._launches = sampling, launches

    def sample(
        self,
        given: PaddedInput,
        output: PaddedOutput,
        num_output: IntArray,
        drafts: RowDrafts | None,
    ) -> Sampled:
        """Sample the next tokens; the logits of a decode include its padded tokens."""
        launch, sampled, num_drafts = given.launch, given.sampled, given.num_drafts
        width = launch.tokens_with_logits
        indices = sampled * np.int32(width)
        within = np.zeros_like(indices)
        if num_drafts is not None:
            within = positions_within(num_drafts + 1).astype(np.int32)
            indices = np.repeat(indices, num_drafts + 1) + within
        rows = np.full(len(launch.rows) * width, self.state.padding_row, np.int32)
        rows[indices] = launch.rows[indices // width]
        if not len(sampled):
            return Sampled(rows, indices, None)
        numbers = np.zeros_like(rows)
        numbers[indices] = num_output[indices // width] + within
        num_logits = len(output.result)
        tokens, accepted = self._sampling.sample(
            self._launches, launch, output, self.state.metadata(rows, numbers, num_logits, drafts)
        )
        self._launches.inputs.mark_sampled(launch.rows[sampled])
        return Sampled(rows, indices, tokens, accepted)


def _device_tokens(launches: PaddedLaunches) -> DeviceTokens:
    model = launches.execution.model
    assert isinstance(model, HPUModel) and model.device_tokens is not None, "nothing is sampled"
    return model.device_tokens
