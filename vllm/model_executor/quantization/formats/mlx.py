"""MLX checkpoints: integers of 2 to 8 bits with a scale and a bias per group of inputs (`affine`).

Also MXFP4, MXFP8 and NVFP4. Linear layers, embeddings and output heads may be quantized. Values of
up to 5 bits keep their scales and biases; larger ones are converted to int8 in the same groups.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm.model_executor.layers.embedding import (
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import WORD_BITS
from vllm.model_executor.layers.stored.stored_linear import StoredTable, on_host
from vllm.model_executor.layers.stored.stored_scales import without_nan
from vllm.model_executor.quantization.checkpoint_format import NamedFormat, Names
from vllm.model_executor.quantization.float_groups import (
    GROUPS,
    FloatKind,
    e8m0_scales,
    valid_powers,
    valid_scales,
)
from vllm.model_executor.quantization.row_tensors import (
    BYTES,
    RowsLinear,
    RowTensor,
    finite,
    scale_tensor,
)
from vllm.model_executor.quantization.settings import MAX_GROUP, Settings, choice, wrong
from vllm.ops.stored_weight import (
    Fp8Weight,
    MinimumWeight,
    Mxfp4Weight,
    Nvfp4Weight,
    StoredWeight,
    round_in_groups,
    unpack_bits,
)

_FLOATS: dict[str, FloatKind] = {"mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
"""Modes with scales and without biases."""
_AFFINE = "affine"
_MAX_BITS = 5
"""The most bits of elements that keep scales and minimums."""


@dataclass(frozen=True)
class _Layout:
    """Storage format of a layer in the checkpoint."""

    mode: str
    bits: int
    group_size: int


class MLX(NamedFormat[_Layout]):
    """The quantization format of MLX checkpoints.

    The names of tensors show which layers are quantized.
    """

    telling_tensor = "scales"

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        self.layout = _layout_of(settings, settings, "")
        self.of_layers = {
            name: _layout_of(own, settings, f"{name}.")
            for name, own in settings.items()
            if isinstance(own, dict)
        }
        self.table: Names = ()

    def storage(self, names: Names) -> _Layout:
        return next((self.of_layers[n] for n in names if n in self.of_layers), self.layout)

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        is_head = isinstance(layer, ParallelLMHead)
        if is_head and not layer.is_tied:
            return super().embedding_method(name, layer)
        if not is_head:
            self.table = self.names_of(name)
        storage = self.storage(self.table) if self.is_stored(self.table) else None
        return None if storage is None else StoredTable(self.method(self.table[0], storage))

    def method(self, name: str, storage: _Layout) -> RowsLinear:
        return MLXLinear(name, storage.mode, storage.bits, storage.group_size)

    def described(self, storage: _Layout) -> str:
        return f"MLX {storage.mode}, {storage.bits} bits"


def _layout_of(settings: Settings, default: Settings, within: str) -> _Layout:
    """Return how a layer is stored, from its settings; missing settings are taken from the
    default.
    """
    settings = {**{key: default[key] for key in ("mode",) if key in default}, **settings}
    mode = choice(settings, "mode", (_AFFINE, *_FLOATS), _AFFINE, within)
    kind = _FLOATS.get(mode)
    bits: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    sizes = tuple(2**n for n in range(4, MAX_GROUP.bit_length()))
    if kind is not None:
        bits, sizes = (8 if kind == "MXFP8" else 4,), (GROUPS[kind],)
    size = settings.get("group_size", sizes[0] if kind else 64)
    if type(size) is not int or size not in sizes:
        raise wrong(f"{within}group_size", size, f"{sizes[0]}" if kind else "16, 32, 64, 128 ...")
    return _Layout(mode, choice(settings, "bits", bits, bits[0] if kind else 4, within), size)


class MLXLinear(RowsLinear):
    """A linear layer of 32-bit words that pack the values of an output one after another.

    Args:
        name: name of the module.
        mode: mode of the values: affine or one of the float formats.
        bits: bits of one value.
        group: inputs of a group.
    """

    def __init__(self, name: str, mode: str, bits: int, group: int) -> None:
        is_whole = WORD_BITS % bits == 0
        words = RowTensor(
            name="weight",
            dtypes=(torch.int32,),
            dtype=torch.int32,
            size=WORD_BITS // bits if is_whole else WORD_BITS,
            elements=1 if is_whole else bits,
        )
        if mode == _AFFINE:
            scales = [scale_tensor(name, check=finite) for name in ("scales", "biases")]
        else:
            check = valid_scales if mode == "nvfp4" else valid_powers
            values: dict[str, Any] = {"of": "groups", "dtypes": BYTES, "dtype": torch.uint8}
            scales = [RowTensor(name="scales", check=check, **values)]
        tensors = [words, *scales]
        super().__init__(name, tensors, group)
        self.mode, self.bits = mode, bits

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        words, scales = on_host(layer, "weight"), on_host(layer, "scales")
        if self.mode == "mxfp4":
            blocks = words.view(torch.uint8).unflatten(1, (scales.shape[1], -1))
            return Mxfp4Weight(blocks=blocks, scales=scales)
        if self.mode == "nvfp4":
            factors = torch.ones(len(words))
            e4m3 = scales.view(torch.float8_e4m3fn)
            return Nvfp4Weight(packed=words.view(torch.uint8), scales=e4m3, factors=factors)
        codes = unpack_bits(words, self.bits)
        if self.mode == "mxfp8":
            numbers = without_nan(self.name, codes.view(torch.float8_e4m3fn))
            return Fp8Weight(numbers=numbers, scales=e8m0_scales(scales), block_inputs=self.part)
        biases = on_host(layer, "biases")
        if self.bits <= _MAX_BITS:
            return MinimumWeight.of_groups(codes, self.bits, scales, -biases)
        grouped = codes.unflatten(1, (scales.shape[1], -1))
        return round_in_groups(grouped * scales[..., None] + biases[..., None])
