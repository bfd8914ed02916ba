"""Speculators without attention: Medusa, and IBM's MLP speculators."""

import math
import re
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.linear import whole_linear
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.speculators.interface import Speculator


class MedusaHead(nn.Module):
    """A Medusa head: layers of x + silu(linear(x)), then logits.

    Shape: [n, hidden] -> [n, vocab_size]
    """

    def __init__(self, size: int, vocab_size: int, num_layers: int, tp: TPGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            whole_linear(size, size, tp, bias=True) for _ in range(num_layers)
        )
        self.out = ParallelLMHead(vocab_size, size, tp)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.out(x)


_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class Medusa(Speculator):
    """Medusa: one head for each draft token, all with the same hidden state as input.

    Cai et al. 2024, arXiv 2401.10774, section 2.1.

    Tensors are `medusa_head.i.j.linear` and `medusa_head.i.j` for the output, or the same without
    the first part, or `blocks.i.layers.j` and `lm_heads.i`; `medusa_head.i` may also be named
    `heads.i`. The checkpoint may contain the whole model.
    """

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target, names)
        num_layers = arch.hf_config["num_layers"]
        size, vocab_size = target.arch.hidden_size, target.arch.vocab_size
        self.heads = nn.ModuleList(
            MedusaHead(size, vocab_size, num_layers, target.tp)
            for _ in range(arch.hf_config["num_heads"])
        )
        # The output layer of a head has the index after its last hidden layer.
        self._patterns = (
            (rf"^(?:medusa_head\.|heads\.)?(\d+)\.{num_layers}\.weight$", r"heads.\1.out.weight"),
            (r"^(?:medusa_head\.|heads\.)?(\d+)\.(\d+)\.linear\.", r"heads.\1.layers.\2."),
            (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"heads.\1.layers.\2."),
            (r"^lm_heads\.(\d+)\.weight$", r"heads.\1.out.weight"),
        )

    @classmethod
    def find_files(cls, folder: Path, load_format: str) -> list[Path]:
        for name in _MEDUSA_FILES:
            if (folder / name).is_file():
                return [folder / name]
        return super().find_files(folder, load_format)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Convert a checkpoint tensor to the names of the heads; skip it if it is not used."""
        if name.startswith(("model.", "lm_head.")):
            return ()
        for pattern, replacement in self._patterns:
            renamed, found = re.subn(pattern, replacement, name)
            if found:
                return ((renamed, source),)
        return ((name, source),)

    @property
    def num_networks(self) -> int:
        return len(self.heads)

    def step(self, index: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        return states

    def compute_logits(self, index: int, states: Tensor) -> Tensor:
        return self.heads[index](states)


_EPS = 1e-6


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)


class ScaleAndShift(nn.Module):
    """An RMS norm with a weight and a bias.

    Shape: [n, size] -> [n, size]
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x) * self.weight + self.bias


class MLPSpeculator(Speculator):
    """A recurrent network with its own weights for each draft (Wertheimer et al.
    2024, arXiv 2404.19124).

    A step computes state = gelu(norm(proj(state) + c * emb(token))), where c balances the weight of
    the embeddings over all steps. With `tie_weights` all drafts share weights, except the first
    `proj`, whose input is the hidden state of the model.

    The states of the steps may have another size than the hidden state that is kept.
    """

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target, names)
        config, tp = arch.hf_config, target.tp
        count, inner, is_tied = config["n_predict"], config["inner_dim"], config["tie_weights"]
        hidden, vocab_size = target.arch.hidden_size, target.arch.vocab_size
        self.scales_input: bool = config["scale_input"]
        kept = 0.5 ** (0.5 / count)
        self.embedding_weight = math.sqrt((1 - kept**2) * (inner / 2)) / kept
        num_own = 1 if is_tied else count
        num_proj = min(2, count) if is_tied else count
        self.emb = nn.ModuleList(
            VocabParallelEmbedding(vocab_size, inner, tp) for _ in range(num_own)
        )
        self.proj = nn.ModuleList(
            whole_linear(inner if index else hidden, inner, tp) for index in range(num_proj)
        )
        self.ln = nn.ModuleList(ScaleAndShift(inner) for _ in range(num_own))
        self.head = nn.ModuleList(ParallelLMHead(vocab_size, inner, tp) for _ in range(num_own))

    checkpoint_prefixes: ClassVar[dict[str, str]] = {"speculator.": ""}

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Drop copies of shared weights, which may occur once for each draft."""
        part, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        modules = getattr(self, part, None) if part in ("emb", "proj", "ln", "head") else None
        is_copy = (
            self.arch.hf_config["tie_weights"]
            and isinstance(modules, nn.ModuleList)
            and index.isdecimal()
            and len(modules) <= int(index) < self.arch.hf_config["n_predict"]
        )
        return () if is_copy else ((name, source),)

    @property
    def num_networks(self) -> int:
        config = self.arch.hf_config
        return min(2, config["n_predict"]) if config["tie_weights"] else int(config["n_predict"])

    @property
    def step_size(self) -> int:
        return int(self.arch.hf_config["inner_dim"])

    def step(self, index: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        if index == 0 and self.scales_input:
            states = _normed(states) / math.sqrt(2)
        emb, proj, ln = (self._at(index, part) for part in (self.emb, self.proj, self.ln))
        added = proj(states) + emb(input_ids) * self.embedding_weight
        return F.gelu(ln(added))

    def compute_logits(self, index: int, states: Tensor) -> Tensor:
        return self._at(index, self.head)(states)

    @staticmethod
    def _at(index: int, modules: nn.ModuleList) -> nn.Module:
        """Return the weights for a draft position: its own, or the last ones if there are fewer."""
        return modules[min(index, len(modules) - 1)]
