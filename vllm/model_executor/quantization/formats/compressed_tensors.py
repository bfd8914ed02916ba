"""compressed-tensors checkpoints, as llm-compressor writes them.

`config_groups` says how the layers of each group are stored: integers packed in words (W4A16,
W8A16), int8 (W8A8, W8A16), FP8 (per tensor, output feature or block), or NVFP4, MXFP4 and MXFP8.
`ignore` lists dense layers. Static scales of inputs are used only for FP8; int8 inputs are
quantized with one scale per token, even if the checkpoint has one scale for all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Features, ParamTarget, whole
from vllm.model_executor.layers.stored.stored_linear import (
    SCALES,
    StoredLinear,
    StoredTensor,
    add_parameter,
    on_host,
)
from vllm.model_executor.layers.stored.stored_scales import (
    checked_scales,
    one_scale,
    without_zero_scales,
)
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.float_groups import (
    GROUPS,
    FloatKind,
    FloatNames,
    described,
    float_linear,
)
from vllm.model_executor.quantization.formats.fp8 import Fp8Linear, block_of
from vllm.model_executor.quantization.grouped import in_numbers, in_words, layer_of, num_words
from vllm.model_executor.quantization.input_groups import InputGroups
from vllm.model_executor.quantization.settings import (
    OF_GPU,
    Settings,
    choice,
    group_size_of,
    is_listed,
    names,
    wrong,
)
from vllm.model_executor.quantization.sparse import Elements, SparseLinear
from vllm.ops.stored_weight import GroupedWeight, Int8Weight, StoredWeight, unpack_bits
from vllm.utils.text.patterns import compile_pattern

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized")
_FLOAT_FORMATS: dict[str, FloatKind] = {
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp8-quantized": "MXFP8",
}
"""Formats with scales of small groups, and the kinds of their elements."""
_FLOAT_NAMES = FloatNames(
    packed="weight_packed",
    factor="weight_global_scale",
    input_factor="input_global_scale",
    is_divisor=True,
)
_SPARSE = "sparse-24-bitmask"
_MARLIN = "marlin-24"
_CLASS = "Linear"
"""The target that means every linear layer."""


class CompressedTensors(CheckpointFormat["_Scheme | _Sparse"]):
    """The quantization format of `quant_method: compressed-tensors`."""

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        sparsity = settings.get("sparsity_config") or {"format": "dense"}
        formats = ("dense", _SPARSE)
        if not isinstance(sparsity, dict) or sparsity.get("format") not in formats:
            raise wrong("sparsity_config", sparsity, f"none, or the format {' or '.join(formats)}")
        is_sparse = sparsity["format"] == _SPARSE
        transforms = settings.get("transform_config") or {}
        if transforms != {"config_groups": {}} and transforms:
            raise wrong("transform_config", transforms, "none of it")
        _check_cache_scheme(settings.get("kv_cache_scheme") or {})
        groups = settings.get("config_groups", {} if is_sparse else None)
        if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
            raise wrong("config_groups", groups, "an object of groups")
        self.ignored = _patterns(settings, "ignore")
        whole = settings.get("format", "")
        self.groups = [_Scheme({"format": whole, **_given(group)}) for group in groups.values()]

    def stores_head(self, names: Names) -> bool:
        return True

    def is_ignored(self, names: Names) -> bool:
        return _is_listed(names, self.ignored)

    def storage(self, names: Names) -> "_Scheme | None":
        return next((each for each in self.groups if _is_listed(names, each.targets)), None)

    def storage_of(self, names: Names) -> "_Scheme | _Sparse | None":
        found = None if self.is_ignored(names) else self.storage(names)
        return _Sparse(found) if self.has_tensor(names, "bitmask") else found

    def described(self, storage: "_Scheme | _Sparse") -> str | None:
        if isinstance(storage, _Sparse):
            return f"{_SPARSE} of {storage.elements}"
        kind = _FLOAT_FORMATS.get(storage.format)
        return None if kind is None else described(kind, storage.rounds_inputs)

    def method(self, name: str, storage: "_Scheme | _Sparse") -> LinearMethod:
        return storage.method(name)


def _check_cache_scheme(scheme: Any) -> None:
    """Check that the scales of the KV cache are for FP8; the names of their tensors do not
    show it.
    """
    if not isinstance(scheme, dict):
        raise wrong("kv_cache_scheme", scheme, "an object")
    for key, accepted in (
        ("type", ("float",)),
        ("num_bits", (8,)),
        ("symmetric", (True,)),
        ("strategy", ("tensor", "attn_head")),
    ):
        if scheme.get(key) not in (None, *accepted):
            raise wrong(f"kv_cache_scheme.{key}", scheme[key], ", ".join(map(str, accepted)))


def _given(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if value is not None}


def _object(group: Settings, key: str, default: dict[str, Any] | None) -> dict[str, Any]:
    value = group.get(key, default)
    if not isinstance(value, dict):
        raise wrong(f"config_groups.{key}", value, "an object")
    return _given(value)


def _patterns(settings: Settings, key: str, within: str = "") -> list[str]:
    found = names(settings, key)
    for each in found:
        if each.startswith("re:"):
            try:
                compile_pattern(each[3:])
            except ValueError as error:
                raise wrong(within + key, each, f"a regular expression ({error})") from error
    return found


def _is_listed(names: Names, entries: Sequence[str]) -> bool:
    """Return whether a layer is listed, by its name, a pattern, or the class of all linear
    layers.
    """
    patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
    others = [entry for entry in entries if not entry.startswith("re:")]
    is_matched = any(re.match(pattern, name) for pattern in patterns for name in names)
    return is_matched or _CLASS in others or is_listed(names, others)


class _Scheme:
    """Storage format of the layers in one of the `config_groups`."""

    def __init__(self, group: Settings) -> None:
        weights = _object(group, "weights", None)
        inputs = _object(group, "input_activations", {})
        self.targets = _patterns(group, "targets", "config_groups.")
        if group.get("format") == _MARLIN:
            raise wrong(
                "format", _MARLIN, f"{_FORMATS[0]}, of the same model: {_MARLIN} is {OF_GPU}"
            )
        self.format = choice(group, "format", (*_FORMATS, "naive-quantized", *_FLOAT_FORMATS))
        self.rounds_inputs = bool(inputs)
        if self.format in _FLOAT_FORMATS:
            _check_floats(weights, _FLOAT_FORMATS[self.format])
            return
        kind = choice(weights, "type", ("int", "float"), "int")
        if self.format == "naive-quantized":
            self.format = f"{kind}-quantized"
        is_float = self.format == "float-quantized"
        if is_float != (kind == "float"):
            raise wrong(
                "config_groups.weights.type", kind, f"the type that the format {self.format} has"
            )
        self.bits = choice(weights, "num_bits", (4, 8) if self.format == _FORMATS[0] else (8,))
        strategies = ("tensor", "channel", "block" if is_float else "group")
        usual = "group" if weights.get("group_size") else "tensor"  # as in compressed-tensors
        strategy = choice(weights, "strategy", strategies, usual)
        self.has_one_scale = strategy == "tensor"
        self.is_symmetric = choice(weights, "symmetric", (True, False), True)
        if self.format != _FORMATS[0] and not self.is_symmetric:
            raise wrong(
                "config_groups.weights.symmetric", False, f"true, with the format {self.format}"
            )
        self.group_size = group_size_of(weights) if strategy == "group" else -1
        orders = ("group", "weight", "static", "dynamic", True, False)
        order = choice(weights, "actorder", orders, False)
        self.has_order = order in ("group", "dynamic", True)
        self.block = block_of(weights, "block_structure") if strategy == "block" else None
        of_inputs = partial(choice, inputs, within="config_groups.*.input_activations.")
        is_dynamic = of_inputs("dynamic", (True, False, "local"), True)
        self.has_input_scale = self.rounds_inputs and is_dynamic is False
        if self.rounds_inputs:
            of_inputs("num_bits", (8,), 8)
            of_inputs("strategy", ("token", "tensor", "group"), "token")
            # Packed weights are multiplied with inputs that are not rounded, so both types are
            # accepted.
            of_inputs("type", ("int", "float") if self.format == _FORMATS[0] else (kind,), kind)
            self.has_input_zero = not of_inputs("symmetric", (True, False), True)

    def method(self, name: str) -> LinearMethod:
        if self.format in _FLOAT_FORMATS:
            return float_linear(name, _FLOAT_FORMATS[self.format], _FLOAT_NAMES)
        if self.format == "float-quantized":
            return Fp8Linear(name, self.block, self.has_input_scale)
        return _WordsLinear(name, self) if self.format == _FORMATS[0] else _Int8Linear(name, self)


@dataclass(frozen=True)
class _Sparse:
    """Layers with 2:4 sparsity: two non-zero elements in each four."""

    scheme: _Scheme | None
    """Format of the elements; None: they are dense."""

    @property
    def elements(self) -> Elements:
        """Return the kind of the elements: integers or one of the float formats.

        Raises:
            ConfigError: the kind is not supported.
        """
        scheme = self.scheme
        if scheme is None:
            return "dense"
        if scheme.format == "int-quantized" and scheme.rounds_inputs and scheme.group_size == -1:
            return "int8"
        if scheme.format == "float-quantized" and scheme.block is None:
            return "fp8"
        accepted = "int-quantized (W8A8) and float-quantized, with sparse-24-bitmask"
        raise wrong("config_groups.format", scheme.format, accepted)

    def method(self, name: str) -> LinearMethod:
        return SparseLinear(name, self.elements)


def _check_floats(weights: Settings, kind: FloatKind) -> None:
    of_weights = partial(choice, weights, within="config_groups.*.weights.")
    bits = 8 if kind == "MXFP8" else 4
    of_weights("num_bits", (bits,), bits)
    of_weights("type", ("float",), "float")
    of_weights("symmetric", (True,), True)
    of_weights("group_size", (GROUPS[kind],), GROUPS[kind])


class _WholeNumbers(StoredLinear):
    """The base class of integer layers, with scales [outputs, groups of inputs]."""

    def __init__(self, name: str, scheme: _Scheme) -> None:
        super().__init__(name)
        self.scheme = scheme

    def _add_scales(self, layer: ParallelLinear) -> None:
        groups = self._groups_of(layer)
        scales = torch.empty(layer.output_size, groups.count, dtype=torch.float32)
        add_parameter(layer, "weight_scale", scales)
        layer.slices["weight_scale"] = {
            part: groups.slice_of(s, 1, layer) for part, s in layer.feature_slices.items()
        }

    def _groups_of(self, layer: ParallelLinear) -> InputGroups:
        scheme = self.scheme
        return InputGroups.of_layer(self.name, scheme.group_size, layer, scheme.has_order)

    def _add_numbers(self, layer: ParallelLinear, name: str, size: int, dtype: torch.dtype) -> None:
        """Register a parameter with `size` values for each part of a fused layer."""
        parts = list(layer.feature_slices)
        add_parameter(layer, name, torch.empty(len(parts), size, dtype=dtype))
        layer.slices[name] = {part: whole(0, i, 1, layer.tp) for i, part in enumerate(parts)}

    def stored_tensors(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((torch.int8,)),
            "weight_packed": StoredTensor((torch.int32,)),
            "weight_scale": StoredTensor(SCALES),
            "weight_zero_point": StoredTensor((torch.int32,)),
            "weight_shape": StoredTensor((torch.int64, torch.int32), None),
            "weight_g_idx": StoredTensor((torch.int32, torch.int64), None),
            "input_scale": StoredTensor(SCALES, None),
            "input_zero_point": StoredTensor((torch.int8,), None),
        }

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        param_name = target.param_name
        if param_name == "weight_scale":
            return self._scales_of(target, name, source)
        if param_name == "input_scale":
            return one_scale(name, source).mapped(lambda scale: scale[None])
        if param_name in ("weight_shape", "input_zero_point"):
            return source.mapped(partial(_in_a_row, features=source.features))
        if param_name == "weight_g_idx":
            return self._groups_of(layer_of(target)).checked(name, source)
        if param_name == "weight_zero_point":
            bits = self.scheme.bits
            return in_numbers(target, name, source, bits, partial(unpack_bits, bits=bits), dim=0)
        return source

    def _scales_of(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        """Return the scales of a checkpoint tensor as [outputs, groups]."""
        assert target.slice is not None
        num_out, num_groups = target.slice.checkpoint_shape(target.param)
        if source.features is not None:
            num_out = source.features.total
        source = checked_scales(name, source)
        if source.shape.numel() == 1 and self.scheme.has_one_scale:
            return source.mapped(lambda scale: scale.reshape(1, 1).expand(num_out, num_groups))
        return source.mapped(lambda s: s[:, None]) if len(source.shape) == 1 else source


def _in_a_row(numbers: Tensor, features: Features | None) -> Tensor:
    """Reshape to [1, N]; in a stored weight shape, replace the output features by the features of
    the part.
    """
    row = numbers.reshape(1, -1)
    if features is None or row.shape[1] != 2:
        return row
    is_whole = row == torch.tensor([[features.total, -1]], device=row.device)
    return torch.where(is_whole, features.size, row)


class _WordsLinear(_WholeNumbers):
    """A linear layer of 4- or 8-bit integers packed in words along the inputs
    (`pack-quantized`).
    """

    def create_parameters(self, layer: ParallelLinear) -> None:
        scheme, parts = self.scheme, layer.feature_slices
        num_out, num_in = layer.output_size, layer.input_size
        columns = num_words(self.name, scheme.bits, num_in)
        add_parameter(layer, "weight_packed", torch.empty(num_out, columns, dtype=torch.int32))
        layer.slices["weight_packed"] = {
            part: in_words(self.name, scheme.bits, s, 1) for part, s in parts.items()
        }
        self._add_scales(layer)
        self._add_numbers(layer, "weight_shape", 2, torch.int64)
        if not scheme.is_symmetric:
            num_groups = layer.get_parameter("weight_scale").shape[1]
            zeros = torch.empty(num_out, num_groups, dtype=torch.uint8)
            add_parameter(layer, "weight_zero_point", zeros)
            layer.slices["weight_zero_point"] = layer.slices["weight_scale"]
        if scheme.has_order:
            self._add_numbers(layer, "weight_g_idx", num_in, torch.int32)
            layer.slices["weight_g_idx"] = {
                part: layer.slices["weight_g_idx"][part] if s.dim == 0 else replace(s, offset=0)
                for part, s in parts.items()
            }

    def fill_indices(self, layer: ParallelLinear) -> None:
        shapes = torch.tensor(self._shapes(layer))
        layer.get_parameter("weight_shape").copy_(shapes)
        if self.scheme.has_order:
            layer.get_parameter("weight_g_idx").copy_(self._groups_of(layer).neighbours())

    def stored_weight(self, layer: ParallelLinear) -> GroupedWeight:
        scheme = self.scheme
        self._check_shapes(layer)
        scales = on_host(layer, "weight_scale").T.contiguous()
        zeros = torch.full(scales.shape, 1 << scheme.bits - 1, dtype=torch.int16)
        if not scheme.is_symmetric:
            zeros = on_host(layer, "weight_zero_point").T.to(torch.int16).contiguous()
        rows = on_host(layer, "weight_g_idx") if scheme.has_order else None
        groups, kept = self._groups_of(layer).of_inputs(rows)
        if kept is not None:
            scales, zeros = scales[kept], zeros[kept]
        weight = GroupedWeight(
            words=on_host(layer, "weight_packed").T.contiguous(),
            bits=scheme.bits,
            scales=scales,
            zeros=zeros,
            groups=groups,
        )
        return without_zero_scales(self.name, weight)

    def _shapes(self, layer: ParallelLinear) -> list[list[int]]:
        """Return the shape [out_features, in_features] of each part in the checkpoint."""
        return [
            [s.total, layer.input_size] if s.dim == 0 else [layer.output_size, s.total]
            for s in layer.feature_slices.values()
        ]

    def _check_shapes(self, layer: ParallelLinear) -> None:
        shapes = on_host(layer, "weight_shape").tolist()
        for part, shape, expected in zip(
            layer.feature_slices, shapes, self._shapes(layer), strict=True
        ):
            if shape != expected:
                raise WeightLoadError(
                    f"weight_shape of {part or self.name} ({self.name}) is {shape} in the "
                    f"checkpoint, the model needs {expected}"
                )


class _Int8Linear(_WholeNumbers):
    """A linear layer of int8 weights (`int-quantized`); inputs are quantized to int8 or kept."""

    def create_parameters(self, layer: ParallelLinear) -> None:
        weight = torch.empty(layer.output_size, layer.input_size, dtype=torch.int8)
        add_parameter(layer, "weight", weight)
        layer.slices["weight"] = dict(layer.feature_slices)
        self._add_scales(layer)
        if self.scheme.has_input_scale:
            self._add_numbers(layer, "input_scale", 1, torch.float32)
            if self.scheme.has_input_zero:
                self._add_numbers(layer, "input_zero_point", 1, torch.int8)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        numbers, scales = on_host(layer, "weight"), on_host(layer, "weight_scale")
        if self.scheme.rounds_inputs and scales.shape[1] == 1:
            return without_zero_scales(self.name, Int8Weight(numbers=numbers, scales=scales[:, 0]))
        if numbers.shape[1] % 4:
            raise WeightLoadError(
                f"the weight of {self.name} has {numbers.shape[1]} input features; int8 weights "
                "with unquantized inputs need a multiple of 4"
            )
        groups, kept = self._groups_of(layer).of_inputs(None)
        if kept is not None:
            scales = scales[:, kept]
        weight = GroupedWeight.from_int8(numbers, scales.T.contiguous(), groups)
        return without_zero_scales(self.name, weight)
