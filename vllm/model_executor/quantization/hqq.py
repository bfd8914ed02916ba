"""Checkpoints of HQQ as transformers saved them: integers less a zero point, which is a float,
times a scale, for groups of inputs (`axis: 1`).

All elements of a weight come one after the other in rows of a group; a byte, or a word with 3 bits,
holds elements that are far apart. Up to 4 bits keep their scales; 8 bits become int8.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import Place, Source
from vllm.model_executor.layers.stored.stored_linear import SCALES, on_host
from vllm.model_executor.quantization.checkpoint_format import NamedFormat, Names
from vllm.model_executor.quantization.row_tensors import RowsLinear, RowTensor, finite
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
    """Storage of a layer."""

    bits: int
    group_size: int


class HQQ(NamedFormat[_Layout]):
    """`quant_method: hqq`."""

    def __init__(self, settings: Settings) -> None:
        """Read the settings.

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

    @property
    def telling_tensor(self) -> str:
        return "W_q"

    def storage(self, names: Names) -> _Layout | None:
        tags = (tag for tag in self.layouts if not tag or is_listed(names, [tag]))
        return next((self.layouts[tag] for tag in tags), None)

    def method(self, name: str, storage: _Layout) -> LinearMethod:
        return HQQLinear(name, storage.bits, storage.group_size)

    def described(self, storage: _Layout) -> str:
        return f"HQQ, {storage.bits} bits"


def _layout_of(settings: Settings, within: str) -> _Layout:
    params = settings.get(_PARAMS)
    within += f"{_PARAMS}."
    if not isinstance(params, dict):
        raise wrong(within[:-1], params, "an object with nbits and group_size")
    choice(params, "axis", (1,), 1, within)
    for key in ("scale_quant_params", "zero_quant_params"):
        if settings.get(key):
            raise wrong(f"quant_config.{key}", settings[key], "null")
    size = params.get("group_size")
    if type(size) is not int or not 8 <= size <= MAX_GROUP or size % 8:
        raise wrong(f"{within}group_size", size, "a multiple of 8")
    return _Layout(choice(params, "nbits", (1, 2, 3, 4, 8), None, within), size)


class HQQLinear(RowsLinear):
    """W_q, scale and zero.

    Args:
        name: of the module.
        bits: of an element.
        group: inputs of a group.
    """

    unused_tensors = _UNUSED

    def __init__(self, name: str, bits: int, group: int) -> None:
        self.bits = bits
        is_half = bits <= 4
        words = (torch.int32,) if bits == 3 else (torch.uint8,)
        values: dict[str, Any] = {"of": "groups", "dtypes": SCALES, "dtype": torch.float32}
        tensors = (
            RowTensor(name="W_q", dtypes=words, dtype=torch.uint8, size=2 if is_half else 1),
            # Embeddings have an attribute `scale`.
            RowTensor(name="scale", attribute="scales", check=finite, **values),
            RowTensor(name="zero", attribute="zeros", check=finite, **values),
        )
        super().__init__(name, tensors, group, is_flat=True)

    def arranged(self, place: Place, name: str, source: Source) -> Source:
        if place.param_name != "W_q":
            return super().arranged(place, name, source)
        num_out, num_in = self.features_of(place, source)
        num_rows, bits = num_out * num_in // self.group, self.bits
        per_word = 10 if bits == 3 else 8 // bits
        expected = [-(-num_rows // per_word), self.group]
        if list(source.shape) != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, the layer needs "
                f"{expected}: {per_word} elements in each"
            )

        def elements(words: Tensor) -> Tensor:
            """Return [outputs, inputs]; of less than 8 bits two in a byte."""
            shifts = range(bits * (per_word - 1), -1, -bits)  # the first ones are the highest
            parts = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
            codes = torch.cat(parts)[:num_rows].reshape(num_out, num_in)
            return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4

        columns = num_in if bits == 8 else num_in // 2
        return source.made(torch.Size((num_out, columns)), torch.uint8, elements)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        packed = on_host(layer, "W_q")
        scales, zeros = on_host(layer, "scales"), on_host(layer, "zeros")
        if self.bits <= 4:
            return MinimumWeight.of_groups(nibbles_of(packed), self.bits, scales, zeros * scales)
        codes = packed.unflatten(1, (scales.shape[1], -1))
        return round_in_groups((codes - zeros[..., None]) * scales[..., None])
