"""AWQ checkpoints (arXiv 2306.00978) with 4 bits, with or without zero points, in two layouts.

`gemm` packs several outputs of an input into a word, in its own order. `gemv` packs several inputs
of an output, in their order; its scales and zero points are padded.

Without zero points (`zero_point: false`) 8 is subtracted from the values; a tensor `qzeros`, if
present, says the same.
"""

import torch

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import WORD_BITS, CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import on_host
from vllm.model_executor.layers.stored.stored_scales import checked_scales, without_zero_scales
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.grouped import GroupedLinear, GroupLayout, check_symmetric
from vllm.model_executor.quantization.row_tensors import RowsLinear, RowTensor, scale_tensor
from vllm.model_executor.quantization.settings import Settings, choice, group_size_of, names
from vllm.ops.stored_weight import GroupedWeight, StoredWeight, unpack_bits

_BITS = 4
_PER_WORD = WORD_BITS // _BITS
_LAYOUT_OF = dict.fromkeys(("exllama", "exllamav2", "ipex"), "gemm")
"""Kernels that AutoAWQ names as `version`, and that read another layout -> that layout."""


class AWQ(CheckpointFormat[GroupLayout]):
    """The quantization format of `quant_method: awq`."""

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        old_names = {"w_bit": "bits", "q_group_size": "group_size"}
        settings = {old_names.get(key, key): value for key, value in settings.items()}
        version = settings.get("version", "gemm")
        if isinstance(version, str):
            settings["version"] = _LAYOUT_OF.get(version.lower(), version.lower())
        self.version = choice(settings, "version", ("gemm", "gemv"), "gemm")
        self.layout = GroupLayout(
            bits=choice(settings, "bits", (_BITS,)),
            # AutoAWQ and transformers take 128 if the file names no size.
            group_size=group_size_of({"group_size": 128, **settings}),
            is_awq=True,
            is_symmetric=not choice(settings, "zero_point", (True, False), True),
        )
        self.has_head = choice(settings, "lm_head", (False, True), False)
        self.ignored = names(settings, "modules_to_not_convert")

    def stores_head(self, names: Names) -> bool:
        return bool(self.has_head)

    def storage(self, names: Names) -> GroupLayout:
        return self.layout

    def method(self, name: str, storage: GroupLayout) -> LinearMethod:
        return GemvLinear(name, storage) if self.version == "gemv" else GroupedLinear(name, storage)


class GemvLinear(RowsLinear):
    """A linear layer with qweight, qzeros and scales in the `gemv` layout.

    Args:
        name: name of the module.
        layout: bits, group size and zero points.
    """

    def __init__(self, name: str, layout: GroupLayout) -> None:
        words = (torch.int32,)
        implied = float(layout.middle) if layout.is_symmetric else None
        tensors = (
            RowTensor(name="qweight", dtypes=words, dtype=torch.int32, size=_PER_WORD),
            scale_tensor("scales", check=None),
            RowTensor(name="qzeros", dtypes=words, dtype=torch.uint8, of="groups", missing=implied),
        )
        super().__init__(name, tensors, layout.group_size)
        self.layout = layout

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        if target.param_name == "scales":
            # Groups of padding have a scale of 0.
            source = checked_scales(name, source)
        elif target.param_name == "qzeros":
            shape = torch.Size((source.shape[0], source.shape[-1] * _PER_WORD))
            source = source.made(shape, torch.uint8, lambda words: unpack_bits(words, _BITS))
        else:
            return source
        num_groups = self.total_inputs // self.group
        if len(source.shape) != 2 or not num_groups <= source.shape[1] <= 8 * num_groups + 64:
            raise WeightLoadError(
                f"tensor {name} has values of {list(source.shape)} groups in the checkpoint, but "
                f"the layer needs {num_groups} for each output, plus padding"
            )
        return super().arranged(target, name, source.narrow(1, 0, num_groups))

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        scales, zeros = on_host(layer, "scales"), on_host(layer, "qzeros")
        if self.layout.is_symmetric:
            check_symmetric(self.name, self.layout, zeros)
        weight = GroupedWeight(
            words=on_host(layer, "qweight").T.contiguous(),
            bits=_BITS,
            scales=scales.T.contiguous(),
            zeros=zeros.T.to(torch.int16).contiguous(),
        )
        return without_zero_scales(self.name, weight)
