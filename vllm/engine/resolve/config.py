"""Resolve arguments to the complete config of an engine, with model files, platform and limits.

Every value that the user did not set is decided here, once, before any process starts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast

from vllm import envs
from vllm.assets import BUNDLED_MODEL
from vllm.bucketing.catalog.bucket_plan import choose_for_config
from vllm.config import (
    CacheConfig,
    ConnectorConfig,
    DeviceConfig,
    HPUConfig,
    LoadConfig,
    LoRAConfig,
    ModelArch,
    ModelConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputConfig,
    VllmConfig,
)
from vllm.config.arch.model_arch import WHOLE_CONFIG, named_dtype
from vllm.config.arch.sizes import NUM_POSITIONS
from vllm.config.families import TEXT_TYPES, family_of
from vllm.config.fields import config_fields
from vllm.config.load import LoadFormat
from vllm.config.model import ModelDType, ModelImpl
from vllm.config.quantization.quant_method import quant_method
from vllm.engine.resolve.hpu import (
    check_launcher,
    check_simulation,
    fit_token_budget,
    refuse_variables,
    resolve_hpu_config,
    warn_of_idle_variables,
)
from vllm.engine.resolve.media import check_images_fit, resolve_media
from vllm.engine.resolve.model_options import (
    check_connector,
    for_states,
    resolve_offload,
    resolve_quantization,
    resolve_windows,
    with_bitsandbytes,
    without_bitsandbytes,
    without_gguf,
)
from vllm.engine.resolve.parallel import resolve_parallel
from vllm.engine.resolve.pooling import for_pooling, resolve_pooler
from vllm.engine.resolve.replicas import resolve_device
from vllm.engine.resolve.speculative import (
    asked_draft_model,
    check_draft_model,
    max_draft_tokens,
    resolve_decodes,
    resolve_lookup,
)
from vllm.engine.resolve.speculators import check_speculator, find_method, resolve_speculator
from vllm.engine.resolve.unsupported import check_described, no_architecture, unsupported
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.models.registry import BY_TRANSFORMERS, TEXT_BY_TRANSFORMERS, ModelRegistry
from vllm.platforms import Platform, resolve_platform
from vllm.platforms.hpu import HPUPlatform
from vllm.transformers_utils.hf_config import (
    complete_hf_config,
    is_known_to_transformers,
    read_hf_config,
)
from vllm.transformers_utils.hub import resolve_model_folder
from vllm.transformers_utils.weight_headers import dtype_of_files, has_own_head
from vllm.utils.plugins import load_general_plugins

logger = init_logger(__name__)

_Config = TypeVar("_Config")

_RUNNABLE_DTYPES = ("float16", "bfloat16", "float32")


def resolve_config(settings: Mapping[str, Any], platform: Platform | None = None) -> VllmConfig:
    """Return the config of an engine.

    Args:
        settings: value of every config field that users can set; None: the platform or the model
            decides.
        platform: platform of the device; None: the one that the setting `device` names.

    Raises:
        ConfigError: the engine cannot start with these settings.
    """
    load_general_plugins()
    platform = platform or resolve_platform(settings["device"])
    check_settings(settings, platform)
    values: dict[str, Any] = {"given": settings, "platform": platform}
    for name, resolver in RESOLVERS.items():
        values[name] = resolver(**{read: values[read] for read in signature(resolver).parameters})
    config = VllmConfig(**{field.name: values[field.name] for field in fields(VllmConfig)})
    if isinstance(platform, HPUPlatform):
        check_simulation(config.hpu, platform)
        warn_of_idle_variables(config.hpu, is_eager=config.model.enforce_eager)
        check_launcher(config)
        config = fit_token_budget(config, is_given=settings["max_num_batched_tokens"] is not None)
    check_speculator(config)
    if values["platform"].name == "hpu":
        config = choose_for_config(config)
    config = _with_weights(config, values["asked_load"])
    check_images_fit(config)
    return config


def _asked_load(given: Mapping[str, Any]) -> LoadConfig:
    """Return the user's load settings, with the token for downloads."""
    return without_bitsandbytes(_section(LoadConfig, given))


def _model(given: Mapping[str, Any], asked_load: LoadConfig, platform: Platform) -> ModelConfig:
    section = with_bitsandbytes(_section(ModelConfig, given), given["load_format"])
    counts = _section(MultiModalConfig, given).counts
    asked = _resolve_model(section, asked_load, counts)
    model = resolve_quantization(asked, platform)
    _check_prompt_embeds(model)
    return model


def _load(asked_load: LoadConfig, model: ModelConfig, platform: Platform) -> LoadConfig:
    # All files are downloaded in this process, so no other process needs the token.
    return replace(resolve_offload(asked_load, model, platform), hf_token=None)


def _settings(
    given: Mapping[str, Any], model: ModelConfig, platform: Platform
) -> Mapping[str, Any]:
    """Return the user's settings, changed as required by pooling or recurrent models."""
    pooled = given if model.pooler is None else for_pooling(given, model.pooler)
    return for_states(pooled, platform) if model.resolved_arch.has_states else pooled


def _lora(settings: Mapping[str, Any], model: ModelConfig) -> LoRAConfig:
    lora = _section(LoRAConfig, settings)
    if lora.enable_lora and model.pooler is not None:
        raise ConfigError(
            f"enable_lora=True needs a model that generates text, but '{model.model}' is a pooling "
            "model. Leave enable_lora out"
        )
    return lora


def _limits(settings: Mapping[str, Any], platform: Platform, model: ModelConfig) -> SchedulerConfig:
    """Return the limits of a step, before drafts and adapters are taken into account."""
    assert model.max_model_len is not None
    return _resolve_scheduler(settings, platform, model.max_model_len)


def _speculative(
    settings: Mapping[str, Any],
    platform: Platform,
    asked_load: LoadConfig,
    model: ModelConfig,
    limits: SchedulerConfig,
) -> SpeculativeConfig:
    asked = find_method(_section(SpeculativeConfig, settings), platform, asked_load)
    speculative = resolve_speculator(asked, model, platform, asked_load)
    asked_draft = asked_draft_model(speculative, model, platform)
    if asked_draft is not None:
        draft = _resolve_model(asked_draft, asked_load, max_items=None)
        draft = check_draft_model(draft, model, platform)
        speculative = replace(speculative, draft_model=draft)
    return resolve_lookup(speculative, limits, platform)


def _scheduler(
    settings: Mapping[str, Any],
    limits: SchedulerConfig,
    speculative: SpeculativeConfig,
    model: ModelConfig,
    platform: Platform,
    lora: LoRAConfig,
) -> SchedulerConfig:
    num_stages = settings["pipeline_parallel_size"]
    scheduler = replace(
        limits,
        max_draft_tokens=max_draft_tokens(speculative, model, platform),
        max_loras=lora.num_slots,
    )
    return resolve_decodes(scheduler, num_stages)


def _observability(settings: Mapping[str, Any], cache: CacheConfig) -> ObservabilityConfig:
    observability = _section(
        ObservabilityConfig,
        settings,
        profiler_enabled=envs.get().VLLM_PROFILER_ENABLED,
        torch_profiler_dir=_profiler_folder(),
        profiled_steps=_profiled_steps(),
    )
    if observability.kv_events.enable_kv_cache_events and not cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config: enable_kv_cache_events needs the prefix cache, which is off "
            "(enable_prefix_caching=False, or a pooling model). Leave kv_events_config out, or "
            "turn the prefix cache on"
        )
    return observability


def _connector(settings: Mapping[str, Any], cache: CacheConfig) -> ConnectorConfig:
    return check_connector(_section(ConnectorConfig, settings), cache)


def _hpu(
    settings: Mapping[str, Any],
    connector: ConnectorConfig,
    speculative: SpeculativeConfig,
    cache: CacheConfig,
) -> HPUConfig:
    # A KV connector and a draft model store block ids, so blocks must not move.
    may_move = connector.kv_transfer is None and speculative.draft_model is None
    has_slices = may_move or not cache.enable_prefix_caching
    return resolve_hpu_config(_section(HPUConfig, settings), has_slices=has_slices)


def _device(settings: Mapping[str, Any], platform: Platform) -> DeviceConfig:
    return resolve_device(platform, _section(ParallelConfig, settings))


def _parallel(
    settings: Mapping[str, Any], model: ModelConfig, device: DeviceConfig
) -> ParallelConfig:
    return resolve_parallel(_section(ParallelConfig, settings), model, device)


def _structured_output(settings: Mapping[str, Any]) -> StructuredOutputConfig:
    return _section(StructuredOutputConfig, settings)


def _multimodal(settings: Mapping[str, Any], model: ModelConfig) -> MultiModalConfig:
    multimodal = _section(MultiModalConfig, settings)
    if model.resolved_arch.media_config is None:
        for name in multimodal.given:
            if name == "limit_mm_per_prompt" and 0 in multimodal.counts.values():
                continue
            logger.warning("%s has no effect: '%s' reads text only", name, model.model)
    return multimodal


def _with_weights(config: VllmConfig, load: LoadConfig) -> VllmConfig:
    """Return the config with the folders that contain the weights, which may be downloaded.

    Call this last, so that no weights are downloaded if settings are wrong.
    """
    speculative, model = config.speculative, config.model
    if (draft_model := speculative.draft_model) is not None:
        path = str(_model_folder(draft_model, load, load.load_format))
        speculative = replace(speculative, draft_model=replace(draft_model, path=path))
    path = str(_model_folder(model, load, load.load_format))
    return replace(config, model=replace(model, path=path), speculative=speculative)


def check_settings(settings: Mapping[str, Any], platform: Platform | None = None) -> None:
    """Check everything that does not depend on the model. Reads no files, and does not contact the
    hub.

    Args:
        settings, platform: as for `resolve_config`.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """
    platform = platform or resolve_platform(settings["device"])
    of_no_model = (
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        StructuredOutputConfig,
        SpeculativeConfig,
        LoRAConfig,
        MultiModalConfig,
        ConnectorConfig,
        ObservabilityConfig,
    )
    for section in of_no_model:
        _section(cast(type, section), settings)
    backend = settings["distributed_executor_backend"]
    if backend != "ray":
        # Launchers such as torchrun may start ranks on several machines.
        is_local = backend != "external_launcher"
        parallel = _section(ParallelConfig, settings)
        platform.check_present(parallel.world_size if is_local else 1)
    _cache(settings, platform)
    refuse_variables()
    if settings["max_model_len"] is not None:
        _resolve_scheduler(settings, platform, settings["max_model_len"])


def _check_prompt_embeds(model: ModelConfig) -> None:
    if model.enable_prompt_embeds and model.pooler is not None:
        raise ConfigError(
            f"enable_prompt_embeds=True needs a model that generates text, but '{model.model}' is "
            "a pooling model. Leave enable_prompt_embeds out"
        )


def _section(config_class: type[_Config], settings: Mapping[str, Any], **resolved: Any) -> _Config:
    given = {f.name: settings[f.name] for f in config_fields(cast(type, config_class))}
    return config_class(**{**given, **resolved})


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _cache(settings: Mapping[str, Any], platform: Platform) -> CacheConfig:
    cache = _section(
        CacheConfig,
        settings,
        block_size=_given(settings["block_size"], platform.default_block_size),
    )
    if cache.kv_cache_memory_bytes is None and not platform.has_own_memory:
        space_gib = envs.get().VLLM_CPU_KVCACHE_SPACE
        num_bytes = int(space_gib * 2**30) if space_gib else None
        cache = replace(cache, kv_cache_memory_bytes=num_bytes)
    if cache.kv_cache_dtype not in platform.kv_cache_dtypes:
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r} is not available on the device "
            f"{platform.name!r}; available: {', '.join(platform.kv_cache_dtypes)}"
        )
    return cache


def _profiler_folder() -> str | None:
    settings = envs.get()
    folder = settings.VLLM_TORCH_PROFILER_DIR
    if settings.VLLM_PROFILE_STEPS is not None:
        folder = folder or "."
    return str(Path(folder).expanduser().absolute()) if folder else None


def _profiled_steps() -> tuple[int, int] | None:
    text = envs.get().VLLM_PROFILE_STEPS
    if text is None:
        return None
    steps = [step.strip() for step in text.split(",")]
    if len(steps) == 2 and all(step.isdecimal() for step in steps):
        first, last = map(int, steps)
        if 1 <= first <= last:
            return first, last
    raise ConfigError(
        f"VLLM_PROFILE_STEPS={text!r} must be the first and the last step of a trace, counted "
        f"from 1, such as 3,5"
    )


def _resolve_model(
    asked: ModelConfig, load: LoadConfig, max_items: Mapping[str, int] | None
) -> ModelConfig:
    # Without the weights, whose download may take an hour.
    folder = _model_folder(asked, load, "dummy")
    asked = without_gguf(asked, folder)
    other = asked.hf_config_path
    config_folder = folder if other is None else _metadata_folder(other, asked.revision, load)
    raw = read_hf_config(
        config_folder,
        asked.hf_overrides,
        lambda raw: check_architecture(raw, config_folder, asked.model_impl),
    )
    arch = _read_arch(asked, load, raw, config_folder)
    arch = resolve_media(arch, folder, load, max_items)
    if named_dtype(arch.hf_config) is None and load.load_format != "dummy":
        arch = replace(arch, dtype=dtype_of_files(folder, load.load_format) or arch.dtype)
    is_tied = arch.tie_word_embeddings and load.load_format != "dummy"
    if is_tied and has_own_head(folder, load.load_format):
        if WHOLE_CONFIG not in arch.hf_config:
            # The configs of a whole model and of its language model often contradict each other.
            logger.warning(
                "the output head in the files of %s has other values than the token embeddings, "
                "so it is used, although tie_word_embeddings is true",
                folder,
            )
        arch = replace(arch, tie_word_embeddings=False)
    arch, window = resolve_windows(asked, arch)
    arch = _allow_long_positions(asked.max_model_len, arch)
    pooler, recommended_len = resolve_pooler(asked, arch, folder)
    max_model_len = resolve_max_model_len(asked, arch)
    if asked.max_model_len is None:
        max_model_len = min(n for n in (max_model_len, window, recommended_len) if n is not None)
    return replace(
        asked,
        model=model_name(asked),
        served_model_name=asked.served_model_name or (asked.model or folder.name,),
        tokenizer=_resolve_tokenizer(asked, load, folder),
        dtype=_resolve_dtype(asked, arch),
        max_model_len=max_model_len,
        max_logprobs=arch.vocab_size if asked.max_logprobs == -1 else asked.max_logprobs,
        arch=arch.for_length(max_model_len),
        pooler=pooler,
        hf_config_path=None if other is None else str(config_folder),
    )


def _metadata_folder(name: str, revision: str | None, load: LoadConfig) -> Path:
    """Return the folder of a model, and download everything except weights if necessary."""
    return resolve_model_folder(name, revision, load.download_dir, (), "dummy", load.hf_token)


def _read_arch(
    asked: ModelConfig, load: LoadConfig, raw: Mapping[str, Any], folder: Path
) -> ModelArch:
    code_folder = None
    if asked.code_revision is not None:
        if not asked.trust_remote_code:
            logger.warning(
                "code_revision=%s has no effect: the model's own code runs with "
                "trust_remote_code only",
                asked.code_revision,
            )
        elif "AutoConfig" in (raw.get("auto_map") or {}):
            source = asked.hf_config_path or model_name(asked)
            code_folder = _metadata_folder(source, asked.code_revision, load)
    completed = complete_hf_config(
        raw,
        folder,
        trust_remote_code=asked.trust_remote_code,
        code_folder=code_folder,
        code_revision=asked.code_revision,
        token=load.hf_token,
    )
    runs_as = _class_of(raw["architectures"][0], asked.model_impl, completed)
    if runs_as in (BY_TRANSFORMERS, TEXT_BY_TRANSFORMERS):
        check_described(completed, raw)
    arch = ModelArch.from_hf(completed)
    if runs_as in (BY_TRANSFORMERS, TEXT_BY_TRANSFORMERS):
        logger.info(
            "%s runs with the model code of the transformers library, not with an implementation "
            "of this engine",
            arch.architecture,
        )
    dense_key = family_of(arch.model_type).dense_up_to_key
    if dense_key is not None and runs_as == arch.architecture:
        logger.warning(
            "%s runs with dense attention. For sequences of more than %s tokens (%s), the "
            "original model uses sparse attention, so outputs differ from it",
            arch.architecture,
            dense_key,
            arch.hf_config.get(dense_key),
        )
    return replace(arch, architecture=runs_as)


def model_name(asked: ModelConfig) -> str:
    """Return the folder or hub name of the model."""
    return asked.model or str(BUNDLED_MODEL)


def _model_folder(asked: ModelConfig, load: LoadConfig, load_format: LoadFormat) -> Path:
    return resolve_model_folder(
        model_name(asked),
        asked.revision,
        load.download_dir,
        load.ignore_patterns,
        load_format,
        load.hf_token,
    )


def check_architecture(raw: Mapping[str, Any], folder: Path, model_impl: ModelImpl) -> None:
    """Refuse unsupported architectures, before transformers is imported if that is possible.

    Raises:
        ConfigError: config.json names no architecture, or one that is not supported.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise no_architecture(raw, folder)
    _class_of(names[0], model_impl, raw)


def _class_of(architecture: str, model_impl: ModelImpl, raw: Mapping[str, Any]) -> str:
    """Return the registry name of the class that runs an architecture.

    Args:
        architecture: name in config.json.
        model_impl: implementation that the user chose.
        raw: values of config.json, or of the language model in it.

    Raises:
        ConfigError: no class runs it.
    """
    model_type = raw.get("model_type")
    is_ours = architecture in ModelRegistry.supported()
    if is_ours and model_impl != "transformers":
        return architecture
    is_theirs = is_known_to_transformers(architecture, model_type)
    if is_theirs and model_impl != "vllm":
        return TEXT_BY_TRANSFORMERS if architecture in TEXT_TYPES else BY_TRANSFORMERS
    if is_ours:
        raise ConfigError(
            f"model_impl='transformers': the installed transformers has no decoder "
            f"{architecture}. Leave model_impl out"
        )
    if is_theirs:
        raise ConfigError(
            f"model architecture {architecture!r} of model_type {model_type!r} is not supported "
            "with model_impl='vllm'. Leave model_impl out to run it with the model code of "
            "transformers"
        )
    raise unsupported(architecture, raw)


def _resolve_tokenizer(asked: ModelConfig, load: LoadConfig, folder: Path) -> str | None:
    """Return the folder of the tokenizer; None if the engine runs without a tokenizer."""
    if asked.skip_tokenizer_init:
        return None
    if asked.tokenizer is None and asked.tokenizer_revision in (None, asked.revision):
        return str(folder)
    name = asked.tokenizer or model_name(asked)
    return str(_metadata_folder(name, asked.tokenizer_revision, load))


def _resolve_dtype(asked: ModelConfig, arch: ModelArch) -> ModelDType:
    name = replace(asked, arch=arch).dtype_name
    is_other = name == "float16" or name.startswith("float8")
    if asked.dtype == "auto" and is_other and quant_method(arch) is not None:
        name = "bfloat16"  # the dtype in which the kernels of quantized weights compute
    if name not in _RUNNABLE_DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype {name} is not supported; set dtype to one of "
            f"{', '.join(_RUNNABLE_DTYPES)}"
        )
    if name == "float16" and arch.dtype == "bfloat16":
        logger.warning("running bfloat16 weights as float16: values above 65504 overflow")
    elif name != arch.dtype:
        logger.info("running %s weights as %s", arch.dtype, name)
    return cast(ModelDType, name)


def _allow_long_positions(max_model_len: int | None, arch: ModelArch) -> ModelArch:
    """Return the model with positions up to `max_model_len`, if VLLM_ALLOW_LONG_MAX_MODEL_LEN is
    set.

    It is unchanged if longer positions are impossible: a learned position embedding has a fixed
    size, and the length of yarn follows from its factor. A model without positions whose
    config.json names no length, such as Mamba, may have any.
    """
    derived = arch.derived_max_model_len
    if max_model_len is None or max_model_len <= derived:
        return arch
    has_no_positions = _has_no_positions(arch)
    if has_no_positions and all(arch.hf_config.get(name) is None for name in NUM_POSITIONS):
        return replace(arch, max_position_embeddings=max_model_len)
    if not envs.get().VLLM_ALLOW_LONG_MAX_MODEL_LEN or not (arch.rope or has_no_positions):
        return arch
    # One more position, because the scaling factor may not be an integer.
    positions = math.ceil(max_model_len * arch.max_position_embeddings / derived) + 1
    longer = replace(arch, max_position_embeddings=positions)
    if longer.derived_max_model_len < max_model_len:
        return arch
    logger.warning(
        "max_model_len (%d) is more than the %d tokens that the model's config.json allows "
        "(VLLM_ALLOW_LONG_MAX_MODEL_LEN=1): output beyond that length may be of poor quality",
        max_model_len,
        derived,
    )
    return longer


def _has_no_positions(arch: ModelArch) -> bool:
    """Return whether no embedding of positions limits the length: the model has recurrent layers,
    or ALiBi.
    """
    family = family_of(arch.model_type)
    is_default_known = family.default_max_positions is not None
    return arch.rope is None and (is_default_known or not family.has_positions)


def resolve_max_model_len(asked: ModelConfig, arch: ModelArch) -> int:
    """Return the requested maximum length, or the model's maximum if none is requested.

    Raises:
        ConfigError: the model supports fewer tokens.
    """
    derived = arch.derived_max_model_len
    if asked.max_model_len is None:
        return derived
    if asked.max_model_len > derived:
        raise ConfigError(_describe_excess(asked.max_model_len, arch))
    return asked.max_model_len


def _describe_excess(max_model_len: int, arch: ModelArch) -> str:
    derived = arch.derived_max_model_len
    text = (
        f"max_model_len={max_model_len}: config.json of the model allows at most {derived} tokens. "
        f"Lower it to {derived}."
    )
    cannot_grow = "so VLLM_ALLOW_LONG_MAX_MODEL_LEN cannot lift the limit."
    if _has_no_positions(arch):
        return (
            f"{text} It has no position embedding, so VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 lifts the "
            f"limit."
        )
    if arch.rope is None:
        return f"{text} Its position embedding is learned, {cannot_grow}"
    if arch.rope.rope_type == "yarn":
        return f"{text} The factor of its rope_scaling sets the length, {cannot_grow}"
    return (
        f"{text} If the model was trained for more, set "
        f"hf_overrides='{{\"max_position_embeddings\": {max_model_len}}}', or scale its "
        f"positions with rope_scaling=JSON; VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 only lifts the limit."
    )


def _resolve_scheduler(
    settings: Mapping[str, Any], platform: Platform, max_model_len: int
) -> SchedulerConfig:
    max_num_seqs = settings["max_num_seqs"]
    max_num_batched_tokens = settings["max_num_batched_tokens"]
    if max_num_seqs is None:
        max_num_seqs = platform.default_max_num_seqs
        if max_num_batched_tokens is not None:
            max_num_seqs = max(1, min(max_num_seqs, max_num_batched_tokens))
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(platform.default_max_num_batched_tokens, max_num_seqs)
        if not settings["enable_chunked_prefill"]:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    return _section(
        SchedulerConfig,
        settings,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_step_ms=_max_step_ms(settings, platform),
    )


def _max_step_ms(settings: Mapping[str, Any], platform: Platform) -> int:
    """Return the limit for the time of a step in milliseconds; 0: no limit.

    Raises:
        ConfigError: a limit is set, but each rank would read its own clock.
    """
    asked = cast("int | None", settings["max_step_ms"])
    is_external = settings["distributed_executor_backend"] == "external_launcher"
    if is_external and asked:
        raise ConfigError(
            "max_step_ms must be 0 with distributed_executor_backend='external_launcher', got "
            f"{asked}: each process would plan its steps by its own clock. Leave max_step_ms out"
        )
    if is_external or not settings["enable_chunked_prefill"]:
        return asked or 0
    return _given(asked, platform.default_max_step_ms)


RESOLVERS: dict[str, Callable[..., Any]] = {
    "asked_load": _asked_load,
    "model": _model,
    "load": _load,
    "settings": _settings,
    "lora": _lora,
    "limits": _limits,
    "speculative": _speculative,
    "scheduler": _scheduler,
    "cache": _cache,
    "observability": _observability,
    "connector": _connector,
    "hpu": _hpu,
    "device": _device,
    "parallel": _parallel,
    "structured_output": _structured_output,
    "multimodal": _multimodal,
}
"""Name -> a function whose parameters are the names that it reads, in the order of their calls.

`given` (the user's settings) and `platform` are there before. Each name is written once. The names
that are fields of `VllmConfig` become the config.
"""
