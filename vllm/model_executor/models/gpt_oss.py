"""GPT-OSS."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
)
from vllm.model_executor.models.fused_weights import experts_in
from vllm.model_executor.models.mixture import Mixture, mixture_options
from vllm.model_executor.quantization.formats.mxfp4 import check_mxfp4, mxfp4_source
from vllm.ops.expert_options import ExpertOptions


class GptOssLayer(DecoderLayer):
    """A `DecoderLayer` of experts with biases and a clamped SwiGLU activation."""

    def make_mlp(self, spec: LayerSpec) -> Mixture:
        arch = spec.arch
        experts = ExpertOptions(
            alpha=arch.config_number("swiglu_alpha", 1.702),
            limit=arch.config_number("swiglu_limit", 7.0),
        )
        mixture = replace(mixture_options(arch), has_bias=True, experts=experts)
        return Mixture(arch, mixture, spec.tp)


class GptOssForCausalLM(DecoderForCausalLM):
    """GPT-OSS 20B and 120B (OpenAI 2025, arXiv 2508.10925), in MXFP4 or dense. Attention has sinks,
    and in every second layer a sliding window.
    """

    layer_type = GptOssLayer
    checkpoint_names: ClassVar[dict[str, str]] = {".mlp.router.": ".mlp.gate."}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self._blocks: dict[str, tuple[str, Tensor]] = {}
        """Name of a weight in MXFP4 -> the part that was read first: "blocks" or "scales", and its
        tensor."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), has_sinks=True)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the tensors with the weights of all experts.

        Dense they are [experts, in, out], in MXFP4 [experts, out, in]. Gates and ups alternate.
        """
        parent, _, kind = name.rpartition(".experts.")
        if not parent:
            return ((name, source),)
        weight, _, suffix = kind.rpartition("_")
        if suffix in ("blocks", "scales"):
            return self._from_mxfp4(f"{parent}.experts.", weight, suffix, source)
        is_bias = kind.endswith("_bias")
        experts = experts_in(name, source, mixture_options(self.arch).num_experts)
        kind = kind.removesuffix("_bias")
        return _by_expert(f"{parent}.experts.", kind, source, is_bias, experts)

    def _from_mxfp4(
        self, parent: str, weight: str, suffix: str, source: CheckpointTensor
    ) -> Iterator[tuple[str, CheckpointTensor]]:
        first = self._blocks.pop(parent + weight, None)
        if first is None:  # read it now: the file may be closed when the second tensor arrives
            self._blocks[parent + weight] = suffix, source.read(())
            return
        second = source.read(())
        blocks, scales = (first[1], second) if suffix == "scales" else (second, first[1])
        check_mxfp4(parent + weight, blocks, scales)
        for expert, parts in enumerate(zip(blocks, scales, strict=True)):
            for name, rows in _rows_of(weight):
                part = mxfp4_source(*(each[rows] for each in parts))
                yield f"{parent}{expert}.{name}.weight", part

    def check_tensors(self) -> None:
        """Check that each MXFP4 weight of the checkpoint has both its blocks and its scales."""
        for weight, (suffix, _) in self._blocks.items():
            missing = "blocks" if suffix == "scales" else "scales"
            raise WeightLoadError(
                f"tensor {weight}_{missing} is missing from the checkpoint, which has "
                f"{weight}_{suffix}"
            )


def _by_expert(
    parent: str, weight: str, source: CheckpointTensor, is_bias: bool, experts: range
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the dense matrices, or biases, of each expert."""
    for expert in experts:
        stored = source.read((slice(expert, expert + 1),))[0]
        kind = "bias" if is_bias else "weight"
        yield from _parts_of(parent, weight, expert, stored if is_bias else stored.T, kind)


def _parts_of(
    parent: str, weight: str, expert: int, rows: Tensor, kind: str
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the parts of an expert's tensor: gate and up [I, ...] of [2 * I, ...], or down
    unchanged.
    """
    for name, which in _rows_of(weight):
        part = rows[which]
        yield (
            f"{parent}{expert}.{name}.{kind}",
            CheckpointTensor(part.shape, part.__getitem__, dtype=part.dtype),
        )


def _rows_of(weight: str) -> tuple[tuple[str, slice], ...]:
    """Return the parts of an expert's tensor in the checkpoint, and the rows of each part."""
    if weight == "gate_up_proj":
        return ("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))
    return (("down_proj", slice(None)),)
