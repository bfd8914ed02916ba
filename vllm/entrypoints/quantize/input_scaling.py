"""Which modules of a decoder layer AWQ may scale: families, and what makes the inputs of what."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn


@dataclass(frozen=True)
class ScaledPair:
    """A module whose outputs can be divided, and all layers that have them as inputs."""

    source: str
    targets: tuple[str, ...]


_ATTENTION = ("input_layernorm", "self_attn.[qkv]_proj")
_VALUES = ("self_attn.v_proj", "self_attn.o_proj")
_NORM_OF_MLP = "post_attention_layernorm"
_DENSE = ("mlp.gate_proj", "mlp.up_proj")
_MLP = ("mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")
_SHARED = ("mlp.shared_expert_gate", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
_GRANITE = (
    *("block_sparse_moe.router*", "block_sparse_moe.experts.*.gate_proj"),
    "block_sparse_moe.experts.*.up_proj",
)
_LLAMA = (_ATTENTION, (_NORM_OF_MLP, *_DENSE), _VALUES, _MLP)
_MIXTURE = (_ATTENTION, (_NORM_OF_MLP, *_EXPERTS, *_SHARED, *_DENSE), _VALUES, _MLP)

_FAMILIES: dict[str, tuple[tuple[str, ...], ...]] = {
    # Of each pair, the source is first.
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "gemma"), _LLAMA),
    "gemma2": (_ATTENTION, ("pre_feedforward_layernorm", *_DENSE), _VALUES, _MLP),
    "gemma3_text": (_ATTENTION, ("pre_feedforward_layernorm", *_DENSE), _VALUES, _MLP),
    "phi3": (
        ("input_layernorm", "self_attn.qkv_proj"),
        (_NORM_OF_MLP, "mlp.gate_up_proj"),
    ),
    "olmo2": (_VALUES, _MLP),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), _MIXTURE),
    "granitemoe": (_ATTENTION, (_NORM_OF_MLP, *_GRANITE), _VALUES),
}

FAMILIES = tuple(_FAMILIES)
"""`model_type` of the models that AWQ can be made of."""

_EXPERT_UPS = ("mlp.experts.*.up_proj", "block_sparse_moe.experts.*.up_proj")


def pairs_of(model_type: str, layer: nn.Module) -> Iterator[ScaledPair]:
    """The pairs of a decoder layer of transformers, with experts as linear layers."""
    names = [name.removesuffix(".weight") for name, _ in layer.named_parameters()]
    for source, *patterns in _FAMILIES[model_type]:
        targets = [n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns)]
        if source in names and targets:
            yield ScaledPair(source, tuple(targets))
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in _EXPERT_UPS):
            yield ScaledPair(name, (name.replace("up_proj", "down_proj"),))


def divide(model_type: str, weight: Tensor, scales: Tensor) -> None:
    """Divide the outputs of a norm or of a linear layer, in place.

    Args:
        model_type: of the model.
        weight: [features] of a norm, or [features, inputs].
        scales: [features]
    """
    if weight.dim() == 2:
        weight /= scales[:, None]
    elif model_type.startswith("gemma"):  # whose norms multiply by 1 + weight
        weight.add_(1).div_(scales).sub_(1)
    else:
        weight /= scales
