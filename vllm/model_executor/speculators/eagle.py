"""EAGLE and EAGLE-3: one decoder layer over token embeddings and hidden states of the model."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.config.arch.speculators import eagle3_layers
from vllm.errors import ConfigError
from vllm.model_executor.layers.embedding import ParallelLMHead
from vllm.model_executor.layers.linear import whole_linear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    add_norm,
)
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.speculators.interface import Speculator


def rotary_of(arch: ModelArch, is_neox: bool = True) -> RotaryEmbedding:
    """Make the rotary embedding of the speculator's layer.

    Raises:
        ConfigError: config.json has no rotary parameters.
    """
    if arch.rope is None:
        raise ConfigError(f"{arch.architecture} needs rope_theta in config.json")
    return RotaryEmbedding(arch.rope, arch.derived_max_model_len, is_neox)


def _options(names: frozenset[str] | None, prefix: str) -> DecoderOptions:
    """Return the options of the layer; the checkpoint's tensor names tell whether it has biases."""
    has_bias = f"{prefix}.self_attn.q_proj.bias" in (names or ())
    return DecoderOptions(qkv_bias=has_bias)


class Eagle(Speculator):
    """EAGLE (Li et al. 2024, arXiv 2401.15077, section 3).

    The embedding of a token and the hidden state before it are projected to one vector, which goes
    through a decoder layer without its first norm. The result predicts the next hidden state, and
    the head of the model turns it into logits.

    Embeddings and head of the model in the checkpoint are not loaded.
    """

    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *Speculator.ignored_tensors,
        *("embed_tokens.weight", "lm_head.weight"),
    )

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target, names)
        size, tp = arch.hidden_size, target.tp
        has_bias = names is not None and not names.isdisjoint(("fc.bias", "model.fc.bias"))
        self.fc = whole_linear(2 * size, size, tp, has_bias)
        options = _options(names, "layers.0")
        layer = DecoderLayer(LayerSpec(arch, options, 0, rotary_of(arch), tp))
        layer.input_layernorm = nn.Identity()
        self.layer = layer

    checkpoint_prefixes: ClassVar[dict[str, str]] = {
        "model.layers.0.": "layer.",
        "layers.0.": "layer.",
        "model.": "",
    }

    def step(self, index: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        x = self.fc(torch.cat((self.target.embedding.look_up(input_ids), states), dim=-1))
        hidden_states, residual = self.layer(positions, x, None)
        return hidden_states + residual

    def compute_logits(self, index: int, states: Tensor) -> Tensor:
        return self.target.compute_logits(states)


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads embeddings and hidden states, normed and concatenated.

    Shape: positions [n], embeddings [n, hidden], states [n, hidden] -> [n, hidden]
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.hidden_norm = spec.new_norm()

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return DecoderAttention(
            spec.arch, spec.options, None, spec.rotary_emb, spec.tp, 2 * spec.arch.hidden_size
        )

    def guess(self, positions: Tensor, embeddings: Tensor, states: Tensor) -> Tensor:
        """Predict the next hidden states."""
        normed = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), dim=-1)
        attended = self.self_attn(positions, normed)
        normed, residual = add_norm(self.post_attention_layernorm, attended, states)
        return self.mlp(normed) + residual


class Eagle3(Speculator):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3).

    Three hidden states of the model are projected to one; for further drafts the layer's own result
    is used instead. The head has a smaller vocabulary: `d2t` is the offset from its token ids to
    the token ids of the model.

    Embeddings of the model in the checkpoint are not loaded.
    """

    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *Speculator.ignored_tensors,
        *("embed_tokens.weight", "t2d"),
    )
    checkpoint_prefixes: ClassVar[dict[str, str]] = {"model.": ""}

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target, names)
        size, tp = arch.hidden_size, target.tp
        self._read_layers = eagle3_layers(arch.hf_config, target.arch.num_layers)
        given = arch.hf_config.get("draft_vocab_size")
        vocab_size = target.arch.vocab_size if given is None else int(given)
        self.fc = whole_linear(3 * size, size, tp)
        self.midlayer = Eagle3Layer(
            LayerSpec(arch, _options(names, "midlayer"), 0, rotary_of(arch), tp)
        )
        self.norm = RMSNorm(size, arch.norm_eps)
        self.lm_head = ParallelLMHead(vocab_size, size, tp)
        self.register_parameter("d2t", None)
        if vocab_size < target.arch.vocab_size or "d2t" in (names or ()):
            offsets = torch.zeros(vocab_size, dtype=torch.int64)
            self.d2t = nn.Parameter(offsets, requires_grad=False)

    @property
    def inner_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._read_layers)))

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Rename the layer, which has one of two names in checkpoints."""
        return ((name.replace("layers.0.", "midlayer.", 1), source),)

    def check_values(self) -> None:
        if self.d2t is None:
            return
        # On the host: a card would compile operators whose results have no fixed shape.
        token_ids, vocab_size = self._token_ids(self.d2t.cpu()), self.target.arch.vocab_size
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        if len(wrong) or len(token_ids.unique()) < len(token_ids):
            what = f"token {int(wrong[0])}" if len(wrong) else "a token twice"
            raise ConfigError(
                f"speculative_config: d2t of the speculator maps to {what}; each entry must map to "
                f"its own token from 0 to {vocab_size - 1}. Name a speculator made for this model"
            )

    def keep(self, result: Tensor, inner: Sequence[Tensor]) -> Tensor:
        found = dict(zip(self.inner_layers, inner, strict=True))
        return self.fc(torch.cat([found[layer] for layer in self._read_layers], dim=-1))

    def step(self, index: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        return self.midlayer.guess(positions, self.target.embedding.look_up(input_ids), states)

    def compute_logits(self, index: int, states: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(states))
        if self.d2t is None:
            return logits
        size = len(logits), self.target.arch.vocab_size
        everywhere = torch.full(size, -torch.inf, dtype=logits.dtype, device=logits.device)
        return everywhere.index_copy(1, self._token_ids(self.d2t), logits)

    @staticmethod
    def _token_ids(offsets: Tensor) -> Tensor:
        """Return, for each token of the head's smaller vocabulary, its token id in the model."""
        return torch.arange(len(offsets), device=offsets.device) + offsets
