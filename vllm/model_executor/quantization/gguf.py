"""Blocks of GGUF files that the kernels multiply with as they are.

Types without minimums (Q4_0, Q5_0, Q8_0, Q6_K) are whole numbers times a scale for each group of
neighbours, which is a `GroupedWeight`. All others are dequantized while they are loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import Place, Slice, Source
from vllm.model_executor.layers.stored_linear import StoredLinear, add_parameter, on_host
from vllm.model_executor.quantization.gguf_blocks import GROUPS, Blocks
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import part_names
from vllm.ops.stored_weight import GroupedWeight, pack_nibbles

_PartOf = Callable[[Callable[[Blocks], Tensor], torch.dtype, int], Source]


@dataclass(frozen=True)
class BlockSource(Source):
    """A tensor of blocks; read as it is, it is dequantized."""

    type_name: str = ""
    part: _PartOf | None = None
    """(what to take of blocks, its dtype, its columns) -> that, as a tensor."""


class GGUFBlocks(Quantization):
    """The format of one GGUF model.

    Args:
        types: name of a tensor in checkpoints of transformers -> its type.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        types = {self.types.get(f"{part}.weight", "") for part in part_names(name, layer)}
        if layer.keeps_precision or not types <= GROUPS.keys():
            return None
        return BlockLinear(name, types)


class BlockLinear(StoredLinear):
    """Numbers and scales of one layer, whose parts may have different types.

    Args:
        name: of the module.
        types: of its parts.
    """

    def __init__(self, name: str, types: set[str]) -> None:
        super().__init__(name)
        self.group = min(GROUPS[each] for each in types)
        self.bits = 4 if types == {"Q4_0"} else 8
        self.zero = 1 << (self.bits - 1)
        """The code of the number 0, the same for all parts."""

    def create_parameters(self, layer: ParallelLinear) -> None:
        num_out, num_in = layer.output_size, layer.input_size
        if num_in % self.group:
            raise ConfigError(
                f"{self.name} cannot be split over ranks: a rank would have {num_in} inputs, and "
                f"{self.group} inputs share a scale. Use fewer ranks (tensor_parallel_size)"
            )
        add_parameter(layer, "codes", torch.empty(num_out, num_in, dtype=torch.uint8))
        scales = torch.empty(num_out, num_in // self.group, dtype=torch.float32)
        add_parameter(layer, "scales", scales)
        layer.slices["codes"] = {
            part: replace(slice_, tensor="weight") for part, slice_ in layer.feature_slices.items()
        }
        layer.slices["scales"] = {}  # filled together with the codes

    def load(self, place: Place, name: str, source: Source, tp: TPGroup) -> None:
        slice_ = place.slice
        assert slice_ is not None
        expected = slice_.checkpoint_shape(place.param)
        if not isinstance(source, BlockSource) or source.shape != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the file, the model needs "
                f"{list(expected)}"
            )
        assert source.part is not None
        num_in, own_group = expected[1], GROUPS[source.type_name]
        codes = source.part(self._codes, torch.uint8, num_in)
        slice_.copy(place.param, codes, tp)

        def scales_of(blocks: Blocks) -> Tensor:
            return blocks.scales.repeat_interleave(own_group // self.group, dim=1)

        scales = place.module.get_parameter("scales")
        source_of_scales = source.part(scales_of, torch.float32, num_in // self.group)
        self._by_group(slice_).copy(scales, source_of_scales, tp)

    def _codes(self, blocks: Blocks) -> Tensor:
        return blocks.codes if self.bits == 4 else blocks.codes + (self.zero - blocks.zero)

    def _by_group(self, slice_: Slice) -> Slice:
        if slice_.dim == 0:
            return slice_
        offset, size, total = (n // self.group for n in (slice_.offset, slice_.size, slice_.total))
        return replace(slice_, offset=offset, size=size, total=total)

    def stored_weight(self, layer: ParallelLinear) -> GroupedWeight:
        codes, scales = on_host(layer, "codes"), on_host(layer, "scales").T.contiguous()
        if not bool(scales.isfinite().all()):
            raise WeightLoadError(
                f"the scales of {self.name} contain NaN or infinity: the file is damaged"
            )
        is_packed = self.bits == 4  # two numbers in a byte
        words = pack_nibbles(codes).T.contiguous() if is_packed else codes.view(torch.int32).T
        zeros = torch.full(scales.shape, self.zero, dtype=torch.int16)
        return GroupedWeight(words=words, bits=self.bits, scales=scales, zeros=zeros)
