"""The program that a card runs, on tensors of the host, so that any torch can capture it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gaudi_sim.bridge import SimulatedKernels
from gaudi_sim.kernels.kernels import register
from tests.reach import replace_ops
from tests.tiny_models import FAMILY_CONFIGS
from tests.tiny_pooling_models import MODELS, QWEN, REWARD_MODELS
from vllm.attention.backends.sdpa import bridge_sdpa
from vllm.attention.cached_layer import layers_with_cache
from vllm.bucketing.bucket import decode, prefill
from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    PoolerConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import TPGroup
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM, PoolingModel
from vllm.model_executor.models.registry import is_encoder
from vllm.ops.hpu.operators import HPUOps
from vllm.platforms.hpu import HPUPlatform
from vllm.transformers_utils.configs.old_spellings import with_usual_spellings
from vllm.worker.hpu.launches.device_tokens import DeviceTokens
from vllm.worker.hpu.launches.input import fields_of, padded_sizes
from vllm.worker.hpu.launches.model import HPUModel, LaunchModel
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.pooling_model import TYPED, WholePromptModel
from vllm.worker.kv_cache import bind_kv_caches, cache_dtype, cache_layout

BLOCK_SIZE = 16
NUM_BLOCKS = 9
MAX_NUM_SEQS = 8
MAX_DRAFTS = 2

SHAPES = {
    "decode": PaddedShape(decode(4, 8)),
    "contiguous decode": PaddedShape(decode(4, 4), is_contiguous=True),
    "decode of drafts": PaddedShape(decode(4, 8, query_len=1 + MAX_DRAFTS)),
    "prefill": PaddedShape(prefill(1, 32)),
    "prefill with context": PaddedShape(prefill(2, 16, 2)),
    "merged prefill": PaddedShape(prefill(1, 32, 2), merged_prompts=4),
}

GENERATORS: dict[str, str] = {}
"""Architecture -> a family of tiny models that has it."""
for _family, (_create, _) in FAMILY_CONFIGS.items():
    GENERATORS.setdefault(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_create.model_type], _family)

_NUM_LAYERS = dict.fromkeys(
    (
        *("bamba", "deepseek_v2", "deepseek_v3", "gemma2", "gpt_oss", "olmo3"),
        *("qwen2", "qwen3_moe", "jamba", "cwm", "vaultgemma", "kimi_linear"),
        *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    ),
    2,
)
_NUM_LAYERS |= dict.fromkeys(("llama4", "granite_hybrid", "smollm3", "exaone4", "zamba2"), 4)
_NUM_LAYERS |= dict.fromkeys(("gemma3n", "gemma4"), 4) | dict.fromkeys(
    ("lfm2", "lfm2_moe", "mimo_v2"), 3
)
"""Number of layers of families whose layers differ: enough to have all kinds of layers."""


def _values_of(architecture: str) -> tuple[Any, dict[str, Any]]:
    """Return a config class of transformers, and the values for a model with as few layers as
    possible.
    """
    if architecture in GENERATORS:
        family = GENERATORS[architecture]
        create, values = FAMILY_CONFIGS[family]
        name = "num_layers" if "num_layers" in values else "num_hidden_layers"
        return create, values | {name: _NUM_LAYERS.get(family, 1)}
    if architecture in REWARD_MODELS:
        create = MODELS["Qwen2ForSequenceClassification"][0]
        return create, QWEN | {"num_hidden_layers": 1, "num_labels": REWARD_MODELS[architecture]}
    create, values = MODELS[architecture]
    return create, values | {"num_hidden_layers": 1}


def config_of(architecture: str, dtype: str) -> VllmConfig:
    """Return the engine config for a tiny model of an architecture with dummy weights."""
    create, values = _values_of(architecture)
    pooler = None
    if architecture not in GENERATORS:
        is_causal = not is_encoder(architecture)
        pooler = PoolerConfig(
            task="embed", pooling_type="LAST" if is_causal else "MEAN", is_causal=is_causal
        )
    config = create(**values).to_dict() | {"architectures": [architecture]}
    arch = ModelArch.from_hf(with_usual_spellings(config))
    return VllmConfig(
        model=ModelConfig(model="tiny", path="tiny", arch=arch, dtype=dtype, pooler=pooler),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_model_len=128, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=128
        ),
        load=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
    )


@contextmanager
def operators_of_a_card() -> Iterator[None]:
    """Let layers call the operators of a card in this context, with simulated fused kernels."""
    register()
    bridge = SimpleNamespace(
        kernels=SimulatedKernels(), is_recording=True, fp8_max=240.0, mark_step=lambda: None
    )
    with MonkeyPatch.context() as patch:
        replace_ops(patch, HPUOps(bridge))
        yield


def launch_model(config: VllmConfig) -> LaunchModel:
    """Return the model as the runner of a card wraps it, with a KV cache of zeros."""
    model = load_model(config, TPGroup(), torch.device("cpu"))
    kernel = bridge_sdpa(SimulatedKernels())
    layers, dtype = layers_with_cache(model), cache_dtype(config)
    if layers:
        platform = HPUPlatform(lambda: SimpleNamespace(zeros=_zeros))
        layout = cache_layout(config, layers, dtype, keeps_all=True)
        bind_kv_caches(layers, platform, NUM_BLOCKS, layout, dtype, MAX_NUM_SEQS + 1)
    if isinstance(model, PoolingModel):
        pooler = config.model.pooler
        assert pooler is not None
        if pooler.needs_whole_prompts:
            return WholePromptModel(model, pooler, BLOCK_SIZE, kernel)
        return HPUModel(model, BLOCK_SIZE, kernel)
    assert isinstance(model, CausalLM)
    return HPUModel(model, BLOCK_SIZE, kernel, None, resident_tokens())


def resident_tokens() -> DeviceTokens:
    """Return the tokens that a card keeps of requests whose drafts it makes."""
    return DeviceTokens(MAX_NUM_SEQS, torch.device("cpu"), MAX_DRAFTS)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def padding_input(model: LaunchModel, shape: PaddedShape) -> Tensor:
    """Return packed input of zeros for a forward pass of this shape."""
    sizes = padded_sizes(shape)
    has_types = isinstance(model, WholePromptModel) and model.model.num_token_types > 1
    fields = TYPED if has_types else fields_of(shape)
    return torch.zeros(sum(fields.part_sizes(sizes)), dtype=torch.int32)
