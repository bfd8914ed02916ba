"""AMD Quark checkpoints: FP8 and int8, MXFP4, and 4-bit integers in groups.

FP8 and int8 have one scale per tensor or output feature. `global_quant_config` says how weights are
stored, `layer_quant_config` overrides it for layers by patterns of their names, and `exclude` lists
dense layers. Scales of layer outputs are not used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import StoredLinear, on_host
from vllm.model_executor.layers.stored.stored_scales import without_zero_scales
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.float_groups import (
    GROUPS,
    FloatNames,
    described,
    float_linear,
)
from vllm.model_executor.quantization.formats.fp8 import Fp8Linear
from vllm.model_executor.quantization.grouped import GroupedLinear, GroupLayout
from vllm.model_executor.quantization.row_tensors import RowsLinear, RowTensor, scale_tensor
from vllm.model_executor.quantization.settings import (
    Settings,
    choice,
    group_size_of,
    is_listed,
    names,
    wrong,
)
from vllm.ops.stored_weight import Int8Weight, StoredWeight

_ALGORITHMS = ("awq", "gptq", "smooth", "autosmoothquant", "autoround")
"""Algorithms that change only the values of tensors."""
_UNUSED = ("output_scale", "output_zero_point")
"""Ends of the names of tensors that nothing reads."""
_SIGN = 8
"""The upper bit of an element of 4 bits."""
_SIGNS = -0x77777778
"""The upper bit of each of the eight elements in a word of 32 bits."""


@dataclass(frozen=True)
class _Storage:
    """Storage format of a layer in the checkpoint."""

    dtype: str
    has_one_scale: bool
    """The layer has one scale; False: one for each output feature or each group."""
    group_size: int
    rounds_inputs: bool
    """The checkpoint is meant for inputs that are rounded."""
    has_input_scale: bool
    """Inputs were rounded with a scale that is in the checkpoint."""


class Quark(CheckpointFormat[_Storage]):
    """The quantization format of `quant_method: quark`."""

    telling_tensor = "weight_scale"

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        export = settings.get("export") or {}
        if not isinstance(export, dict):
            raise wrong("export", export, "an object")
        choice(export, "weight_format", ("real_quantized",), "real_quantized", "export.")
        choice(export, "pack_method", ("reorder",), "reorder", "export.")
        for key in ("layer_type_quant_config", "softmax_quant_spec"):
            if settings.get(key):
                raise wrong(key, settings[key], "none of it")
        algorithms = settings.get("algo_config") or []
        for each in algorithms if isinstance(algorithms, list) else [algorithms]:
            name = each.get("name") if isinstance(each, dict) else each
            choice({"name": name}, "name", _ALGORITHMS, None, "algo_config.")
        self.ignored = names(settings, "exclude")
        self.of_all = _storage_of(settings.get("global_quant_config"), "global_quant_config")
        layers = settings.get("layer_quant_config") or {}
        if not isinstance(layers, dict):
            raise wrong(
                "layer_quant_config",
                layers,
                "an object that maps layer names (or patterns of them) to settings",
            )
        self.of_layers = {
            name: _storage_of(own, f"layer_quant_config.{name}") for name, own in layers.items()
        }

    def storage(self, names: Names) -> _Storage | None:
        own = (name for name in self.of_layers if is_listed(names, [name]))
        return next((self.of_layers[name] for name in own), self.of_all)

    def method(self, name: str, storage: _Storage) -> LinearMethod:
        method = _METHODS[storage.dtype](name, storage)
        method.unused_tensors = (*method.unused_tensors, *_UNUSED)
        return method

    def described(self, storage: _Storage) -> str:
        if storage.dtype == "fp4":
            return f"Quark {described('MXFP4', storage.rounds_inputs)}"
        return f"Quark {storage.dtype}"


def _storage_of(config: Any, within: str) -> _Storage | None:
    """Return how a layer is stored, from its settings; None if it is dense."""
    if not isinstance(config, dict):
        raise wrong(within, config, "an object")
    weight, inputs = (_only(config.get(key)) for key in ("weight", "input_tensors"))
    if weight is None:
        return None
    for key, each in (("weight", weight), ("input_tensors", inputs or {})):
        if not isinstance(each, Mapping):
            raise wrong(f"{within}.{key}", each, "an object")
    of_weight = partial(choice, weight, within=f"{within}.weight.")
    dtype = of_weight("dtype", tuple(_METHODS))
    of_weight("is_dynamic", (False,), False)
    of_weight("is_scale_quant", (False,), False)
    has_groups = dtype in ("fp4", "int4", "uint4")
    scheme = of_weight("qscheme", ("per_group",) if has_groups else ("per_tensor", "per_channel"))
    if dtype == "fp4":
        of_weight("group_size", (GROUPS["MXFP4"],))
        of_weight("scale_format", ("e8m0",))
    elif dtype != "uint4":
        of_weight("symmetric", (True, None), None)
    of_weight("ch_axis", (-1, 1, None) if has_groups else (0, None), None)
    is_static = bool(inputs) and not inputs.get("is_dynamic")
    return _Storage(
        dtype=dtype,
        has_one_scale=scheme == "per_tensor",
        group_size=group_size_of(weight) if has_groups else -1,
        rounds_inputs=bool(inputs),
        has_input_scale=is_static,
    )


def _only(given: Any) -> Any:
    """Return the settings of a tensor, which may be wrapped in a list of one element."""
    return given[0] if isinstance(given, list) and len(given) == 1 else given


def _fp8(name: str, storage: _Storage) -> StoredLinear:
    return Fp8Linear(name, None, storage.has_input_scale)


def _mxfp4(name: str, storage: _Storage) -> StoredLinear:
    return float_linear(name, "MXFP4", FloatNames())


class _Int4Linear(GroupedLinear):
    """A linear layer of 4-bit words in the layout of AWQ; values are signed if the dtype is `int4`.

    Args:
        name: name of the module.
        storage: how the layer is stored.
    """

    def __init__(self, name: str, storage: _Storage) -> None:
        layout = GroupLayout(bits=4, group_size=storage.group_size, is_awq=True)
        super().__init__(name, layout)
        self.has_signs = storage.dtype == "int4"

    def create_parameters(self, layer: ParallelLinear) -> None:
        super().create_parameters(layer)
        for param, tensor in (
            ("qweight", "weight"),
            ("qzeros", "weight_zero_point"),
            ("scales", "weight_scale"),
        ):
            slices = layer.slices[param].items()
            layer.slices[param] = {part: replace(each, tensor=tensor) for part, each in slices}

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        source = super().arranged(target, name, source)
        if not self.has_signs or target.param_name == "scales":
            return source
        signs = _SIGN if target.param.dtype == torch.uint8 else _SIGNS
        return source.mapped(lambda numbers: numbers ^ signs)


class _Int8Linear(RowsLinear):
    """A linear layer of int8 weights; inputs are quantized to int8 or kept.

    Args:
        name: name of the module.
        storage: how the layer is stored.
    """

    unused_tensors = ("weight_zero_point", "input_scale", "input_zero_point")

    def __init__(self, name: str, storage: _Storage) -> None:
        tensors = (
            RowTensor(name="weight", dtypes=(torch.int8,), dtype=torch.int8),
            scale_tensor("weight_scale", of="layer" if storage.has_one_scale else "outputs"),
        )
        super().__init__(name, tensors, -1)
        self.storage = storage

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        numbers, scales = on_host(layer, "weight"), on_host(layer, "weight_scale")
        if self.storage.has_one_scale:
            scales = self.of_outputs(layer, "weight_scale")[:, 0]
        weight = without_zero_scales(self.name, Int8Weight(numbers=numbers, scales=scales))
        if self.storage.rounds_inputs:
            return weight
        return weight.as_grouped() or weight


_METHODS: dict[str, Callable[[str, _Storage], StoredLinear]] = {
    "fp8_e4m3": _fp8,
    "fp4": _mxfp4,
    "int4": _Int4Linear,
    "uint4": _Int4Linear,
    "int8": _Int8Linear,
}
"""Dtype of the elements -> makes the method of a layer."""
