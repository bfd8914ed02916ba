"""Resolve model options that depend on the checkpoint and the device: `--quantization`,
`--cpu-offload-gb`, `--disable-sliding-window`, and limits of recurrent models.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import CacheConfig, ConnectorConfig, LoadConfig, ModelArch, ModelConfig
from vllm.config.quantization.inc import read_inc_config
from vllm.config.quantization.quant_method import quant_method
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms import Platform

_DTYPES = ("bfloat16", "float32")
"""Dtypes of models whose weights can be quantized."""

_OTHER_NAMES = {
    "awq_hpu": "awq",
    "awq_marlin": "awq",
    "gptq_hpu": "gptq",
    "gptq_marlin": "gptq",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
}
"""Values of `--quantization` that name a format together with kernels for it."""

_FP8_CHECKPOINTS = ("fp8", "fbgemm_fp8", "modelopt")
"""Formats of checkpoints whose layers can be measured, and rounded again with other scales."""


def resolve_quantization(model: ModelConfig, platform: Platform) -> ModelConfig:
    """Return the model with the content of its Intel Neural Compressor file, if there is one.

    Raises:
        ConfigError: the file cannot be used, the quantization is not known, or it does not fit the
            checkpoint.
    """
    of_variable = envs.get().QUANT_CONFIG
    path = model.quant_config or of_variable or None
    if of_variable not in (None, path):
        logger.warning("QUANT_CONFIG=%s has no effect: quant_config=%s is given", of_variable, path)
    if model.quantization == "inc" and path is None:
        raise ConfigError(
            "quantization='inc' needs the file of its scales: set QUANT_CONFIG, or quant_config, "
            "to the JSON file that `vllm calibrate` writes"
        )
    if path is not None:
        own = quant_method(model.resolved_arch)
        is_fp8 = own in _FP8_CHECKPOINTS and model.quantization == own
        if model.quantization not in (None, "inc") and not is_fp8:
            raise ConfigError(
                f"QUANT_CONFIG={path} is for quantization='inc', not {model.quantization!r}. Leave "
                f"one of them out"
            )
        model = replace(model, quantization="inc", quant_config=path, inc=read_inc_config(path))
    _check_quantization(model, platform)
    _check_head(model, platform)
    return model


def _check_quantization(model: ModelConfig, platform: Platform) -> None:
    """Refuse a quantization that the model or the platform does not support.

    A quantized checkpoint states its format itself; naming that format again has no effect.

    Args:
        model: config with its arch and a dtype that is not "auto".
        platform: platform that runs it.

    Raises:
        ConfigError: the format is not known, or does not fit the checkpoint.
    """
    asked = model.quantization
    if asked is None:
        return
    own = quant_method(model.resolved_arch)
    if own is not None:
        if asked == "inc" and own in _FP8_CHECKPOINTS:
            return
        if _OTHER_NAMES.get(own, own) != _OTHER_NAMES.get(asked, asked):
            raise ConfigError(
                f"quantization={asked!r}: the checkpoint is quantized already, with {own!r}; "
                f"leave the argument out"
            )
        return
    if asked not in platform.quantizations:
        known = ", ".join(platform.quantizations) or "none"
        raise ConfigError(
            f"quantization={asked!r} is not available for an unquantized checkpoint on the device "
            f"{platform.name!r}; available: {known}"
        )
    _check_dtype(model, f"quantization={asked!r}")


def _check_head(model: ModelConfig, platform: Platform) -> None:
    """Refuse to quantize the output head if the model has none, or the platform has no kernel for
    it.

    Raises:
        ConfigError: states the reason.
    """
    asked = model.lm_head_quantization
    if asked == "auto":
        return
    if model.pooler is not None:
        raise ConfigError(
            f"lm_head_quantization={asked!r}: a pooling model has no output head; leave it out"
        )
    if asked not in platform.head_quantizations:
        raise ConfigError(
            f"lm_head_quantization={asked!r} needs the C++ kernels of the CPU, which are not in "
            f"use here (device {platform.name!r}, "
            f"VLLM_CPU_KERNELS={int(envs.get().VLLM_CPU_KERNELS)}); leave it out"
        )
    _check_dtype(model, f"lm_head_quantization={asked!r}")


def _check_dtype(model: ModelConfig, what: str) -> None:
    if model.dtype_name not in _DTYPES:
        raise ConfigError(f"{what} needs dtype {' or '.join(_DTYPES)}, got {model.dtype_name}")


def without_gguf(asked: ModelConfig, folder: Path) -> ModelConfig:
    """Drop `--quantization gguf` for a GGUF file, because the file states its format itself.

    Args:
        asked: config as the user set it.
        folder: folder of the model.
    """
    if asked.quantization == "gguf" and any(folder.glob("*.gguf")):
        return replace(asked, quantization=None)
    return asked


_BITSANDBYTES = "bitsandbytes"
"""A value of `--load-format` that says how weights are quantized, not how files are read."""


def with_bitsandbytes(asked: ModelConfig, load_format: str) -> ModelConfig:
    """Return the model with the quantization that `--load-format bitsandbytes` implies.

    Args:
        asked: config as the user set it.
        load_format: load format as the user set it.

    Raises:
        ConfigError: a different quantization is requested.
    """
    if load_format != _BITSANDBYTES:
        return asked
    if asked.quantization not in (None, _BITSANDBYTES):
        raise ConfigError(
            f"load_format={_BITSANDBYTES!r} is for quantization={_BITSANDBYTES!r}, not "
            f"{asked.quantization!r}. Leave one of them out"
        )
    return replace(asked, quantization=_BITSANDBYTES)


def without_bitsandbytes(load: LoadConfig) -> LoadConfig:
    """Return the load settings with `auto` instead of `--load-format bitsandbytes`."""
    return replace(load, load_format="auto") if load.load_format == _BITSANDBYTES else load


logger = init_logger(__name__)


def resolve_offload(load: LoadConfig, model: ModelConfig, platform: Platform) -> LoadConfig:
    """Resolve `cpu_offload_gb` for the device.

    Raises:
        ConfigError: the model needs all weights on the device.
    """
    if not load.cpu_offload_gb:
        return load
    if not platform.has_own_memory:
        logger.warning(
            "cpu_offload_gb=%g has no effect: on the device %r all weights are in the memory of "
            "the host",
            load.cpu_offload_gb,
            platform.name,
        )
        return replace(load, cpu_offload_gb=0.0)
    if not model.enforce_eager:
        raise ConfigError(
            f"cpu_offload_gb={load.cpu_offload_gb:g} needs enforce_eager: an HPU graph, and a "
            f"model that torch.compile has compiled, need all weights on the card at once. Add "
            f"enforce_eager, or leave cpu_offload_gb out"
        )
    if model.enable_sleep_mode:
        raise ConfigError(
            f"cpu_offload_gb={load.cpu_offload_gb:g} and enable_sleep_mode cannot be used "
            f"together: sleep mode moves all weights at once. Leave one of them out"
        )
    return load


def resolve_windows(asked: ModelConfig, arch: ModelArch) -> tuple[ModelArch, int | None]:
    """Return the model with full attention in every layer, if the user asked for it, and its new
    maximum length.

    Up to the length of its smallest window, a model computes the same with and without windows.

    Returns:
        (architecture, longest request in tokens; None: windows set no limit).

    Raises:
        ConfigError: a longer `max_model_len` was requested.
    """
    windows = [window for window in arch.layer_windows if window is not None]
    if not asked.disable_sliding_window or not windows:
        return arch, None
    limit = min(windows)
    if asked.max_model_len is not None and asked.max_model_len > limit:
        raise ConfigError(
            f"max_model_len ({asked.max_model_len}) must be at most {limit}, the size of the "
            "model's sliding window, with disable_sliding_window. Lower max_model_len to "
            f"{limit}, or leave disable_sliding_window out"
        )
    if asked.max_model_len is None and limit < arch.derived_max_model_len:
        logger.info(
            "max_model_len is %d, the size of the model's sliding window, instead of %d "
            "(disable_sliding_window)",
            limit,
            arch.derived_max_model_len,
        )
    return replace(arch, layer_windows=(None,) * arch.num_layers), limit


def check_connector(connector: ConnectorConfig, cache: CacheConfig) -> ConnectorConfig:
    """Return `connector` unchanged, if the engine can use it.

    Raises:
        ConfigError: the blocks of this KV cache cannot be stored outside of it.
    """
    if connector.kv_transfer is None:
        return connector
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "kv_transfer_config needs the prefix cache, which is off "
            "(enable_prefix_caching=False, or a pooling model). Leave one of them out"
        )
    return connector


_ROWS_WITH_STATES = 32
"""Default of `max_num_seqs` for a model with states: one of Granite 4 H-Tiny takes 57 MiB."""


def for_states(settings: Mapping[str, Any], platform: Platform) -> Mapping[str, Any]:
    """Return the settings for a model with recurrent layers, which keep a state for each request.

    A state is a summary of all tokens so far. It cannot return to an earlier token, so a prefix can
    be reused only where its state was stored.

    Raises:
        ConfigError: merged prefill is requested, which concatenates prompts.
    """
    if platform.needs_static_shapes and envs.get().VLLM_MERGED_PREFILL:
        raise ConfigError(
            "VLLM_MERGED_PREFILL=1 concatenates prompts, which would mix up the recurrent state "
            "of the model's Mamba or DeltaNet layers. Leave it out"
        )
    changed: dict[str, Any] = {}
    if settings["enable_prefix_caching"] and settings["kv_transfer_config"]:
        raise ConfigError(
            "kv_transfer_config cannot be used with a model that has recurrent (Mamba or "
            "DeltaNet) layers: their state is not transferred. Leave it out"
        )
    if settings["max_num_seqs"] is None:
        most = settings["max_num_batched_tokens"] or _ROWS_WITH_STATES
        changed["max_num_seqs"] = min(_ROWS_WITH_STATES, most)
    return {**settings, **changed}
