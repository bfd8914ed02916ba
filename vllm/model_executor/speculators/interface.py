"""The interface of speculators for runners and the loader."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import Stage
from vllm.model_executor.models.interface import CausalLM, LoadableModel
from vllm.utils.files.weight_files import find_files


class Speculator(LoadableModel):
    """A network that predicts the next tokens of a target model from its hidden states.

    It starts from the hidden state that `keep` has stored for the newest token of the target. Each
    step adds one token: first the token that was sampled there, then each draft. A network with
    attention also runs the steps of all earlier tokens, and has a KV cache: the step that adds the
    token at position p + 1 is at position p.

    Args:
        arch: architecture of the speculator.
        target: the model; its embeddings and head are used if the speculator has none.
        names: names of the tensors in the checkpoint; None: all that it may have.
    """

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target.tp)
        self._target = (target,)  # in a tuple, so that it does not become a submodule

    @classmethod
    def find_files(cls, folder: Path, load_format: str) -> list[Path]:
        """Return the files with the weights of the speculator; see
        `vllm.utils.files.weight_files.find_files`.
        """
        return find_files(folder, load_format)

    @property
    def target(self) -> CausalLM:
        """The target model whose tokens the speculator predicts."""
        return self._target[0]

    @property
    def layers(self) -> Sequence[nn.Module]:
        return ()

    @property
    def inner_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs the speculator reads, ascending and distinct.

        Empty if it needs only the output of the last layer, which all speculators get.
        """
        return ()

    @property
    def stage(self) -> Stage:
        """A stage with all layers: a speculator is never divided, even if its target is."""
        return Stage(0, self.target.arch.num_layers)

    @property
    def num_networks(self) -> int:
        """Number of draft positions with their own network; later positions share the last one."""
        return 1

    @property
    def kept_size(self) -> int:
        """Size of the state that is stored for each token, in elements."""
        return self.target.arch.hidden_size

    @property
    def step_size(self) -> int:
        """Size of the result of a step, in elements.

        It differs from `kept_size` only if the first position has its own network.
        """
        return self.kept_size

    def keep(self, result: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """Compute the states to store for T tokens of the target model.

        Args:
            result: [T, hidden], output of the target after the norm.
            inner: [T, hidden] each: the inputs of `inner_layers`.

        Returns:
            [T, kept_size]
        """
        return result

    @abstractmethod
    def step(self, index: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """Run one draft step for n tokens.

        Args:
            index: index of the draft that follows the token, from 0.
            input_ids: [n] int64
            states: [n, kept_size] at `index` 0, else [n, step_size]. For tokens before the newest
                one, the result of `keep`. May be overwritten.
            positions: [P, n] int64, see `LaunchContext`

        Returns:
            [n, step_size], the next states.
        """

    @abstractmethod
    def compute_logits(self, index: int, states: Tensor) -> Tensor:
        """Compute the logits of a draft position from the result of `step`.

        [n, step_size] -> [n, tokens of the target].
        """
