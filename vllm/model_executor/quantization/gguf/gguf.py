"""GGUF blocks that the kernels multiply with directly.

Types without minimums (Q4_0, Q5_0, Q8_0, Q6_K) are integers times a scale for each group of
neighbours, a `GroupedWeight`. Types with minimums, and Q3_K (as four bits), are a `MinimumWeight`.
All others are dequantized while they are loaded.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.embedding import (
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget, Slice
from vllm.model_executor.layers.stored.stored_experts import EXPERT_PARTS, StoredExperts
from vllm.model_executor.layers.stored.stored_linear import (
    StoredLinear,
    StoredTable,
    add_parameter,
    on_host,
)
from vllm.model_executor.quantization.gguf.blocks import STORED, Blocks, BlockType
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import part_names
from vllm.ops.stored_weight import (
    GroupedWeight,
    GroupScales,
    MinimumWeight,
    StackedWeight,
    pack_nibbles,
)

_EMBEDDING = "model.embed_tokens"
"""Layer whose table a tied head has."""

_ScalesOf = Callable[[Blocks], GroupScales]
_PartOf = Callable[[Callable[[Blocks], Tensor], torch.dtype, int], CheckpointTensor]


@dataclass(frozen=True)
class BlockSource(CheckpointTensor):
    """A tensor of GGUF blocks; reading it gives dequantized values."""

    part: _PartOf | None = None
    """(what to take of blocks, its dtype, its columns) -> that, as a tensor."""


class GGUFBlocks(Quantization):
    """The quantization format of one GGUF model.

    Args:
        types: name of a parameter, or of a part of it -> GGUF type of its tensor.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if layer.keeps_precision:
            return None
        types = [self._type(part) for part in part_names(name, layer)]
        method = _method(name, types)
        if method is not None or not all(types):
            return method
        methods = {}
        for part, type_ in zip(layer.feature_slices, types, strict=True):
            own = _method(name, [type_], part)
            assert own is not None
            methods[part] = own
        return StackedBlocks(name, methods)

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        if isinstance(layer, ParallelLMHead) and layer.is_tied:
            name = _EMBEDDING
        method = _method(name, [self._type(name)])
        return None if method is None else StoredTable(method)

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        parts = (f"{name}.0.{part}" for part in EXPERT_PARTS)
        return StoredExperts(name) if all(self._type(part) for part in parts) else None

    def _type(self, name: str) -> BlockType | None:
        """Return the block type of the weight of a layer; None if it is dequantized while
        loading.
        """
        return STORED.get(self.types.get(f"{name}.weight", ""))


def _method(
    name: str, types: Sequence[BlockType | None], part: str | None = None
) -> "BlockLinear | None":
    """Create the weight method of a layer; None if its types cannot be combined."""
    stored = [each for each in types if each is not None]
    if len(stored) < len(types):
        return None
    if not any(each.has_minimums for each in stored):
        return ScaledBlocks(name, stored, part)
    # The kernels do not support 5 bits with groups of 16.
    fits = max(each.bits for each in stored) == 4 or min(each.group for each in stored) == 32
    fits = fits and all(each.factor_group for each in stored)
    return MinimumBlocks(name, stored, part) if fits else None


class BlockLinear(StoredLinear):
    """A linear layer of quantized values and scales, whose parts may have different GGUF types.

    Args:
        name: name of the module.
        types: types of its parts.
        part: the only part that is stored here; None: all parts.
    """

    bits: int
    """Bits of a quantized value, after all parts were given the same number of bits."""

    def __init__(self, name: str, types: Sequence[BlockType], part: str | None = None) -> None:
        super().__init__(name)
        self.types = types
        self.part = part
        self.prefix = "" if part is None else f"{part}_"
        """Prefix of the names of parameters."""
        self.group = min(each.group for each in types)

    @abstractmethod
    def create_scales(self, num_in: int) -> list["_Scales"]:
        """Describe the parameters, other than the quantized values, of a layer with `num_in`
        inputs.
        """

    @abstractmethod
    def codes(self, blocks: Blocks) -> Tensor:
        """Return the quantized values of some blocks, [rows, N] uint8."""

    def create_parameters(self, layer: ParallelLinear) -> None:
        num_out, num_in = layer.output_size, layer.input_size
        if num_in % self.group:
            raise ConfigError(
                f"{self.name} cannot be split over ranks: a rank would have {num_in} inputs, but "
                f"{self.group} inputs share a scale. Use fewer ranks (tensor_parallel_size)"
            )
        slices = {
            part: replace(slice_, tensor="weight")
            for part, slice_ in layer.feature_slices.items()
            if self.part in (None, part)
        }
        if self.part is not None:
            num_out = slices[self.part].size
            slices[self.part] = replace(slices[self.part], offset=0)
        self._add(layer, "codes", torch.empty(num_out, num_in, dtype=torch.uint8), slices)
        self.scales = self.create_scales(num_in)
        for each in self.scales:
            values = torch.empty(num_out, num_in // each.group, dtype=each.dtype)
            self._add(layer, each.name, values, {})  # no slices: filled together with the codes

    def _add(
        self, layer: ParallelLinear, name: str, values: Tensor, slices: dict[str, Slice]
    ) -> None:
        add_parameter(layer, self.prefix + name, values)
        layer.slices[self.prefix + name] = slices

    def read(self, layer: ParallelLinear, name: str) -> Tensor:
        """Return a parameter of the layer, in host memory."""
        return on_host(layer, self.prefix + name)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        slice_ = target.slice
        assert slice_ is not None
        expected = slice_.checkpoint_shape(target.param)
        if not isinstance(source, BlockSource) or source.shape != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the file, the model needs "
                f"{list(expected)}"
            )
        assert source.part is not None
        num_in = expected[1]
        slice_.copy(target.param, source.part(self.codes, torch.uint8, num_in), tp)
        for each in self.scales:
            values = source.part(each.of(num_in), each.dtype, num_in // each.group)
            param = target.module.get_parameter(self.prefix + each.name)
            slice_.in_groups(each.group).copy(param, values, tp)


@dataclass(frozen=True)
class _Scales:
    """A parameter with one value for each group of inputs."""

    name: str
    group: int
    dtype: torch.dtype
    get: Callable[[Blocks], Tensor]
    """The numbers of some blocks, for as large groups or for larger ones."""

    def of(self, num_in: int) -> Callable[[Blocks], Tensor]:
        """Return a function from blocks to this parameter's values, [rows, num_in / group]."""

        def numbers(blocks: Blocks) -> Tensor:
            own = self.get(blocks)
            return own.repeat_interleave(num_in // self.group // own.shape[1], dim=1)

        return numbers


class ScaledBlocks(BlockLinear):
    """A linear layer of types without minimums: integers minus a zero point, times a scale."""

    def __init__(self, name: str, types: Sequence[BlockType], part: str | None = None) -> None:
        super().__init__(name, types, part)
        self.bits = 4 if all(each.bits == 4 for each in types) else 8
        self.zero = 1 << (self.bits - 1)
        """The code of the number 0, the same for all parts."""

    def create_scales(self, num_in: int) -> list[_Scales]:
        return [_Scales("scales", self.group, torch.float32, lambda blocks: blocks.scales.values())]

    def codes(self, blocks: Blocks) -> Tensor:
        return blocks.codes if self.bits == 4 else blocks.codes + (self.zero - blocks.zero)

    def stored_weight(self, layer: ParallelLinear) -> GroupedWeight:
        codes, scales = self.read(layer, "codes"), self.read(layer, "scales").T.contiguous()
        _check(self.name, scales)
        is_packed = self.bits == 4  # two 4-bit codes in a byte
        words = pack_nibbles(codes).T.contiguous() if is_packed else codes.view(torch.int32).T
        zeros = torch.full(scales.shape, self.zero, dtype=torch.int16)
        return GroupedWeight(words=words, bits=self.bits, scales=scales, zeros=zeros)


class MinimumBlocks(BlockLinear):
    """A linear layer of types with minimums, or whose zero point * scale acts as a minimum."""

    def __init__(self, name: str, types: Sequence[BlockType], part: str | None = None) -> None:
        super().__init__(name, types, part)
        self.bits = max(each.bits for each in types)

    def create_scales(self, num_in: int) -> list[_Scales]:
        # The part of a rank may begin inside a block, but it always has whole groups.
        shared = math.gcd(num_in, *(each.factor_group for each in self.types))
        kinds: dict[str, _ScalesOf] = {
            "scale": lambda blocks: blocks.scales,
            "minimum": lambda blocks: blocks.taken_off(),
        }
        found = []
        for kind, get in kinds.items():

            def factors(blocks: Blocks, get: _ScalesOf = get) -> Tensor:
                return get(blocks).factors

            def multipliers(blocks: Blocks, get: _ScalesOf = get) -> Tensor:
                return get(blocks).multipliers

            found += [
                _Scales(f"{kind}_factors", shared, torch.float32, factors),
                _Scales(f"{kind}_multipliers", self.group, torch.int8, multipliers),
            ]
        return found

    def codes(self, blocks: Blocks) -> Tensor:
        return blocks.codes

    def stored_weight(self, layer: ParallelLinear) -> MinimumWeight:
        scales, minimums = (
            GroupScales(
                factors=self.read(layer, f"{kind}_factors"),
                multipliers=self.read(layer, f"{kind}_multipliers"),
            )
            for kind in ("scale", "minimum")
        )
        _check(self.name, scales.factors, minimums.factors)
        return MinimumWeight(
            codes=self.read(layer, "codes"), bits=self.bits, scales=scales, minimums=minimums
        )


class StackedBlocks(StoredLinear):
    """A layer whose parts have types that cannot be combined: each has its own parameters.

    Args:
        name: name of the module.
        methods: name of a part -> how it is stored.
    """

    def __init__(self, name: str, methods: Mapping[str, BlockLinear]) -> None:
        super().__init__(name)
        self.methods = methods

    def create_parameters(self, layer: ParallelLinear) -> None:
        for method in self.methods.values():
            method.create_parameters(layer)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        for method in self.methods.values():
            if target.param_name == f"{method.prefix}codes":
                method.load(target, name, source, tp)

    def stored_weight(self, layer: ParallelLinear) -> StackedWeight:
        return StackedWeight(
            parts=tuple(method.stored_weight(layer) for method in self.methods.values())
        )


def _check(name: str, *scales: Tensor) -> None:
    if not all(bool(each.isfinite().all()) for each in scales):
        raise WeightLoadError(f"the scales of {name} contain NaN or infinity: the file is damaged")
