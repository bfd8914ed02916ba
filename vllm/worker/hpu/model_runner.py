"""Runs scheduler steps on Gaudi: padded forward passes; the host reads nothing but tokens."""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from vllm.attention import StateLayer
from vllm.attention.backends.sdpa import SDPAKernel
from vllm.attention.cached_layer import layers_with_cache
from vllm.bucketing import Phase
from vllm.config import VllmConfig
from vllm.messages import IntArray, ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.metadata import SamplingMetadata
from vllm.sample.static_shapes import class_of, size_classes
from vllm.structured_output.matchers import GrammarMatchers
from vllm.worker.batch.input_batch import ExpectedTokens
from vllm.worker.drafts.stage_drafts import InnerLayers
from vllm.worker.hpu.adapters import DeviceRows
from vllm.worker.hpu.encoder import card_encoder
from vllm.worker.hpu.items import card_items
from vllm.worker.hpu.launches.block_moves import BlockMover, StateMover
from vllm.worker.hpu.launches.device_tokens import DeviceTokens
from vllm.worker.hpu.launches.embeddings import DeviceEmbeddings
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.launches import PaddedLaunches, PaddedRunner, Sampling
from vllm.worker.hpu.launches.model import HPUModel, softmax_normaliser
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.sampling import PaddedSampling, PaddedTokens
from vllm.worker.model_runner import Drafter, ModelRunner, sampling_rows
from vllm.worker.parts.adapters import adapter_reader
from vllm.worker.parts.embedding_rows import takes_embeddings
from vllm.worker.parts.encoded_media import EncodedMedia, embedding_width
from vllm.worker.parts.image_attention import ImageAttention
from vllm.worker.parts.position_rows import PositionRows
from vllm.worker.parts.prompt_logprobs import PromptLogprobs
from vllm.worker.parts.row_parts import OutputHead, RowPart, RowParts
from vllm.worker.runner import RunnerParts, plan_batch


class PaddedDrafter(Drafter, PaddedRunner, Protocol):
    """Makes drafts in padded forward passes, in the buckets of the model."""

    def warm_up_sampling(self, shape: PaddedShape, metadata: SamplingMetadata) -> None:
        """Run a forward pass of padding after the warm-up, to compile its sampling."""
        ...


class HPUModelRunner(ModelRunner):
    """Runs one model on one card.

    Args:
        config: config of the engine.
        model: loaded, on the card.
        bridge: the card.
        kernel: attention kernel for prompts.
        grammars: grammars of the worker; their modules are loaded while the model is loaded.

    Attributes:
        bridge, kernel: the arguments.
        card_sampling: sampler for this model, and for the model that makes its drafts.
        device_tokens: the newest tokens of the requests, on the card.
        encoder: encoder of images, on the first stage; None: the model reads text only.
        items: items that cross-attention layers read; None: there are none.
    """

    drafter: PaddedDrafter | None
    launches: PaddedLaunches

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        bridge: HabanaBridge,
        kernel: SDPAKernel,
        grammars: GrammarMatchers,
    ) -> None:
        self.bridge, self.kernel = bridge, kernel
        self.encoder = card_encoder(config, model, bridge)
        # One block list of a launch serves all layers, and contiguous launches need each block
        # once. So there is a single block table without null blocks.
        layout, batch = plan_batch(config, model, keeps_all=True)
        self.card_sampling = sampling = PaddedSampling(config, bridge)
        head = OutputHead(model)
        assert sampling.state.shapes is not None
        self._likeliest = most = sampling.state.shapes.max_likeliest
        self._prompt_logprobs = PromptLogprobs(
            batch, sampling.sampler, head, lambda width: class_of(width, most), bridge.mark_step
        )

        self.items = card_items(config, model, bridge, self.encoder)
        head.parts = parts = RowParts(self._row_parts(config, model, grammars))
        # In a pipeline, the stage that makes the drafts is not the stage that verifies them.
        has_drafter = config.speculative.draft_model is not None and model.stage.count == 1
        max_drafts = config.scheduler.max_draft_tokens if has_drafter else 0
        padded = self._padded_model(config, model, parts, max_drafts)
        adapters = parts.find(DeviceRows)
        inputs = HPUInputBuilder(
            batch,
            config.cache.block_size,
            None if adapters is None else adapters.slot_of_row,
            has_device_drafts=max_drafts > 0,
            embeddings=parts.find(DeviceEmbeddings),
            positions=parts.find(PositionRows),
            image_attention=parts.find(ImageAttention),
            reads_blocks=config.reads_blocks,
        )
        layers = layers_with_cache(model)
        with_states = [layer for layer in layers if isinstance(layer, StateLayer)]
        with_blocks = [layer for layer in layers if not isinstance(layer, StateLayer)]
        self._mover = BlockMover(bridge, with_blocks, config.cache.block_size)
        state_mover = None
        if with_states and config.cache.enable_prefix_caching:
            state_mover = StateMover(bridge, with_states, config.scheduler.max_num_seqs)
            padded.keeps_states = True
        launches = PaddedLaunches(
            config,
            bridge,
            padded,
            inputs,
            batch,
            parts,
            mover=self._mover if config.has_dense_cache else None,
            items=self.items,
            state_mover=state_mover,
        )
        made = RunnerParts(cache_layout=layout, batch=batch, rows=parts, launches=launches)
        super().__init__(config, model, made, PaddedTokens(sampling, launches))

    def _row_parts(
        self, config: VllmConfig, model: CausalLM, grammars: GrammarMatchers
    ) -> Iterator[RowPart]:
        """Yield what requests bring into a batch."""
        yield from sampling_rows(config, model, self.card_sampling.state, grammars)
        yield self._prompt_logprobs
        if self.items is not None:
            yield self.items
        if config.model.enable_prompt_embeds or (self.items is None and takes_embeddings(config)):
            # Done on every pipeline stage, because all stages plan the same launches.
            first = model if model.stage.is_first else None
            yield DeviceEmbeddings(first, config, self.bridge, self._encoded_media(model))
        if model.arch.num_positions:
            yield PositionRows(model.arch, config.scheduler.max_num_seqs, self.bridge.device)
        if model.arch.media_sees_ahead:
            yield ImageAttention(config.scheduler.max_num_seqs)
        if config.lora.enable_lora:
            # No adapters for experts: they would make every launch slower, even without an adapter.
            reader = adapter_reader(config, model, has_experts=False, is_padded=True)
            yield DeviceRows(config, reader, self.bridge)

    def _encoded_media(self, model: CausalLM) -> EncodedMedia | None:
        """Return the embeddings of images that replace tokens; None if there are none here."""
        if self.items is not None or self.encoder is None or not self.encoder.is_here:
            return None
        assert model.media_encoder is not None
        dtype, width = model.media_encoder.dtype, embedding_width(model)
        return EncodedMedia(self.encoder, width, agree=self.encoder.agree, dtype=dtype)

    def _padded_model(
        self, config: VllmConfig, model: CausalLM, parts: RowParts, max_drafts: int
    ) -> HPUModel:
        """Return the model as it runs in padded forward passes; sets `device_tokens`."""
        embeddings, adapters = parts.find(DeviceEmbeddings), parts.find(DeviceRows)
        positions = parts.find(PositionRows)
        num_positions = 0 if positions is None else positions.num_positions
        sees_ahead = model.arch.media_sees_ahead
        self.device_tokens = DeviceTokens(
            config.scheduler.max_num_seqs,
            self.bridge.device,
            max_drafts,
            num_positions,
            sees_ahead=sees_ahead,
        )
        padded = HPUModel(
            model,
            config.cache.block_size,
            self.kernel,
            softmax_normaliser(config.hpu, self.bridge.kernels),
            self.device_tokens,
            None if adapters is None else adapters.slots,
            getattr(torch, config.model.dtype_name),
            num_positions,
            sees_ahead=sees_ahead,
        )
        padded.inner_layers = InnerLayers.of(config, model.stage)
        padded.embeddings = None if embeddings is None else embeddings.table
        padded.items = None if self.items is None else self.items.table
        return padded

    # ---- steps ----------------------------------------------------------------------------

    def _prepare_step(self, step: SchedulerOutput) -> None:
        # A custom logits processor may run any operator, so its step may compile.
        self.launches.may_compile = self.sampling.has_processors
        if step.block_moves is not None and len(step.block_moves.copied):
            with self.launches.warmed_section(is_promised=self.launches.is_warm):
                self._mover.move(step.block_moves.copied)
        if step.restored_states is not None and self.launches.state_mover is not None:
            with self.launches.warmed_section(is_promised=self.launches.is_warm):
                self.launches.state_mover.copy(step.restored_states[:, ::-1])
        self.launches.inputs.place([new.row for new in step.new_requests])
        super()._prepare_step(step)

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        return self.launches.recorded(lambda: super(HPUModelRunner, self)._start(step))

    def _needs_tokens(self, step: SchedulerOutput) -> bool:
        """Return whether the host needs the sampled tokens before the next step.

        It does if logits depend on the output, as with penalties, structured output or logits
        processors.
        """
        return self.sampling.follows_output(step.rows)

    def _retract(self, expected: ExpectedTokens, indices: IntArray) -> None:
        super()._retract(expected, indices)
        # The card still has tokens of the removed drafts: the next launch must use the host's
        # tokens.
        self.launches.inputs.place(expected.rows[indices].tolist())

    # ---- warm-up --------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """Run a forward pass of padding, and compile how it samples."""
        output = self.launches.run_padding(shape)
        if self.launches.mover is not None and shape.bucket.phase is Phase.DECODE:
            self.launches.mover.warm_up()
        if self.launches.state_mover is not None:
            self.launches.state_mover.warm_up()
        if not self.stage.is_last:
            self.launches.kept(output.hidden_states)
        elif shape.bucket.phase is Phase.PREFILL:
            widths = (1,) if sampling == "none" else size_classes(self._likeliest)
            for width in widths:
                token = np.zeros(1, np.int32)
                self._prompt_logprobs.gather(output.hidden_states, 0, token, width)
        metadatas = self.card_sampling.launches_to_warm_up(shape.num_rows, sampling)
        self.card_sampling.warm_up(self.launches, shape, output, metadatas)
        if self.drafter is not None:
            self.drafter.warm_up(shape, sampling=sampling)

    @torch.inference_mode()
    def warm_up_sampling(self, shape: PaddedShape, metadata: SamplingMetadata) -> None:
        """Run a forward pass of padding after the warm-up, to compile its sampling.

        These compilations count as part of the warm-up.
        """
        with self.launches.report.warming_up():
            output = self.launches.run_padding(shape)
            self.card_sampling.warm_up(self.launches, shape, output, [metadata])
        if self.drafter is not None and not self.stage.is_last:
            # On this stage, only the draft model samples.
            self.drafter.warm_up_sampling(shape, metadata)
