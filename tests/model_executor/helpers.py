"""Configs, models and prompts that the tests of this folder share."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference_model import load_reference
from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import TPGroup
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.stored.stored_linear import RoundedLinear
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization.formats.cpu_packed import CPUInt4, CPUInt8, CPUPacked
from vllm.ops.stored_weight import round_to_fp8
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config


def read_arch(folder: Path) -> ModelArch:
    raw = read_hf_config(folder, {})
    return ModelArch.from_hf(complete_hf_config(raw, folder, trust_remote_code=False))


def make_config(folder: Path, dtype: Any = "float32", **load: Any) -> VllmConfig:
    load.setdefault("use_tqdm_on_load", False)
    arch = read_arch(folder).for_length(256)
    return VllmConfig(
        model=ModelConfig(model=str(folder), arch=arch, path=str(folder), dtype=dtype),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256),
        load=LoadConfig(**load),
    )


def load(folder: Path, tp: TPGroup | None = None, dtype: Any = "float32", **kw: Any) -> CausalLM:
    return load_model(make_config(folder, dtype, **kw), tp or TPGroup(), torch.device("cpu"))


def prompt_of(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 4096, (length,), generator=generator)


@torch.inference_mode()
def logits_of(model: CausalLM, input_ids: Tensor) -> Tensor:
    """Return the logits of one prompt, [T, vocab], without a KV cache."""
    return model.compute_logits(model(input_ids, torch.arange(len(input_ids))))


@cache
def reference_of(folder: Path) -> Any:
    return load_reference(folder)


@torch.inference_mode()
def reference_logits(folder: Path, input_ids: Tensor) -> Tensor:
    """Return the logits of transformers in float32, [T, vocab]."""
    logits: Tensor = reference_of(folder)(input_ids[None]).logits[0]
    return logits


class StaticFp8(CPUPacked):
    """Stores weights and inputs in FP8, like `--quantization inc`."""

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if layer.keeps_precision:
            return super().linear_method(name, layer)
        return RoundedLinear(
            name, lambda w: replace(round_to_fp8(w), input_scale=0.02, rounds_inputs=True)
        )


PACKED_FORMATS = {"dense": CPUPacked, "int8": CPUInt8, "int4": CPUInt4, "static fp8": StaticFp8}


@torch.no_grad()
def pack_weights(model: nn.Module, stored_as: str = "dense") -> int:
    """Pack the dense weights of a model, as the CPU does while it loads a model.

    Returns:
        The size of the packed weights in bytes.
    """
    quantization, packed = PACKED_FORMATS[stored_as](), {}
    layers = [layer for layer in model.modules() if isinstance(layer, MethodLayer)]
    for layer in layers:
        if method := quantization.method_of("", layer):
            is_tied = getattr(layer, "is_tied", False)
            same = [x for x in layers if is_tied and getattr(x, "weight", None) is layer.weight]
            for each in (layer, *same):
                each.method = method
    for layer in layers:
        layer.finish()
        weight = getattr(layer.method, "packed", None)
        packed[id(layer.method)] = getattr(weight, "num_bytes", 0)
    return sum(packed.values())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the dequantized weights of linear layers and experts, by module name.

    The model must be loaded with `NativeOps`, which keep all weights.
    """
    found: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, LatentUpProjection):
            found[path] = torch.cat((layer.key_up.dense(), layer.value_up.dense().mT), dim=1)
        elif isinstance(layer, ParallelLinear):
            packed: Any = getattr(layer.method, "packed", None)
            found[path] = layer.weight if packed is None else packed.weight
        elif isinstance(layer, Experts):
            found[path] = torch.cat((layer.gate_up, layer.down.mT), dim=1)
    return found
