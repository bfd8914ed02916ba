"""Write LoRA adapters with random weights, as peft does, and merge them into a model."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.reference_model import load_reference
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.transformers_utils.transformers_version import is_version_4

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


_numbers = count()


def run_on_engine(
    llm: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    adapters: Sequence[LoRARequest | None],
) -> list[RequestOutput]:
    """Return the outputs of an engine. The caller gets the error of each request, whereas
    `LLM.generate` raises errors about adapters.
    """
    engine = llm.llm_engine
    names = [f"alone {next(_numbers)}" for _ in prompts]
    for name, prompt, adapter in zip(names, prompts, adapters, strict=True):
        engine.add_request(name, prompt, params, lora_request=adapter)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return [finished[name] for name in names]


def base_model(model: str | Path) -> PreTrainedModel:
    return load_reference(Path(model))


@cache
def _modules(model: str) -> dict[str, nn.Module]:
    """Return the modules that adapters can change, by name."""
    kinds = (nn.Linear, Conv1D, nn.Embedding)
    found = base_model(model).named_modules()
    return {name: module for name, module in found if isinstance(module, kinds)}


def write_adapter(
    folder: Path,
    model: str | Path,
    seed: int,
    rank: int,
    modules: tuple[str, ...],
    size: float = 0.05,
    **config,
) -> Path:
    """Write an adapter for the modules of a model whose names end with one of `modules`.

    Args:
        size: standard deviation of its weights.
        config: further values of adapter_config.json.
    """
    folder.mkdir(exist_ok=True)
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in _modules(str(model)).items():
        if not name.endswith(modules):
            continue
        own = next((r for key, r in config.get("rank_pattern", {}).items() if key in name), rank)
        outputs, inputs = module.weight.shape
        if isinstance(module, Conv1D):
            outputs, inputs = inputs, outputs
            config["fan_in_fan_out"] = True
        a, b = "lora_A.weight", "lora_B.weight"
        if isinstance(module, nn.Embedding):
            a, b, outputs, inputs = "lora_embedding_A", "lora_embedding_B", inputs, outputs
        for part, shape in ((a, (own, inputs)), (b, (outputs, own))):
            values = torch.randn(shape, generator=rng) * size
            tensors[f"base_model.model.{name}.{part}"] = values
    assert tensors, f"{modules} are no modules of {model}"
    return _write(folder, tensors, rank, config)


def write_expert_adapter(
    folder: Path, model: str | Path, seed: int, rank: int, size: float = 0.05
) -> Path:
    """Write an adapter of every matrix of every expert of a model, each by itself."""
    folder.mkdir(exist_ok=True)
    rng, tensors, modules = torch.Generator().manual_seed(seed), {}, set()
    for name, weight in load_file(Path(model) / "model.safetensors").items():
        if ".experts." not in name:
            continue
        module = name.removesuffix(".weight")
        modules.add(module.rpartition(".")[2])
        outputs, inputs = weight.shape
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=rng) * size
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    return _write(folder, tensors, rank, {"target_modules": sorted(modules)})


def write_stacked_expert_adapter(
    folder: Path, model: str | Path, seed: int, rank: int, size: float = 0.05
) -> Path:
    """Write an adapter of the two parameters of all experts of each layer, as peft names them."""
    folder.mkdir(exist_ok=True)
    rng, tensors = torch.Generator().manual_seed(seed), {}
    base = base_model(model)
    for name, _ in base.named_modules():
        if not name.endswith(".experts"):
            continue
        module = _all_experts(base, name)
        for inner, weight in ((".base_layer", module.gate_up_proj), ("", module.down_proj)):
            count, outputs, inputs = weight.shape
            if getattr(module, "is_transposed", False):
                outputs, inputs = inputs, outputs
            for part, shape in (("A", (rank * count, inputs)), ("B", (outputs, rank * count))):
                values = torch.randn(shape, generator=rng) * size
                tensors[f"base_model.model.{name}{inner}.lora_{part}.weight"] = values
    names = ["experts.gate_up_proj", "experts.down_proj"]
    return _write(folder, tensors, rank, {"target_parameters": names})


def _write(folder: Path, tensors: dict, rank: int, config: dict) -> Path:
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_model(model: str | Path, folder: Path) -> PreTrainedModel:
    """Return the model with the weights of an adapter added to its own."""
    return merge(base_model(model), folder)


@torch.no_grad()
def merge(merged: PreTrainedModel, folder: Path, sign: int = 1) -> PreTrainedModel:
    """Add an adapter to the weights of a model; -1 subtracts it. Return the model."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        module, is_a, _ = name.removeprefix("base_model.model.").rpartition(".lora_A.")
        if not is_a:
            module, is_a, _ = name.removeprefix("base_model.model.").rpartition(".lora_embedding_A")
        if not is_a:
            continue
        rank = len(a)
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        other = name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")
        delta = scale * tensors[other] @ a
        if ".experts." in module:
            _expert_weight(merged, module).add_(sign * delta)
            continue
        target = merged.get_submodule(module)
        delta = delta.T if isinstance(target, (Conv1D, nn.Embedding)) else delta
        target.weight += sign * delta
    return merged


def _all_experts(model: PreTrainedModel, path: str) -> Any:
    """Return the module with the weights of all experts of a layer."""
    if is_version_4():
        pytest.skip("this transformers has a module for each expert")
    return model.get_submodule(path)


def _expert_weight(model: PreTrainedModel, module: str) -> torch.Tensor:
    """Return a matrix of an expert, as a view of the parameter that contains all experts."""
    module = module.replace("block_sparse_moe", "mlp").replace("backbone.", "model.")
    path, number, matrix = module.rsplit(".", 2)
    experts = _all_experts(model, path)
    if matrix in ("w2", "down_proj"):
        return experts.down_proj[int(number)]
    if hasattr(experts, "up_proj"):  # experts without gates
        return experts.up_proj[int(number)]
    return experts.gate_up_proj[int(number)].chunk(2)[matrix in ("w3", "up_proj")]


@torch.inference_mode()
def greedy(model: PreTrainedModel, token_ids: list[int], count: int) -> tuple[list, list]:
    """Return greedy tokens and their log-probabilities."""
    ids, logprobs = list(token_ids), []
    for _ in range(count):
        row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(token_ids) :], logprobs
