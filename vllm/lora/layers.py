"""LoRA adapters in the linear layers of a model: y += x @ A.T @ B.T for the tokens of an adapter
(Hu et al. 2021, arXiv 2106.09685).

The layers get the method `WithAdapters` around their own once they are loaded, so model files and
weight formats know nothing of adapters. Tokens without an adapter keep their bits: only the rows of
tokens that have one are added to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm.attention import ContextHolder, share_context
from vllm.errors import RequestError
from vllm.lora.files import WEIGHTS_FILE, AdapterConfig, check_files
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.loader.weights import checkpoint_name, renamed
from vllm.model_executor.models.interface import CausalLM

_PREFIX = "base_model.model."
_ENDINGS = {".lora_A.weight": 0, ".lora_B.weight": 1}


@dataclass(frozen=True)
class Part:
    """One adapted projection; several may be packed in a layer."""

    a: Tensor
    """[r, input_size]"""
    b: Tensor
    """[size, r], multiplied by the scale."""
    offset: int
    """First output feature."""


@dataclass
class LoadedAdapter:
    """An adapter in memory."""

    parts: dict[int, list[Part]] = field(default_factory=dict)
    """Number of the layer -> its adapted projections."""


class WithAdapters(LinearMethod):
    """A method whose result is added to for tokens with an adapter.

    Args:
        inner: of the layer, its weights loaded.
        number: of the layer, as in `LoadedAdapter.parts`.
        launch: has the adapters of the launch.
    """

    def __init__(self, inner: LinearMethod, number: int, launch: ContextHolder) -> None:
        self.inner = inner
        self.number = number
        self.launch = launch

    def create_weights(self, layer: ParallelLinear) -> None:
        raise AssertionError("adapters come after the weights")

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.inner.apply(layer, x, bias)
        context = self.launch.context
        if context is None or context.adapters is None:
            return y
        for adapter, indices in context.adapters:
            rows = None
            for part in adapter.parts.get(self.number, ()):
                rows = x[indices] if rows is None else rows
                end = part.offset + len(part.b)
                y[indices, part.offset : end] += (rows.to(part.a.dtype) @ part.a.T) @ part.b.T
        return y


@dataclass(frozen=True)
class _Target:
    number: int
    input_size: int
    size: int
    offset: int


class AdapterLayers:
    """The layers of a model that adapters can change.

    Args:
        model: loaded.
        max_rank: of an adapter.
        dtype: of the adapter weights in memory.
    """

    def __init__(self, model: CausalLM, max_rank: int, dtype: torch.dtype) -> None:
        self._model = model
        self._max_rank = max_rank
        self._dtype = dtype
        self._targets: dict[str, _Target] = {}
        launch = share_context(model)
        for path, layer in model.named_modules():
            if not isinstance(layer, ParallelLinear):
                continue
            number = len(self._targets)
            for part_name, place in layer.feature_slices.items():
                name = checkpoint_name(path, part_name, "").removesuffix(".")
                is_output = place.dim == 0
                self._targets[name] = _Target(
                    number,
                    layer.input_size,
                    place.size if is_output else layer.output_size,
                    place.offset if is_output else 0,
                )
            layer.method = WithAdapters(layer.method, number, launch)

    def load(self, folder: Path) -> LoadedAdapter:
        """Read an adapter.

        Raises:
            RequestError: a file is missing or wrong, or does not fit the model.
        """
        config = check_files(folder, self._max_rank)
        path = folder / WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt") as file:
                pairs = self._pairs(path, list(file.keys()))
                adapter = LoadedAdapter()
                for module, (name_a, name_b) in pairs.items():
                    target = self._targets[module]
                    self._check(
                        path, config, module, file.get_slice(name_a), file.get_slice(name_b)
                    )
                    a, b = file.get_tensor(name_a), file.get_tensor(name_b)
                    if not (a.isfinite().all() and b.isfinite().all()):
                        raise RequestError(f"{path}: {module} has values that are NaN or infinite")
                    scale = config.scale_of(module, len(a))
                    part = Part(
                        a.to(self._dtype), (b.float() * scale).to(self._dtype), target.offset
                    )
                    adapter.parts.setdefault(target.number, []).append(part)
                return adapter
        except (SafetensorError, OSError) as error:
            raise RequestError(f"{path} cannot be read: {error}") from None

    def _pairs(self, path: Path, names: list[str]) -> Mapping[str, list[str]]:
        """Module in the model -> names of its A and B in the file."""
        found: dict[str, list[str]] = {}
        for name in names:
            ending = next((e for e in _ENDINGS if name.endswith(e)), None)
            module = renamed(name.removesuffix(ending or "").removeprefix(_PREFIX), self._model)
            if ending is None or module not in self._targets:
                known = sorted({target.rpartition(".")[2] for target in self._targets})
                raise RequestError(
                    f"{path}: {name} does not belong to a layer that adapters can change here. "
                    f"These can be changed: {', '.join(known)}. Merge the adapter into the weights "
                    f"of its model (merge_and_unload of peft)"
                )
            found.setdefault(module, ["", ""])[_ENDINGS[ending]] = name
        if not found:
            raise RequestError(f"{path} has no tensors")
        for module, pair in found.items():
            if not all(pair):
                missing = list(_ENDINGS)[pair.index("")]
                raise RequestError(f"{path}: {module} has no {missing}")
        return found

    def _check(self, path: Path, config: AdapterConfig, module: str, a: object, b: object) -> None:
        """Compare shapes before any memory is taken."""
        target, rank = self._targets[module], config.rank_of(module)
        for name, tensor, shape in (
            ("lora_A", a, [rank, target.input_size]),
            ("lora_B", b, [target.size, rank]),
        ):
            found = tensor.get_shape()  # type: ignore[attr-defined]
            if list(found) != shape:
                raise RequestError(
                    f"{path}: {module}.{name} has the shape {list(found)}, and {shape} is expected "
                    f"for this model and rank {rank}. Is it an adapter of another model?"
                )
