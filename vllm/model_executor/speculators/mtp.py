"""Multi-token prediction of DeepSeek V3: the layer behind the last one of the model."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.model_executor.layers.linear import whole_linear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.slice import Source
from vllm.model_executor.models.decoder import LayerSpec, add_norm
from vllm.model_executor.models.deepseek import DeepseekV3Layer, deepseek_options
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.speculators.eagle import rotary_of
from vllm.model_executor.speculators.interface import Speculator


class MTPLayer(DeepseekV3Layer):
    """A layer of the model over a projection of an embedding and a hidden state, both normed
    (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

    Shape: positions [n], embeddings [n, hidden], states [n, hidden] -> [n, hidden], normed
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        arch, tp = spec.arch, spec.tp
        size = arch.hidden_size
        self.enorm, self.hnorm = RMSNorm(size, arch.norm_eps), RMSNorm(size, arch.norm_eps)
        self.eh_proj = whole_linear(2 * size, size, tp)
        self.eh_proj.keeps_precision = True
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, arch.norm_eps)})

    def guess(self, positions: Tensor, embeddings: Tensor, states: Tensor) -> Tensor:
        """The next states."""
        x = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(states)), dim=-1))
        return add_norm(self.shared_head["norm"], *self(positions, x, None))[0]


class MTP(Speculator):
    """The first layer of a DeepSeek V3 that guesses further tokens, run for every draft.

    Embeddings and head are the model's; the checkpoint may hold them once more, and they are not
    read. The states are what the head reads: after the norm.
    """

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target, names)
        index = arch.num_layers
        options = deepseek_options(arch)
        rotary_emb = rotary_of(arch, options.is_neox)
        self.layer = MTPLayer(LayerSpec(arch, options, index, rotary_emb, target.tp))
        self._prefix = f"model.layers.{index}."

    def convert(self, name: str, source: Source) -> Iterable[tuple[str, Source]]:
        """Only the layer's own tensors."""
        own = name.removeprefix(self._prefix)
        if own == name or own in ("embed_tokens.weight", "shared_head.head.weight"):
            return ()
        return ((f"layer.{own}", source),)

    def step(self, place: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        return self.layer.guess(positions, self.target.embedding.look_up(input_ids), states)

    def compute_logits(self, place: int, states: Tensor) -> Tensor:
        return self.target.compute_logits(states)
