"""The interface of speculators for runners and the loader."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import Stage
from vllm.model_executor.models.interface import CausalLM, LoadableModel
from vllm.transformers_utils.weight_files import find_files


class Speculator(LoadableModel):
    """A network beside a model, the target, that guesses next tokens from its hidden states.

    It steps along the guesses of a request. Its state begins with what it keeps of the newest token
    that the target has run, and each step takes a token more: first the one that was sampled there,
    then each guess. A network with attention also steps through all tokens before, and keeps keys
    and values: the step that takes the token at position p + 1 is at position p.

    Args:
        arch: its own.
        target: the model; its embeddings and head are used where it has none.
        names: of the tensors in the checkpoint; None: all that it may have.
    """

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target.tp)
        self._target = (target,)  # a tuple, so that it is no submodule

    @classmethod
    def find_files(cls, folder: Path, load_format: str) -> list[Path]:
        """The files of its weights; see `vllm.transformers_utils.weight_files.find_files`."""
        return find_files(folder, load_format)

    @property
    def target(self) -> CausalLM:
        """The model that it guesses for."""
        return self._target[0]

    @property
    def layers(self) -> Sequence[nn.Module]:
        return ()

    @property
    def inner_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads, ascending and distinct; none: only the result
        of the forward pass, which all speculators are given."""
        return ()

    @property
    def stage(self) -> Stage:
        """It is whole, also beside the last stage of its target."""
        return Stage(0, self.target.arch.num_layers)

    @property
    def num_networks(self) -> int:
        """Places that have a network of their own; those behind them share the last one."""
        return 1

    @property
    def kept_size(self) -> int:
        """Elements that it keeps of each token: the size of its state."""
        return self.target.arch.hidden_size

    @property
    def step_size(self) -> int:
        """Elements of what a step returns; another number than `kept_size` only where the first
        place has a network of its own."""
        return self.kept_size

    def keep(self, result: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """What it keeps of T tokens that the target has run.

        Args:
            result: [T, hidden] of the forward pass, after the norm.
            inner: [T, hidden] each: the inputs of `inner_layers`.

        Returns:
            [T, kept_size]
        """
        return result

    @abstractmethod
    def step(self, place: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """One step of n tokens.

        Args:
            place: of the guess that follows the token, from 0.
            input_ids: [n] int64
            states: [n, kept_size], or [n, step_size] behind the first place; of tokens before the
                newest one, what `keep` has returned. May be overwritten.
            positions: [P, n] int64, see `LaunchContext`

        Returns:
            [n, step_size], the next states.
        """

    @abstractmethod
    def compute_logits(self, place: int, states: Tensor) -> Tensor:
        """The guesses at a place: what `step` has returned for it, [n, step_size] -> [n, tokens of
        the target]."""
