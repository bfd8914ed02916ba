"""What a runner and the loader need of a model. Knows no family."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup


class LoadableModel(nn.Module, ABC):
    """Parameters that a checkpoint fills.

    Module names are those of the checkpoint, so most families need none of the renames below.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    """Beginning of a checkpoint name -> what it is here; the first that fits is replaced."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    """Ends of checkpoint names that are not weights."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.arch = arch
        self.tp = tp

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the decoder or encoder, in the order they run. On a card a mark may follow
        each, each may be compiled on its own, and the weights of some may stay on the host."""


class CausalLM(LoadableModel):
    """A decoder over flattened tokens, T of one launch."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions, both [T] int64 -> hidden states [T, hidden] after the norm."""

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Rows of the result of `forward`, [N, hidden] -> [N, vocab_size] on every rank."""


class PoolingModel(LoadableModel):
    """An encoder or a decoder whose hidden states are the result, or lead to it."""

    num_token_types: int = 1
    """Kinds of tokens that `forward` tells apart besides their ids, such as the parts of a pair."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Token ids, positions and types, [T] int64 -> hidden states [T, hidden]. No types: all
        are 0."""

    def head(self, pooled: Tensor) -> Tensor:
        """Pooled hidden states [N, hidden] -> numbers [N, size], before any activation."""
        return pooled
