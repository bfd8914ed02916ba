"""HQQ checkpoints as transformers saved them: (integer - zero point) * scale, for groups of
elements.

Zero points are floats. The elements of a weight are stored in rows of one group each (`axis: 1`),
or in as many rows as a group has elements (`axis: 0`). A byte, or for 3 bits a word, packs elements
that are far apart. Values of up to 4 bits keep their scales if groups consist of neighbours; all
others are converted to int8.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import SCALES, on_host
from vllm.model_executor.quantization.checkpoint_format import NamedFormat, Names
from vllm.model_executor.quantization.row_tensors import RowsLinear, RowTensor, check_size, finite
from vllm.model_executor.quantization.settings import (
    MAX_GROUP,
    Settings,
    choice,
    is_listed,
    names,
    wrong,
)
from vllm.ops.stored_weight import MinimumWeight, StoredWeight, nibbles_of, round_in_groups

_PARAMS = "weight_quant_params"
_UNUSED = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
"""Ends of the names of tensors that repeat the settings."""


@dataclass(frozen=True)
class _Layout:
    """Storage format of a layer in the checkpoint."""

    bits: int
    group_size: int
    axis: int
    """Axis of the matrix of all elements along which a group lies; 1: groups of neighbours."""


class HQQ(NamedFormat[_Layout]):
    """The quantization format of `quant_method: hqq`."""

    telling_tensor = "W_q"

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        config = settings.get("quant_config")
        if not isinstance(config, dict):
            raise wrong("quant_config", config, f"an object with {_PARAMS}")
        by_layer = config if _PARAMS not in config else {"": config}
        self.layouts = {
            tag: _layout_of(each, f"quant_config.{tag}{'.' if tag else ''}")
            for tag, each in by_layer.items()
            if isinstance(each, dict)
        }
        self.ignored = names(settings, "skip_modules")

    def storage(self, names: Names) -> _Layout | None:
        tags = (tag for tag in self.layouts if not tag or is_listed(names, [tag]))
        return next((self.layouts[tag] for tag in tags), None)

    def method(self, name: str, storage: _Layout) -> LinearMethod:
        return HQQLinear(name, storage.bits, storage.group_size, storage.axis)

    def described(self, storage: _Layout) -> str:
        return f"HQQ, {storage.bits} bits{'' if storage.axis else ', axis 0'}"


def _layout_of(settings: Settings, within: str) -> _Layout:
    params = settings.get(_PARAMS)
    within += f"{_PARAMS}."
    if not isinstance(params, dict):
        raise wrong(within[:-1], params, "an object with nbits and group_size")
    axis = choice(params, "axis", (1, 0), 1, within)
    for key in ("scale_quant_params", "zero_quant_params"):
        if settings.get(key):
            raise wrong(f"quant_config.{key}", settings[key], "null")
    size = params.get("group_size")
    if type(size) is not int or not 8 <= size <= MAX_GROUP or size % 8:
        raise wrong(f"{within}group_size", size, "a multiple of 8")
    return _Layout(choice(params, "nbits", (1, 2, 3, 4, 8), None, within), size, axis)


class HQQLinear(RowsLinear):
    """A linear layer with the tensors W_q, scale and zero.

    Args:
        name: name of the module.
        bits: bits of an element.
        group: elements of a group.
        axis: 1: groups consist of neighbours; 0: they do not.
    """

    unused_tensors = _UNUSED

    def __init__(self, name: str, bits: int, group: int, axis: int) -> None:
        self.bits, self.axis = bits, axis
        is_half = bits <= 4
        words = (torch.int32,) if bits == 3 else (torch.uint8,)
        of = "groups" if axis else "inputs"
        values: dict[str, Any] = {"of": of, "dtypes": SCALES, "dtype": torch.float32}
        tensors = (
            RowTensor(name="W_q", dtypes=words, dtype=torch.uint8, size=2 if is_half else 1),
            # The attribute is `scales`, because embeddings already have an attribute `scale`.
            RowTensor(name="scale", attribute="scales", check=finite, **values),
            RowTensor(name="zero", attribute="zeros", check=finite, **values),
        )
        super().__init__(name, tensors, group, is_flat=True)

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        num_out, num_in = self.features_of(target, source)
        num_rows, num_columns = num_out * num_in // self.group, self.group
        if not self.axis:
            num_rows, num_columns = num_columns, num_rows
        if target.param_name != "W_q":
            if self.axis:
                return super().arranged(target, name, source)
            check_size(name, source, num_columns)
            return finite(name, source).made(
                torch.Size((num_out, num_in)),
                torch.float32,
                lambda values: values.reshape(-1).repeat(num_rows).view(num_out, num_in).float(),
            )
        bits = self.bits
        per_word = 10 if bits == 3 else 8 // bits
        expected = [-(-num_rows // per_word), num_columns]
        if list(source.shape) != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, but the layer "
                f"needs {expected}: {per_word} values in each element"
            )

        def elements(words: Tensor) -> Tensor:
            """Unpack words to elements [outputs, inputs]; less than 8 bits are packed two in a
            byte.
            """
            # The first values are in the highest bits.
            shifts = range(bits * (per_word - 1), -1, -bits)
            parts = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
            codes = torch.cat(parts)[:num_rows].reshape(num_out, num_in)
            return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4

        columns = num_in if bits == 8 else num_in // 2
        return source.made(torch.Size((num_out, columns)), torch.uint8, elements)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        packed = on_host(layer, "W_q")
        scales, zeros = on_host(layer, "scales"), on_host(layer, "zeros")
        codes = nibbles_of(packed) if self.bits <= 4 else packed
        if not self.axis:
            return round_in_groups(((codes - zeros) * scales).unflatten(1, (-1, self.part)))
        if self.bits <= 4:
            return MinimumWeight.of_groups(codes, self.bits, scales, zeros * scales)
        grouped = codes.unflatten(1, (scales.shape[1], -1))
        return round_in_groups((grouped - zeros[..., None]) * scales[..., None])
