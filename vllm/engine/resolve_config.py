"""From arguments to the complete config of an engine: model files, platform and limits.

Every value a user leaves open is settled here, once, before any process starts.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from vllm import envs
from vllm.assets import BUNDLED_MODEL
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PoolerConfig,
    SchedulerConfig,
    StructuredOutputConfig,
    VllmConfig,
)
from vllm.config.fields import config_fields
from vllm.config.model import ModelDType
from vllm.engine.resolve_hpu import resolve_hpu_config
from vllm.engine.resolve_pooling import resolve_pooler
from vllm.engine.resolve_quantization import check_quantization
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import Platform, resolve_platform
from vllm.platforms.cpu_threads import parse_cores, usable_cores
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config
from vllm.transformers_utils.hub import resolve_model_folder

logger = init_logger(__name__)

_Config = TypeVar("_Config")

_RUNNABLE_DTYPES = ("float16", "bfloat16", "float32")


def resolve_config(settings: Mapping[str, Any]) -> VllmConfig:
    """The config of an engine.

    Args:
        settings: a value for every field of the config classes that is a user's to give; None
            where the platform or the model decides.

    Raises:
        ConfigError: the engine cannot start with these settings.
    """
    platform = resolve_platform(settings["device"])
    load = _section(LoadConfig, settings)
    model = _resolve_model(_section(ModelConfig, settings), load)
    check_quantization(model, platform)
    _check_prompt_embeds(model, platform)
    if model.pooler is not None:
        settings = _for_pooling(settings, model.pooler)
    parallel = _section(ParallelConfig, settings)
    cache = _section(
        CacheConfig,
        settings,
        block_size=_given(settings["block_size"], platform.default_block_size),
        kv_cache_space_bytes=_kv_cache_space_bytes(),
    )
    observability = _section(
        ObservabilityConfig, settings, profiler_enabled=envs.get().VLLM_PROFILER_ENABLED
    )
    if observability.kv_events.enable_kv_cache_events and not cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config: enable_kv_cache_events tells of the prefix cache, which is off for "
            "this model or by --no-enable-prefix-caching; leave one of them out"
        )
    hpu = resolve_hpu_config(enable_prefix_caching=cache.enable_prefix_caching)
    return VllmConfig(
        model=model,
        cache=cache,
        scheduler=_resolve_scheduler(settings, platform, model),
        parallel=parallel,
        device=_resolve_device(platform),
        load=load,
        hpu=hpu,
        structured_output=_section(StructuredOutputConfig, settings),
        observability=observability,
    )


def _check_prompt_embeds(model: ModelConfig, platform: Platform) -> None:
    if not model.enable_prompt_embeds:
        return
    if not platform.can_replace_embeddings:
        raise ConfigError(
            f"--enable-prompt-embeds is not available on the device {platform.name!r}: it has no "
            "launches that take embeddings. Leave the flag out, or use --device cpu"
        )
    if model.pooler is not None:
        raise ConfigError(
            f"--enable-prompt-embeds needs a model that generates; '{model.model}' runs with "
            "pooling. Leave the flag out"
        )


def _section(config_class: type[_Config], settings: Mapping[str, Any], **resolved: Any) -> _Config:
    given = {f.name: settings[f.name] for f in config_fields(cast(type, config_class))}
    return config_class(**{**given, **resolved})


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _kv_cache_space_bytes() -> int | None:
    space_gib = envs.get().VLLM_CPU_KVCACHE_SPACE
    return int(space_gib * 2**30) if space_gib else None


def _resolve_device(platform: Platform) -> DeviceConfig:
    settings = envs.get()
    cores = None
    if platform.name == "cpu":
        cores = parse_cores(settings.VLLM_CPU_OMP_THREADS_BIND, usable_cores())
    return DeviceConfig(
        device=cast(Any, platform.name),
        bound_cores=cores,
        counts_threads=settings.OMP_NUM_THREADS is None
        and settings.VLLM_CPU_OMP_THREADS_BIND.strip().lower() not in ("all", "nobind"),
    )


def _resolve_model(asked: ModelConfig, load: LoadConfig) -> ModelConfig:
    name = asked.model or str(BUNDLED_MODEL)
    folder = resolve_model_folder(
        name, asked.revision, load.download_dir, load.ignore_patterns, load.load_format
    )
    raw = read_hf_config(folder, asked.hf_overrides)
    _check_architecture(raw, folder)
    arch = ModelArch.from_hf(
        complete_hf_config(raw, folder, trust_remote_code=asked.trust_remote_code)
    )
    arch = _allow_long_positions(asked.max_model_len, arch)
    pooler, recommended_len = resolve_pooler(asked, arch, folder)
    max_model_len = _resolve_max_model_len(asked, arch)
    if recommended_len is not None and asked.max_model_len is None:
        max_model_len = min(max_model_len, recommended_len)
    return replace(
        asked,
        model=name,
        served_model_name=asked.served_model_name or (asked.model or folder.name,),
        tokenizer=_resolve_tokenizer(asked, load, folder),
        dtype=_resolve_dtype(asked, arch),
        max_model_len=max_model_len,
        arch=arch,
        pooler=pooler,
        path=str(folder),
    )


def _check_architecture(raw: Mapping[str, Any], folder: Path) -> None:
    """Refuse what no model class runs, before transformers is even imported."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(f"config.json of '{folder}' names no architecture (key 'architectures')")
    if names[0] not in ModelRegistry.supported():
        ModelRegistry.resolve(names[0])  # raises, and lists what is supported


def _resolve_tokenizer(asked: ModelConfig, load: LoadConfig, folder: Path) -> str | None:
    """A local folder, or None when there is to be no tokenizer."""
    if asked.skip_tokenizer_init:
        return None
    if asked.tokenizer is None and asked.tokenizer_revision in (None, asked.revision):
        return str(folder)
    name = asked.tokenizer or asked.model or str(BUNDLED_MODEL)
    # "dummy": everything but weights.
    return str(resolve_model_folder(name, asked.tokenizer_revision, load.download_dir, (), "dummy"))


def _resolve_dtype(asked: ModelConfig, arch: ModelArch) -> ModelDType:
    name = replace(asked, arch=arch).dtype_name
    if name not in _RUNNABLE_DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype {name} cannot run as it is; choose dtype from "
            f"{', '.join(_RUNNABLE_DTYPES)}"
        )
    if name == "float16" and arch.dtype == "bfloat16":
        logger.warning("running bfloat16 weights as float16: values above 65504 overflow")
    elif name != arch.dtype:
        logger.info("running %s weights as %s", arch.dtype, name)
    return cast(ModelDType, name)


def _allow_long_positions(max_model_len: int | None, arch: ModelArch) -> ModelArch:
    """The model with positions up to `max_model_len`, where VLLM_ALLOW_LONG_MAX_MODEL_LEN is set.

    As it is where that cannot be: a learned position embedding has no more rows, and yarn has its
    length from its factor.
    """
    derived = arch.derived_max_model_len
    if max_model_len is None or max_model_len <= derived:
        return arch
    if not envs.get().VLLM_ALLOW_LONG_MAX_MODEL_LEN or arch.rope is None:
        return arch
    # The scaling factor may be a fraction: one position more than it rounds to.
    positions = math.ceil(max_model_len * arch.max_position_embeddings / derived) + 1
    longer = replace(arch, max_position_embeddings=positions)
    if longer.derived_max_model_len < max_model_len:
        return arch
    logger.warning(
        "max_model_len (%d) is more than the %d tokens the model's config.json allows, as "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1: what it writes beyond them may be of poor quality",
        max_model_len,
        derived,
    )
    return longer


def _resolve_max_model_len(asked: ModelConfig, arch: ModelArch) -> int:
    derived = arch.derived_max_model_len
    if asked.max_model_len is None:
        return derived
    if asked.max_model_len > derived and envs.get().VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        cause = "has learned positions" if arch.rope is None else "scales positions by a factor"
        raise ConfigError(
            f"max_model_len ({asked.max_model_len}) is more than the {derived} tokens the model "
            f"has positions for, and it {cause}: VLLM_ALLOW_LONG_MAX_MODEL_LEN adds none"
        )
    if asked.max_model_len > derived:
        raise ConfigError(
            f"max_model_len ({asked.max_model_len}) is more than the {derived} tokens the "
            f"model's config.json allows; a model that does run longer is told so by hf_overrides="
            f"'{{\"max_position_embeddings\": {asked.max_model_len}}}'"
        )
    return asked.max_model_len


def _for_pooling(settings: Mapping[str, Any], pooler: PoolerConfig) -> Mapping[str, Any]:
    """The settings as pooling needs them: where all of a prompt counts, it runs in one step."""
    if not pooler.needs_whole_prompts:
        return settings
    logger.info("prompts run whole, without prefix cache, as all of their tokens are pooled")
    return {**settings, "enable_chunked_prefill": False, "enable_prefix_caching": False}


def _resolve_scheduler(
    settings: Mapping[str, Any], platform: Platform, model: ModelConfig
) -> SchedulerConfig:
    assert model.max_model_len is not None
    max_num_seqs = settings["max_num_seqs"]
    max_num_batched_tokens = settings["max_num_batched_tokens"]
    if max_num_seqs is None:
        max_num_seqs = platform.default_max_num_seqs
        if max_num_batched_tokens is not None:
            max_num_seqs = max(1, min(max_num_seqs, max_num_batched_tokens))
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(platform.default_max_num_batched_tokens, max_num_seqs)
        if not settings["enable_chunked_prefill"]:
            max_num_batched_tokens = max(max_num_batched_tokens, model.max_model_len)
    return _section(
        SchedulerConfig,
        settings,
        max_model_len=model.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
