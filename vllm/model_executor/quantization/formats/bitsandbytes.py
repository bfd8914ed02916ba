"""bitsandbytes checkpoints: 4 bits (NF4, FP4), and int8 with one scale per output (LLM.int8).

A 4-bit value is an index in a table; the entry is multiplied by the largest of 64 neighbours.
Inputs are not quantized.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Index, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import SCALES, on_host
from vllm.model_executor.quantization.checkpoint_format import NamedFormat, Names
from vllm.model_executor.quantization.row_tensors import (
    RowsLinear,
    RowTensor,
    check_size,
    checked,
    finite,
    scale_tensor,
)
from vllm.model_executor.quantization.settings import Settings, choice, names, wrong
from vllm.ops.stored_weight import (
    GroupedWeight,
    StackedWeight,
    StoredWeight,
    TableWeight,
    nibbles_of,
)

_BLOCK, _NESTED_BLOCK = 64, 256
"""Elements that share a scale, and scales that share one."""
_INT8 = "int8"
_LARGEST_INT8 = 127


@dataclass(frozen=True)
class _Table:
    """Storage format of a 4-bit layer in the checkpoint."""

    kind: str
    """nf4 or fp4."""
    is_nested: bool
    """Scales are bytes with scales of their own."""


class BitsAndBytes(NamedFormat["_Table | str"]):
    """The quantization format of `quant_method: bitsandbytes`.

    The names of tensors show which layers are quantized, and how.
    """

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        bits = (settings.get("load_in_4bit"), settings.get("load_in_8bit"))
        if sum(each is True for each in bits) != 1:
            raise wrong("load_in_4bit", bits[0], "true, or load_in_8bit: true instead of it")
        self.table: _Table | None = None
        if bits[0]:
            kind = choice(settings, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
            is_nested = choice(settings, "bnb_4bit_use_double_quant", (True, False), False)
            self.table = _Table(kind, is_nested)
        self.telling_tensor = "SCB" if self.table is None else "weight.absmax"
        self.ignored = names(settings, "llm_int8_skip_modules")

    def storage(self, names: Names) -> "_Table | str":
        return _INT8 if self.table is None else self.table

    def method(self, name: str, storage: "_Table | str") -> LinearMethod:
        return TableLinear(name, storage) if isinstance(storage, _Table) else ScaledInt8(name)

    def described(self, storage: "_Table | str") -> str:
        return f"bitsandbytes {storage.kind if isinstance(storage, _Table) else storage}"


class TableLinear(RowsLinear):
    """A linear layer of 4-bit table indices, stored as one flat tensor, and their tables.

    Args:
        name: name of the module.
        storage: how the layer is stored.
    """

    def __init__(self, name: str, storage: _Table) -> None:
        # Dtypes of `bnb_4bit_quant_storage`: the bytes are the same in all of them.
        numbers = (torch.uint8, *SCALES)
        state = f"weight.quant_state.bitsandbytes__{storage.kind}"
        scales: dict[str, Any] = {"dtypes": (torch.float32,), "dtype": torch.float32}
        tensors = [
            RowTensor(name="weight", dtypes=numbers, dtype=torch.uint8, size=2),
            RowTensor(name="weight.quant_map", of="layer", size=16, check=finite, **scales),
            RowTensor(name=state, dtypes=(torch.uint8,), dtype=torch.float32, of="layer"),
        ]
        if storage.is_nested:
            of_bytes: dict[str, Any] = {"dtypes": (torch.uint8,), "dtype": torch.uint8}
            nested = "weight.nested_quant_map"
            tensors += [
                RowTensor(name="weight.absmax", of="groups", **of_bytes),
                RowTensor(name="weight.nested_absmax", of="groups", check=finite, **scales),
                RowTensor(name=nested, of="layer", size=256, check=finite, **scales),
            ]
        else:
            tensors += [RowTensor(name="weight.absmax", of="groups", check=finite, **scales)]
        super().__init__(name, tensors, _BLOCK, is_flat=True)
        self.storage = storage
        self.state = tensors[2].param

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        param = target.param_name
        if param == self.state:
            return self._state(target, name, source)
        if param == "weight":
            num_out, num_in = self.features_of(target, source)
            # `mapped` is lazy, so that only the shape is read here.
            in_bytes = source.mapped(lambda words: words.reshape(-1).view(torch.uint8))
            check_size(name, in_bytes, num_out * num_in // 2)
            return in_bytes.mapped(lambda each: each.view(num_out, num_in // 2))
        if param == "weight_nested_absmax":
            return self.flat_parts(target, name, finite(name, source), _NESTED_BLOCK)
        return super().arranged(target, name, source)

    def _state(self, target: ParamTarget, name: str, source: CheckpointTensor) -> CheckpointTensor:
        """Return the offset of nested scales, [1, 1], from a tensor that contains settings
        in JSON.
        """
        expected: dict[str, Any] = {
            "quant_type": self.storage.kind,
            "blocksize": _BLOCK,
            "shape": list(self.features_of(target, source)),
        }
        if self.storage.is_nested:
            expected["nested_blocksize"] = _NESTED_BLOCK

        def read(index: Index) -> Tensor:
            try:
                state = json.loads(bytes(source.read(()).tolist()))
                offset = float(state.get("nested_offset", 0.0))
                found = {key: state.get(key) for key in expected}
            except (ValueError, TypeError, AttributeError) as error:
                raise WeightLoadError(f"tensor {name} is not a JSON object: {error}") from error
            if found != expected:
                raise WeightLoadError(
                    f"tensor {name} describes {found}, but the layer needs {expected}"
                )
            return torch.tensor([[offset]])[index]

        shape = torch.Size((1, 1))
        return CheckpointTensor(
            shape, read, dtype=torch.float32, features=source.features, path=source.path
        )

    def fill_indices(self, layer: ParallelLinear) -> None:
        layer.get_parameter("weight_quant_map").copy_(torch.linspace(-1, 1, 16))
        if self.storage.is_nested:
            table = layer.get_parameter("weight_nested_quant_map")
            table.copy_(torch.linspace(-1, 1, 256))

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        scales = on_host(layer, "weight_absmax")
        if self.storage.is_nested:
            table = self.of_outputs(layer, "weight_nested_quant_map")
            offsets = self.of_outputs(layer, self.state)
            nested = on_host(layer, "weight_nested_absmax")
            scales = table.gather(1, scales.long()) * nested + offsets
        packed = on_host(layer, "weight")
        codes = nibbles_of(packed >> 4 | packed << 4)  # the high nibble is the first element
        tables = on_host(layer, "weight_quant_map")
        if bool((tables == tables[0]).all()):
            return TableWeight(codes=codes, table=tables[0], scales=scales)
        sizes = self.part_sizes(layer)
        parts = zip(codes.split(sizes), tables, scales.split(sizes), strict=True)
        return StackedWeight(
            parts=tuple(TableWeight(codes=c, table=t, scales=s) for c, t, s in parts)
        )


class ScaledInt8(RowsLinear):
    """A linear layer in LLM.int8: int8 values times the maximum of their output feature / 127.

    Args:
        name: name of the module.
    """

    def __init__(self, name: str) -> None:
        dtype = torch.int8
        is_other = checked(lambda layout: layout != 0, "a layout that is not row by row")
        tensors = (
            RowTensor(name="weight", dtypes=(dtype,), dtype=dtype),
            scale_tensor("SCB", of="outputs"),
            RowTensor(
                name="weight_format",
                dtypes=(torch.uint8,),
                dtype=torch.uint8,
                of="layer",
                missing=0,
                check=is_other,
            ),
        )
        super().__init__(name, tensors, -1)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        scales = on_host(layer, "SCB") / _LARGEST_INT8
        return GroupedWeight.from_int8(on_host(layer, "weight"), scales[None])
