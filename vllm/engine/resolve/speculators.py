"""Resolve the speculator, a draft model that reads hidden states of the model: its config and
settings.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig
from vllm.config.arch.speculators import SPECULATORS, SpeculatorFile, method_of_config
from vllm.engine.resolve.model_options import resolve_quantization
from vllm.errors import ConfigError
from vllm.platforms import Platform
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config
from vllm.transformers_utils.hub import resolve_model_folder


def find_method(
    speculative: SpeculativeConfig, platform: Platform, load: LoadConfig
) -> SpeculativeConfig:
    """Find the speculative method from the config.json of a draft model that was given without a
    method.

    The file is read only if some method with a draft model can run.
    """
    given = speculative.speculative_config
    if not (platform.can_run_speculators or platform.can_run_draft_models):
        return speculative
    if speculative.method != "draft_model" or given.get("method") is not None:
        return speculative
    name = str(given["model"])
    _, config = _read_config(name, given.get("revision"), load)
    method = method_of_config(config, name)
    return replace(speculative, speculative_config={**given, "method": method})


def resolve_speculator(
    speculative: SpeculativeConfig, model: ModelConfig, platform: Platform, load: LoadConfig
) -> SpeculativeConfig:
    """Resolve the speculator that the settings ask for, without its weights. The settings are
    unchanged if they ask for none.

    Raises:
        ConfigError: it was not made for this model, or cannot run with it.
    """
    options = speculative.drafts
    row = None if options is None else SPECULATORS.get(options.method)
    if options is None or row is None or model.pooler is not None:
        return speculative
    if not platform.can_run_speculators:
        raise ConfigError(
            f"speculative_config: the method {options.method} does not run on the device "
            f"{platform.name!r} in this version. Use the method ngram or suffix, or leave "
            f"speculative_config out"
        )
    name = options.model if row.has_files else model.model
    assert name is not None
    revision = options.revision if row.has_files else model.revision
    folder, config = _read_config(name, revision, load)
    if row.is_decoder:
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config = complete_hf_config({**names, **config}, folder, trust_remote_code=False)
    file = SpeculatorFile(str(folder / "config.json"), config, model.resolved_arch, model.model)
    found = row.read(file)
    max_drafts = options.num_speculative_tokens
    if "num_speculative_tokens" not in speculative.speculative_config:
        max_drafts = min(max_drafts, found.max_drafts)
    if max_drafts > found.max_drafts:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens must be from 1 to {found.max_drafts}, "
            f"the number of heads of the speculator '{name}', got {max_drafts}"
        )
    lengths = (options.max_model_len, found.arch.derived_max_model_len, model.max_model_len or 0)
    asked = ModelConfig(
        model=name,
        revision=revision,
        quantization=options.quantization if row.has_files else model.quantization,
        lm_head_quantization=model.lm_head_quantization,
        max_model_len=min(length for length in lengths if length),
        dtype=model.dtype,
        seed=model.seed,
        arch=replace(found.arch, dtype=model.resolved_arch.dtype),
    )
    given = {**speculative.speculative_config, "num_speculative_tokens": max_drafts}
    return replace(
        speculative, speculative_config=given, draft_model=resolve_quantization(asked, platform)
    )


def check_speculator(config: VllmConfig) -> None:
    """Refuse settings with which a speculator cannot be combined.

    Raises:
        ConfigError: names the two settings.
    """
    method = config.speculative.method
    if config.speculative.draft_model is None or method not in SPECULATORS:
        return
    if config.connector.kv_transfer is not None:
        raise ConfigError(
            f"speculative_config: the method {method}, which reads hidden states of the model, "
            "cannot be used together with kv_transfer_config in this version. Leave one of them "
            "out, or use the method ngram"
        )


def _read_config(
    name: str, revision: str | None, load: LoadConfig
) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of a speculator, and its config.json."""
    folder = resolve_model_folder(name, revision, load.download_dir, (), "dummy", load.hf_token)
    return folder, read_hf_config(folder, {})
