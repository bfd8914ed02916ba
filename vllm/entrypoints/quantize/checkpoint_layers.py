"""Find the tensors of a checkpoint that are weights of layers that can be quantized.

The model that will load the quantized checkpoint decides: all weights that run in one matmul are
quantized, or none of them. Independent of files and formats.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.embedding import ParallelLMHead
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Features, ParamTarget
from vllm.model_executor.layers.stored.stored_experts import are_plain
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.model_executor.loader.model_loader import build_model
from vllm.model_executor.loader.weights import names_in_checkpoint, targets_by_name
from vllm.model_executor.models.registry import BY_TRANSFORMERS, ModelRegistry
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config

Fits = Callable[[int, int, Features | None], bool]
"""(output features, input features, position in a fused layer) -> whether a format supports such a
weight."""

_PROBE = CheckpointTensor(torch.Size((2, 3)), lambda index: torch.empty(2, 3)[index])


@dataclass(frozen=True)
class CheckpointWeight:
    """The weight of a layer in a checkpoint."""

    name: str
    """Name of the module in the quantized checkpoint."""
    key: str
    """Name of the module in the model, or of the fused layer that contains it."""
    weight: Tensor
    """[out, in]"""
    is_transposed: bool = False
    """The checkpoint has [in, out]."""


class CheckpointLayers:
    """The linear layers of a checkpoint.

    Args:
        folder: folder of an unquantized checkpoint.
        fits: returns whether the format supports a weight.

    Raises:
        ConfigError: the model is not supported.
    """

    def __init__(self, folder: Path, fits: Fits) -> None:
        raw = read_hf_config(folder, {})
        arch = ModelArch.from_hf(complete_hf_config(raw, folder, trust_remote_code=False))
        if arch.architecture not in ModelRegistry.supported():
            arch = replace(arch, architecture=BY_TRANSFORMERS)
        self._model = build_model(arch, TPGroup(), torch.float32)
        self._targets = targets_by_name(self._model)
        self._paths = {module: path for path, module in self._model.named_modules()}
        self._fits = fits
        self._known: dict[MethodLayer, bool] = {}

    def key(self, name: str) -> str:
        """Return the name of a module in this engine's model, given its name in a checkpoint or in
        transformers.
        """
        return self._model.renamed(f"{name}.weight").removesuffix(".weight")

    def key_of_tensor(self, name: str) -> str:
        """Return the name of a checkpoint tensor in this engine's model."""
        return self._model.renamed(name)

    def is_quantized(self, key: str) -> bool:
        """Return whether the weight with this key will be quantized."""
        parts = self._parts(key)
        return bool(parts) and all(self._holds(target, parts) for target, _ in parts)

    def is_linear(self, key: str) -> bool:
        """Return whether this is a linear layer, quantized or not, and not an expert's layer."""
        parts = self._parts(key)
        return bool(parts) and all(isinstance(p.module, ParallelLinear) for p, _ in parts)

    def heads(self) -> list[str]:
        """Return the checkpoint names of the output heads, tied ones included. They are not
        quantized.
        """
        return [
            self._name_in_checkpoint(path)
            for layer, path in self._paths.items()
            if isinstance(layer, ParallelLMHead)
        ]

    def dense_experts(self) -> list[str]:
        """Return the checkpoint names of experts that are not quantized."""
        found = [
            layer
            for layer in self._model.modules()
            if isinstance(layer, Experts) and not self._experts_fit(layer)
        ]
        return [self._name_in_checkpoint(self._paths[layer]) for layer in found]

    def weights_of(self, name: str, tensor: Tensor) -> Iterator[CheckpointWeight]:
        """Yield the weights in a checkpoint tensor that will be quantized."""
        stem = name.removesuffix(".weight")
        if stem != name and tensor.dim() == 2:
            key = self.key(stem)
            if self.is_quantized(key):
                (_, probe), *_ = self._model.convert(f"{key}.weight", _PROBE)
                is_transposed = probe.shape != _PROBE.shape
                yield CheckpointWeight(
                    stem, key, tensor.T if is_transposed else tensor, is_transposed
                )
        elif tensor.dim() in (2, 3):
            yield from self._experts_in(name, tensor)

    def _experts_in(self, name: str, tensor: Tensor) -> Iterator[CheckpointWeight]:
        """Yield the weights in a tensor with the matrices of all experts: one for each expert, or
        one after the other.
        """
        source = CheckpointTensor(tensor.shape, tensor.__getitem__, dtype=tensor.dtype)
        for part, matrix in self._model.convert(self._model.renamed(name), source):
            key = part.removesuffix(".weight")
            target = self._targets.get(part)
            if target is None or not isinstance(target.module, Experts) or key == part:
                return
            if self.is_quantized(key):
                yield CheckpointWeight(self._name_in_checkpoint(key), key, matrix.read(()))

    def _name_in_checkpoint(self, path: str) -> str:
        return next(iter(names_in_checkpoint(path, self._model)), path)

    def _parts(self, key: str) -> list[tuple[ParamTarget, Features | None]]:
        """Return the targets in the model for the parts of a layer; empty if it is not a linear
        layer.
        """
        whole = f"{key}.weight"
        found: list[tuple[ParamTarget, Features | None]] = []
        parts = ((whole, _PROBE),) if whole in self._targets else self._model.convert(whole, _PROBE)
        for name, source in parts:
            target = self._targets.get(name)
            if target is None or not isinstance(target.module, MethodLayer):
                return []
            found.append((target, source.features))
        return found

    def _holds(self, target: ParamTarget, parts: list[tuple[ParamTarget, Features | None]]) -> bool:
        layer = target.module
        if isinstance(layer, Experts):
            return self._experts_fit(layer)
        if not isinstance(layer, ParallelLinear) or layer.keeps_precision:
            return False
        features = {id(p.slice): of for p, of in parts}
        if layer not in self._known:
            self._known[layer] = all(
                self._fits(
                    part.total if part.dim == 0 else layer.output_size,
                    layer.input_size if part.dim == 0 else part.total,
                    features.get(id(part)),
                )
                for part in layer.feature_slices.values()
            )
        return self._known[layer]

    def _experts_fit(self, layer: Experts) -> bool:
        if layer not in self._known:
            size, hidden = layer.intermediate_size, layer.hidden_size
            fits = self._fits(size, hidden, None) and self._fits(hidden, size, None)
            self._known[layer] = fits and are_plain(layer)
        return self._known[layer]
