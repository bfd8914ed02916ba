"""Runs scheduler steps on the CPU: forward passes in one call where the model allows it."""

import torch
from torch import Tensor

from vllm.attention import RaggedMetadata
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.fused_decoder import fuse
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.cpu_decoder import FusedDecoder
from vllm.sample.cpu_sampler import make_sampler
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState
from vllm.worker.model_input import ModelInput
from vllm.worker.model_runner import ModelRunner

logger = init_logger(__name__)


class CPUModelRunner(ModelRunner):
    """A `ModelRunner` that fuses its model at the first forward pass, when caches are bound.

    Args: see `ModelRunner`.
    """

    def __init__(self, config: VllmConfig, model: CausalLM, device: torch.device) -> None:
        super().__init__(config, model, device)
        self._is_fused_known = False
        self._fused: FusedDecoder | None = None

    def _make_sampler(self, config: VllmConfig) -> tuple[SamplingState, Sampler]:
        vocab_size = config.model.resolved_arch.vocab_size
        return make_sampler(config.scheduler.max_num_seqs, vocab_size, self.device)

    def _forward(self, model_input: ModelInput) -> Tensor:
        if not self._is_fused_known:
            self._fused = fuse(self.model)
            self._is_fused_known = True
            logger.debug("the decoder runs %s", "fused" if self._fused else "by its modules")
        metadata = model_input.metadata
        if self._fused is None or type(metadata) is not RaggedMetadata:
            return super()._forward(model_input)
        return self._fused.forward(
            model_input.input_ids,
            model_input.positions,
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.seq_lens,
            torch.from_numpy(metadata.query_start_loc),
            metadata.num_decodes,
        )
