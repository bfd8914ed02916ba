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
    """A network for a target model, which predicts next tokens from its hidden states.

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
        self._target = (target,)  # in a tuple, so that it does not become a submodule

    @classmethod
    def find_files(cls, folder: Path, load_format: str) -> list[Path]:
        """Find the files of its weights; see `vllm.transformers_utils.weight_files.find_files`."""
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
        """Return a stage with all layers: a speculator is never divided, even if its target is."""
        return Stage(0, self.target.arch.num_layers)

    @property
    def num_networks(self) -> int:
        """Return how many draft positions have a network of their own; later ones share the
        last."""
        return 1

    @property
    def kept_size(self) -> int:
        """Elements that it keeps of each token: the size of its state."""
        return self.target.arch.hidden_size

    @property
    def step_size(self) -> int:
        """Return the elements of what a step returns; different from `kept_size` only if the first
        position has a network of its own."""
        return self.kept_size

    def keep(self, result: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """Compute what the speculator stores for T tokens of the target model.

        Args:
            result: [T, hidden] of the forward pass, after the norm.
            inner: [T, hidden] each: the inputs of `inner_layers`.

        Returns:
            [T, kept_size]
        """
        return result

    @abstractmethod
    def step(self, place: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """Run one step of n tokens.

        Args:
            place: index of the draft that follows the token, from 0.
            input_ids: [n] int64
            states: [n, kept_size], or [n, step_size] behind the first place; of tokens before the
                newest one, what `keep` has returned. May be overwritten.
            positions: [P, n] int64, see `LaunchContext`

        Returns:
            [n, step_size], the next states.
        """

    @abstractmethod
    def compute_logits(self, place: int, states: Tensor) -> Tensor:
        """Compute the logits of a draft position from what `step` has returned for it, [n,
        step_size] -> [n, tokens of the target]."""
