"""torchao checkpoints as transformers saves them in safetensors.

A weight is split into `_weight_qdata`, `_weight_scale` and `_weight_zero_point`. The settings name
a configuration: int8 with a scale per output feature, FP8, integers of few bits in bytes with
scales per group, or of 4 bits in tiles. Older files are pickles of classes, which are not
supported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import on_host
from vllm.model_executor.layers.stored.stored_scales import without_nan, without_zero_scales
from vllm.model_executor.quantization.checkpoint_format import NamedFormat, Names
from vllm.model_executor.quantization.row_tensors import (
    RowsLinear,
    RowTensor,
    check_shape,
    finite,
    scale_tensor,
)
from vllm.model_executor.quantization.settings import MAX_GROUP, Settings, choice, names, wrong
from vllm.ops.stored_weight import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    MinimumWeight,
    StoredWeight,
    nibbles_of,
    pack_nibbles,
)

_INT8_INPUTS = "Int8DynamicActivationInt8WeightConfig"
_INT8 = ("Int8WeightOnlyConfig", _INT8_INPUTS)
_FP8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_FEW_BITS = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
_INT4 = "Int4WeightOnlyConfig"
_TYPE = "quant_type"
_NUMBERS, _SCALES, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_SCALES_AND_ZEROS = "_weight_scale_and_zero"
_TILE_OUTPUTS, _TILE_INPUTS = 8, 128
"""Features of the outer two dimensions of tiles."""
_PADDED_INPUTS = 1024
"""Inputs are padded to a multiple of so many in tiles."""


@dataclass(frozen=True)
class _Layout:
    """Storage format of a layer in the checkpoint."""

    config: str
    """Name of the configuration."""
    bits: int
    group_size: int
    """Inputs that share a scale; -1: all."""


class TorchAO(NamedFormat[_Layout]):
    """The quantization format of `quant_method: torchao`."""

    telling_tensor = _NUMBERS

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        config = settings.get(_TYPE)
        config = config.get("default") if isinstance(config, dict) else config
        data = config.get("_data") if isinstance(config, dict) else None
        name = config.get("_type") if isinstance(config, dict) else config
        known = (*_INT8, *_FP8, *_FEW_BITS, _INT4)
        if not isinstance(data, dict) or name not in known:
            raise wrong(
                _TYPE,
                name,
                f"{', '.join(known)}, saved in safetensors. Older files are pickles of classes: "
                "use the unquantized model with --quantization int8 or int4",
            )
        choice(settings, "include_input_output_embeddings", (False, None), None)
        self.layout = _layout_of(name, data)
        self.ignored = names(settings, "modules_to_not_convert")

    def storage(self, names: Names) -> _Layout:
        return self.layout

    def method(self, name: str, storage: _Layout) -> LinearMethod:
        if storage.config == _INT4:
            return TiledLinear(name, storage.group_size)
        return TorchAOLinear(name, storage.config, storage.bits, storage.group_size)

    def described(self, storage: _Layout) -> str:
        return f"torchao {storage.config}"


def _layout_of(config: str, data: Mapping[str, Any]) -> _Layout:
    within = f"{_TYPE}.default."
    if config == _INT4:
        packing = data.get("int4_packing_format")
        kind = packing.get("_data") if isinstance(packing, dict) else packing
        key = "int4_packing_format"
        choice({key: kind}, key, ("TILE_PACKED_TO_4D",), None, within)
        choice(data, "int4_tile_packed_ntile", (_TILE_OUTPUTS,), _TILE_OUTPUTS, within)
        return _Layout(config, 4, choice(data, "group_size", (32, 64, 128, 256), 128, within))
    if config not in _FEW_BITS:
        granularity = data.get("granularity")
        each = granularity[-1] if isinstance(granularity, list) and granularity else granularity
        kind = each.get("_type") if isinstance(each, dict) else None
        accepted = ("PerRow", None) if config in _INT8 else ("PerRow", "PerTensor", None)
        choice({"granularity": kind}, "granularity", accepted, None, within)
        choice(data, "group_size", (None,), None, within)
        return _Layout(config, 8, -1)
    key = "granularity" if config == _FEW_BITS[0] else "weight_granularity"
    granularity = data.get(key)
    kind = granularity.get("_type") if isinstance(granularity, dict) else None
    group = -1
    if choice({key: kind}, key, ("PerGroup", "PerAxis"), None, within) == "PerGroup":
        of_group = granularity.get("_data") if isinstance(granularity, dict) else None
        size = of_group.get("group_size") if isinstance(of_group, dict) else None
        if type(size) is not int or not 4 <= size <= MAX_GROUP or size % 4:
            raise wrong(f"{within}{key}.group_size", size, "a multiple of 4")
        group = size
    choice(data, "intx_packing_format", (_packing(data), None), None, within)
    dtype = data.get("weight_dtype")
    name = dtype.get("_data") if isinstance(dtype, dict) else dtype
    bits = {f"int{bits}": bits for bits in range(1, 9)}
    chosen = choice({"weight_dtype": name}, "weight_dtype", tuple(bits), None, within)
    return _Layout(config, bits[chosen], group)


def _packing(data: Mapping[str, Any]) -> Any:
    """Return the only accepted value of the packing setting, in the form that the checkpoint uses.

    It means one byte per element.
    """
    given = data.get("intx_packing_format")
    name = given.get("_data") if isinstance(given, dict) else given
    return given if name in ("UNPACKED_TO_INT8", "unpacked_to_int8") else "UNPACKED_TO_INT8"


class TiledLinear(RowsLinear):
    """A linear layer of 4-bit values in the tiles of torch's `_weight_int4pack_mm`.

    A value is multiplied by a scale, and a zero point, which is a float, is added.

    Args:
        name: name of the module.
        group: inputs that share a scale.
    """

    def __init__(self, name: str, group: int) -> None:
        tensors = (
            RowTensor(name=_NUMBERS, dtypes=(torch.int32,), dtype=torch.uint8, size=2),
            scale_tensor(_SCALES_AND_ZEROS, "inputs", finite, size=group, elements=2),
        )
        super().__init__(name, tensors, group)

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        num_out, num_in = self.features_of(target, source)
        padded_out = -(-num_out // _TILE_OUTPUTS) * _TILE_OUTPUTS
        padded_in = -(-num_in // _PADDED_INPUTS) * _PADDED_INPUTS
        is_words = target.param_name == _NUMBERS
        expected = [padded_in // self.group, padded_out, 2]
        if is_words:
            expected = [padded_out // _TILE_OUTPUTS, padded_in // _TILE_INPUTS, 32, 4]
        check_shape(name, source, expected)
        if is_words:
            shape = torch.Size((num_out, num_in // 2))
            return source.made(
                shape, torch.uint8, lambda words: _in_rows(words)[:num_out, : shape[1]]
            )
        source = finite(name, source)
        num_values = num_in // self.group * 2
        return source.made(
            torch.Size((num_out, num_values)),
            torch.float32,
            lambda values: values.transpose(0, 1).flatten(1)[:num_out, :num_values].float(),
        )

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        scales, zeros = on_host(layer, _SCALES_AND_ZEROS).unflatten(1, (-1, 2)).unbind(-1)
        middle = 8
        codes = nibbles_of(on_host(layer, _NUMBERS))
        return MinimumWeight.of_groups(codes, 4, scales, middle * scales - zeros)


def _in_rows(words: Tensor) -> Tensor:
    """Convert elements in tiles to rows, two in a byte: [N / 8, K / 128, 32, 4] int32 -> [N, K /
    2].

    Element j of the eight in word w of lane l belongs to output l / 4 of a tile, and to its input
    32 w + 8 (j % 4) + 2 (l % 4) + j / 4.
    """
    low, high = (
        torch.stack([words >> 4 * (half * 4 + i) & 15 for i in range(4)], dim=-1)
        for half in range(2)
    )
    in_bytes = (low | high << 4).to(torch.uint8).unflatten(2, (_TILE_OUTPUTS, 4))
    return in_bytes.permute(0, 2, 1, 4, 5, 3).flatten(2).flatten(0, 1)


class TorchAOLinear(RowsLinear):
    """A linear layer of one-byte elements, scales and (for integers) zero points.

    Args:
        name: name of the module.
        config: the configuration of torchao.
        bits: bits of an element.
        group: inputs that share a scale; -1: all.
    """

    def __init__(self, name: str, config: str, bits: int, group: int) -> None:
        self.config, self.bits = config, bits
        dtype = torch.float8_e4m3fn if config in _FP8 else torch.int8
        tensors = [RowTensor(name=_NUMBERS, dtypes=(dtype,), dtype=dtype), scale_tensor(_SCALES)]
        if config not in _FP8:
            whole = (torch.int8, torch.int32, torch.int64)
            tensors.append(
                RowTensor(name=_ZEROS, dtypes=whole, dtype=torch.int8, of="groups", missing=0)
            )
        super().__init__(name, tensors, group)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        numbers, scales = on_host(layer, _NUMBERS), on_host(layer, _SCALES)
        if self.config in _FP8:
            numbers = without_nan(self.name, numbers)
            fp8 = Fp8Weight(numbers=numbers, scales=scales, block_inputs=layer.input_size)
            return without_zero_scales(self.name, fp8)
        zeros = on_host(layer, _ZEROS)
        if self.config == _INT8_INPUTS and not bool(zeros.any()):
            rounding = Int8Weight(numbers=numbers, scales=scales[:, 0])
            return without_zero_scales(self.name, rounding)
        if self.bits == 4 and not layer.input_size % 8:
            middle = 8
            words = pack_nibbles((numbers + middle).view(torch.uint8)).T.contiguous()
            weight = GroupedWeight(
                words=words,
                bits=4,
                scales=scales.T.contiguous(),
                zeros=(zeros.T.to(torch.int16) + middle).contiguous(),
            )
        else:
            weight = GroupedWeight.from_int8(numbers, scales.T.contiguous())
            weight.zeros.add_(zeros.T)
        return without_zero_scales(self.name, weight)
