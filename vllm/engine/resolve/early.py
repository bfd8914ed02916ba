"""Resolve as much of a config as is possible within a second, to report mistakes early.

Nothing here contacts the hub or imports torch or transformers, so a mistyped flag is reported
before anything slow begins. `resolve_config` does the rest.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.config import ModelArch, ModelConfig, MultiModalConfig, VllmConfig
from vllm.engine.resolve.config import (
    check_architecture,
    check_settings,
    model_name,
    resolve_config,
    resolve_max_model_len,
)
from vllm.engine.resolve.media import check_media_settings
from vllm.errors import ConfigError
from vllm.multimodal.job import family_of_model
from vllm.platforms import resolve_platform
from vllm.transformers_utils.configs.plain_config import complete_plain_config
from vllm.transformers_utils.generation_config import load_generation_defaults
from vllm.transformers_utils.hf_config import read_hf_config
from vllm.transformers_utils.hub import find_folder, is_offline
from vllm.transformers_utils.tokenizer import check_tokenizer_files
from vllm.utils.files.weight_files import find_files
from vllm.utils.plugins import load_general_plugins


def resolve_early(settings: Mapping[str, Any]) -> VllmConfig | None:
    """Return the config of an engine; None if it needs a download or transformers.

    Args:
        settings: settings, as for `resolve_config`.

    Raises:
        ConfigError: the engine cannot start with these settings.
    """
    load_general_plugins()
    check_settings(settings)
    asked = ModelConfig(**{name: settings[name] for name in ("model", "max_model_len")})
    names = [settings["hf_config_path"] or model_name(asked), model_name(asked)]
    if settings["tokenizer"] and not settings["skip_tokenizer_init"]:
        names.append(settings["tokenizer"])
    folders = [find_folder(name) for name in names]
    if (None in folders or settings["code_revision"]) and not is_offline():
        return None
    if folders[0] is not None:
        folder = folders[0]
        raw = read_hf_config(
            folder,
            settings["hf_overrides"],
            lambda raw: check_architecture(raw, folder, settings["model_impl"]),
        )
        if complete_plain_config(raw) is None:
            _check_length(asked, raw)
            _check_media(raw, folder, settings)
            return None
    config = resolve_config(settings)
    _check_files(config)
    return config


def _check_media(raw: Mapping[str, Any], folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse unusable settings of an image processor or feature extractor, whatever transformers
    adds to config.json.
    """
    try:
        arch = ModelArch.from_hf(raw)
    except (ConfigError, TypeError, ValueError):
        return  # resolve_config will report what is missing, if anything
    names = ("limit_mm_per_prompt", "mm_processor_kwargs")
    check_media_settings(arch, folder, MultiModalConfig(**{name: settings[name] for name in names}))


def _check_length(asked: ModelConfig, raw: Mapping[str, Any]) -> None:
    """Refuse a maximum length that config.json does not allow, whatever transformers adds to it."""
    if not raw.keys() & {"rope_theta", "rope_parameters"}:
        return  # transformers may still derive the type of its position embeddings
    try:
        arch = ModelArch.from_hf(raw)
    except (ConfigError, TypeError, ValueError):
        return  # resolve_config will report what is missing, if anything
    resolve_max_model_len(asked, arch)


def _check_files(config: VllmConfig) -> None:
    """Refuse a model if files that are needed to load it are missing. Opens only small files."""
    folder = Path(config.model.resolved_path)
    load_generation_defaults(config.model)
    family_of_model(config)  # imports the family and reads its image processor config
    if config.load.load_format != "dummy":
        find_files(folder, config.load.load_format)
    if config.model.tokenizer is not None:
        check_tokenizer_files(Path(config.model.tokenizer))
    if resolve_platform(config.device.device).needs_static_shapes:
        plan_buckets(config)
