"""Write the tensors of a layer and the `quantization_config` in each output format.

The formats follow public descriptions: GPTQ (`qweight`, `qzeros`, `scales`, `g_idx`), AWQ in the
layout gemm, and compressed-tensors for fp8 and int8.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.entrypoints.quantize.rounding import Grid, Rounded
from vllm.ops.stored_weight import AWQ_ORDER, pack_bits


def gptq_tensors(rounded: Rounded, bits: int) -> dict[str, Tensor]:
    """Return the tensors of a layer in GPTQ format. Zero points are stored minus one, as in the
    first version of the format.
    """
    return {
        "qweight": pack_bits(rounded.numbers, bits).T.contiguous(),
        "qzeros": pack_bits(rounded.zeros - 1, bits),
        "scales": rounded.scales.half(),
        "g_idx": rounded.groups,
    }


def gptq_settings(grid: Grid, by_activation: bool, dense: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a GPTQ checkpoint.

    Args:
        grid: values to which weights are rounded.
        by_activation: whether the inputs of a group may have any position ("act-order").
        dense: names of modules that are not quantized, including their submodules.
    """
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": grid.bits,
        "group_size": grid.group_size,
        "desc_act": by_activation,
        "sym": grid.is_symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    if dense:
        settings["dynamic"] = {f"-:^{re.escape(name)}($|\\.)": {} for name in dense}
    return settings


def awq_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """Return the tensors of a layer in AWQ format, with eight outputs of an input in one word."""

    def words(numbers: Tensor) -> Tensor:
        eights = numbers.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)]
        return pack_bits(eights.flatten(1), 4)

    return {
        "qweight": words(rounded.numbers.T.contiguous()),
        "qzeros": words(rounded.zeros),
        "scales": rounded.scales.half(),
    }


def awq_settings(grid: Grid, dense: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of an AWQ checkpoint. The arguments are the same as for
    `gptq_settings`.
    """
    return {
        "quant_method": "awq",
        "bits": grid.bits,
        "group_size": grid.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(dense) or None,
    }


def fp8_tensors(weight: Tensor) -> dict[str, Tensor]:
    """Round a weight to fp8 (e4m3), with one scale per output."""
    scales = _row_scales(weight, torch.finfo(torch.float8_e4m3fn).max)
    return {"weight": (weight.float() / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def int8_tensors(weight: Tensor) -> dict[str, Tensor]:
    """Round a weight to int8, with one scale per output."""
    scales = _row_scales(weight, 127)
    return {"weight": (weight.float() / scales).round().to(torch.int8), "weight_scale": scales}


def compressed_settings(kind: str, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the compressed-tensors settings for 8 bits per value, with one input scale per token.

    Args:
        kind: "float" or "int".
        ignored: names of linear layers that are not quantized.
    """
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "float" else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def _row_scales(weight: Tensor, largest: float) -> Tensor:
    scales = weight.float().abs().amax(1, keepdim=True) / largest
    return torch.where(scales == 0, 1.0, scales)
