"""FP8 checkpoints: float8_e4m3fn weights with scales per tensor, output feature or block.

The dialects `fp8` (AutoFP8, DeepSeek, Qwen), `fbgemm_fp8` (Llama) and `modelopt` differ in the
names of settings. The shape of a layer's scale tensor decides how many scales there are: one value,
one per output feature, or one per block if `weight_block_size` is set. `input_scale` is for static
activation scales; devices that do not quantize inputs ignore it. An output head is in FP8 if the
checkpoint has scales for it.
"""

import re
from math import gcd
from typing import Any

import torch
from torch import Tensor

from vllm.distributed import TPGroup
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget, Slice, whole
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
    without_nan,
    without_zero_scales,
)
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.row_tensors import check_shape
from vllm.model_executor.quantization.settings import (
    MAX_GROUP,
    Settings,
    choice,
    names,
    read_modelopt_settings,
    wrong,
)
from vllm.ops.stored_weight import Fp8Weight

_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")
"""Names of the one element type that such checkpoints have."""


MODELOPT_FP8: dict[str, tuple[int, int] | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": (128, 128),
}
"""Algorithms of ModelOpt, and how many outputs and inputs share a scale; None: see the shape of its
tensor. The first one has a static scale of inputs."""


class Fp8(CheckpointFormat[bool]):
    """The quantization format of `quant_method: fp8` and `fbgemm_fp8`."""

    telling_tensor: str

    def __init__(self, settings: Settings | None) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        settings = settings or {}
        scheme = choice(settings, "activation_scheme", ("dynamic", "static"), "dynamic")
        choice(settings, "fmt", _E4M3, _E4M3[0])
        self.has_input_scale = scheme == "static"
        self.block = block_of(settings, "weight_block_size")
        self.telling_tensor = "weight_scale_inv" if self.block else "weight_scale"
        if self.block and self.has_input_scale:
            raise wrong("activation_scheme", scheme, "dynamic, because weight_block_size is set")
        self.ignored = names(settings, "ignored_layers", "modules_to_not_convert")

    def storage(self, names: Names) -> bool:
        return True

    def method(self, name: str, storage: bool) -> LinearMethod:
        return Fp8Linear(name, self.block, self.has_input_scale, self.telling_tensor)


class ModelOptFp8(Fp8):
    """The quantization format of `quant_method: modelopt` with `quant_algo: FP8`."""

    def __init__(self, settings: Settings | None) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        settings = read_modelopt_settings(settings or {})
        self.algorithm = choice(settings, "quant_algo", tuple(MODELOPT_FP8))
        choice(settings, "kv_cache_quant_algo", ("FP8", None), None)
        super().__init__(None)
        self.ignored = names(settings, "ignore", "exclude_modules")

    def method(self, name: str, storage: bool) -> LinearMethod:
        return modelopt_fp8_linear(name, self.algorithm)


def modelopt_fp8_linear(name: str, algorithm: str) -> "Fp8Linear":
    """Return the method of a layer of ModelOpt.

    Args:
        name: name of the layer.
        algorithm: one of `MODELOPT_FP8`.
    """
    return Fp8Linear(name, MODELOPT_FP8[algorithm], algorithm == "FP8")


def block_of(settings: Settings, key: str) -> tuple[int, int] | None:
    """Return the size of a block that shares a scale, (outputs, inputs); None if it is not set.

    Raises:
        ConfigError: the setting is not two positive integers.
    """
    block = settings.get(key)
    if block is None:
        return None
    if isinstance(block, str) and re.fullmatch(r"[0-9]{1,6}x[0-9]{1,6}", block):
        block = [int(size) for size in block.split("x")]  # as older releases wrote it
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(n) is int and 0 < n <= MAX_GROUP for n in block):
        raise wrong(key, block, f"two numbers from 1 to {MAX_GROUP}")
    return block[0], block[1]


class Fp8Linear(StoredLinear):
    """A linear layer with an FP8 weight [output_size, input_size].

    Scales are kept per output feature, [output_size, blocks of inputs], so that parts of a packed
    layer and slices of ranks may begin anywhere in a block of outputs. If the inputs of a rank
    begin or end inside a block, blocks of inputs are divided into smaller ones with the same scale.

    Args:
        name: name of the module.
        block: outputs and inputs that share a scale; None: per tensor or per output feature.
        has_input_scale: the checkpoint has a static scale of inputs.
        scale_name: last part of the name of the scales.
    """

    def __init__(
        self,
        name: str,
        block: tuple[int, int] | None,
        has_input_scale: bool,
        scale_name: str = "weight_scale",
    ) -> None:
        super().__init__(name)
        self.block = block
        self.has_input_scale = has_input_scale
        self.scale_name = scale_name
        self.block_inputs = 0
        """Inputs of this rank that share a scale."""

    def create_parameters(self, layer: ParallelLinear) -> None:
        num_out, num_in = layer.output_size, layer.input_size
        self.block_inputs = num_in
        if self.block:
            slices = layer.feature_slices.values()
            split = [each.size for each in slices if each.dim == 1 and each.size != each.total]
            self.block_inputs = gcd(self.block[1], *split)
        num_blocks = -(-num_in // self.block_inputs)
        add_parameter(layer, "weight", torch.empty(num_out, num_in, dtype=torch.float8_e4m3fn))
        scales = torch.empty(num_out, num_blocks, dtype=torch.float32)
        add_parameter(layer, self.scale_name, scales)
        layer.slices["weight"] = dict(layer.feature_slices)
        layer.slices[self.scale_name] = {
            part: self._scale_slice(slice_, num_out, num_blocks, layer.tp)
            for part, slice_ in layer.feature_slices.items()
        }
        if self.has_input_scale:
            names = list(layer.feature_slices)
            add_parameter(layer, "input_scale", torch.empty(len(names), dtype=torch.float32))
            layer.slices["input_scale"] = {p: whole(0, i, 1, layer.tp) for i, p in enumerate(names)}

    def _scale_slice(self, slice_: Slice, num_out: int, num_blocks: int, tp: TPGroup) -> Slice:
        if slice_.dim == 0:
            return slice_
        if self.block is None:
            return whole(0, 0, num_out, tp)
        return Slice(1, 0, num_blocks, -(-slice_.total // self.block_inputs))

    def stored_tensors(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((torch.float8_e4m3fn,)),
            self.scale_name: StoredTensor(SCALES),
            "input_scale": StoredTensor(SCALES, output_dim=None),
        }

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        if target.param_name == self.scale_name:
            return self._per_output(target, name, source)
        return one_scale(name, source) if target.param_name == "input_scale" else source

    def _per_output(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        """Expand the scales of a checkpoint tensor to [outputs, blocks of inputs]."""
        assert target.slice is not None
        num_out, num_blocks = target.slice.checkpoint_shape(target.param)
        if source.features is not None:
            num_out = source.features.total
        accepted = [(), (1,), (1, 1), (num_out,), (num_out, 1)]
        if self.block:
            num_in = num_blocks * self.block_inputs
            blocks = -(-num_out // self.block[0]), -(-num_in // self.block[1])
            accepted = [blocks, (blocks[0], 1, blocks[1], 1)]  # ModelOpt keeps the dimensions
        check_shape(name, source, *accepted)

        def expand(scales: Tensor) -> Tensor:
            if self.block:
                scales = scales.reshape(accepted[0])
                repeats = self.block[1] // self.block_inputs
                scales = scales.repeat_interleave(repeats, dim=1)[:, :num_blocks]
                return scales.repeat_interleave(self.block[0], dim=0)[:num_out]
            return scales.reshape(-1, 1).expand(num_out, num_blocks)

        return checked_scales(name, source).mapped(expand)

    def stored_weight(self, layer: ParallelLinear) -> Fp8Weight:
        numbers = without_nan(self.name, on_host(layer, "weight"))
        input_scale: Any = on_host(layer, "input_scale") if self.has_input_scale else None
        weight = Fp8Weight(
            numbers=numbers,
            scales=on_host(layer, self.scale_name),
            block_inputs=self.block_inputs,
            input_scale=None if input_scale is None else float(input_scale.max()),
        )
        return without_zero_scales(self.name, weight)
