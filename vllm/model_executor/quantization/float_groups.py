"""Linear layers of 4- or 8-bit floats with scales per group: NVFP4, MXFP4 and MXFP8.

NVFP4 has an e4m3 scale for each 16 inputs and a float32 factor for the layer. The MX formats of the
OCP specification have a power of two for each 32 inputs. Scales of inputs in a checkpoint are not
used: inputs keep the dtype of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.stored.stored_linear import on_host
from vllm.model_executor.layers.stored.stored_scales import without_nan
from vllm.model_executor.quantization.row_tensors import (
    BYTES,
    RowsLinear,
    RowTensor,
    checked,
    scale_tensor,
)
from vllm.ops.stored_weight import E8M0_BIAS, Fp8Weight, Mxfp4Weight, Nvfp4Weight, StoredWeight

FloatKind = Literal["NVFP4", "MXFP4", "MXFP8"]

GROUPS: dict[FloatKind, int] = {"NVFP4": 16, "MXFP4": 32, "MXFP8": 32}
"""Inputs that share a scale."""

E8M0_NAN = 255
"""NaN as a scale in E8M0."""


@dataclass(frozen=True, kw_only=True)
class FloatNames:
    """Names of the tensors of NVFP4 or MX layers in a kind of checkpoint."""

    packed: str = "weight"
    """Name of the tensor with elements of four bits."""
    factor: str = "weight_scale_2"
    """Name of the tensor with the factor of the layer, in NVFP4."""
    input_factor: str = "input_scale"
    """Name of the tensor with the factor of the inputs, which is not used."""
    is_divisor: bool = False
    """Weights are divided by the factor."""


def described(kind: FloatKind, rounds_inputs: bool) -> str:
    """Return the name of the format for the log.

    Args:
        kind: kind of the elements.
        rounds_inputs: the checkpoint is meant for inputs quantized to the same format.
    """
    bits = 8 if kind == "MXFP8" else 4
    return f"{kind} (W{bits}A{bits}, read as W{bits}A16)" if rounds_inputs else kind


def float_linear(name: str, kind: FloatKind, names: FloatNames) -> RowsLinear:
    """Create the weight method of a layer with elements of this kind."""
    methods: dict[FloatKind, Callable[[str, FloatNames], RowsLinear]] = {
        "NVFP4": Nvfp4Linear,
        "MXFP4": PackedMxfp4Linear,
        "MXFP8": Mxfp8Linear,
    }
    return methods[kind](name, names)


valid_scales = checked(
    lambda x: ~(x.view(torch.float8_e4m3fn).float() >= 0), "NaN or negative scales"
)
"""Check of scales in e4m3."""
valid_powers = checked(lambda x: x == E8M0_NAN, f"{E8M0_NAN}, which is NaN")
"""Check of scales in E8M0."""
_POSITIVE = checked(
    lambda x: ~((x > 0) & x.isfinite()), "a factor that is not a positive, finite number"
)


class Nvfp4Linear(RowsLinear):
    """A linear layer in NVFP4.

    Args:
        name: name of the module.
        names: names of its tensors.
    """

    def __init__(self, name: str, names: FloatNames) -> None:
        tensors = (
            RowTensor(name=names.packed, dtypes=BYTES, dtype=torch.uint8, size=2),
            RowTensor(
                name="weight_scale",
                dtypes=(torch.float8_e4m3fn,),
                dtype=torch.float8_e4m3fn,
                of="groups",
                check=valid_scales,
            ),
            scale_tensor(names.factor, of="layer", check=_POSITIVE),
        )
        super().__init__(name, tensors, GROUPS["NVFP4"])
        self.names = names
        self.unused_tensors = (names.input_factor,)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        factors = self.of_outputs(layer, self.names.factor)[:, 0]
        return Nvfp4Weight(
            packed=on_host(layer, self.names.packed),
            scales=on_host(layer, "weight_scale"),
            factors=1 / factors if self.names.is_divisor else factors,
        )


class PackedMxfp4Linear(RowsLinear):
    """A linear layer in MXFP4, with elements and scales in separate tensors.

    For the arguments see `Nvfp4Linear`.
    """

    def __init__(self, name: str, names: FloatNames) -> None:
        tensors = (RowTensor(name=names.packed, dtypes=BYTES, dtype=torch.uint8, size=2), _POWERS)
        super().__init__(name, tensors, GROUPS["MXFP4"])
        self.packed_name = names.packed

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        scales = on_host(layer, "weight_scale")
        blocks = on_host(layer, self.packed_name).unflatten(1, (scales.shape[1], -1))
        return Mxfp4Weight(blocks=blocks, scales=scales)


class Mxfp8Linear(RowsLinear):
    """A linear layer in MXFP8: e4m3 elements. For the arguments see `Nvfp4Linear`."""

    def __init__(self, name: str, names: FloatNames) -> None:
        dtype = torch.float8_e4m3fn
        tensors = (RowTensor(name="weight", dtypes=(dtype,), dtype=dtype), _POWERS)
        super().__init__(name, tensors, GROUPS["MXFP8"])

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        numbers = without_nan(self.name, on_host(layer, "weight"))
        scales = e8m0_scales(on_host(layer, "weight_scale"))
        return Fp8Weight(numbers=numbers, scales=scales, block_inputs=self.part)


_POWERS = RowTensor(
    name="weight_scale", dtypes=BYTES, dtype=torch.uint8, of="groups", check=valid_powers
)


def e8m0_scales(exponents: Tensor) -> Tensor:
    """Convert e8m0 exponents to powers of two in float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - E8M0_BIAS)
