"""Decide whether the encoder of images or audio of a model is loaded. Reads no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from vllm.config import LoadConfig, ModelArch, MultiModalConfig, VllmConfig
from vllm.config.families import TEXT_TYPES, family_of_architecture
from vllm.errors import ConfigError
from vllm.inputs import plural
from vllm.logger import init_logger
from vllm.multimodal.images.tower_config import TOWER_PARTS
from vllm.multimodal.interface.checks import SETTINGS_FILE, SettingsError
from vllm.multimodal.job import family_class, family_of_model, num_embeddings
from vllm.multimodal.processor_settings import has_settings, override_settings, read_settings
from vllm.transformers_utils.weight_headers import names_of_tensors

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of encoder input: its words for messages, and the package that reads its files."""

    name: str
    processor: str
    package: str
    library: str
    extra: str


_IMAGES = _Kind("images", "an image processor", "PIL", "Pillow", "image")
_SOUNDS = _Kind("sounds", "a feature extractor", "av", "PyAV", "audio")


def resolve_media(
    arch: ModelArch, folder: Path, load: LoadConfig, max_items: Mapping[str, int] | None
) -> ModelArch:
    """Return the architecture, without images and audio if the encoder cannot run or is not needed.
    Logs the reason.

    Args:
        arch: architecture of the model.
        folder: folder of the model.
        load: how the weights are loaded.
        max_items: maximum number of items of a request, by modality; None: the model is a draft
            model, which reads only tokens.

    Raises:
        ConfigError: the encoder cannot run, and every prompt needs it.
    """
    name = str(arch.hf_config["architectures"][0])
    family = family_of_architecture(arch.architecture)
    if name not in TEXT_TYPES and not family.decoder_keys:
        return arch
    media = family.media
    kind = _SOUNDS if media and "image" not in family_class(media).modalities else _IMAGES
    reason = _reason_for_text(arch, folder, load, max_items, kind)
    if reason is None:
        return arch
    if family.decoder_keys:
        raise ConfigError(
            f"{name} needs {kind.name} as input, but input of {kind.name} is not available: "
            f"{reason}"
        )
    logger.info(
        "%s serves text input only: the part of the checkpoint for %s is not loaded, because %s",
        name,
        kind.name,
        reason,
    )
    return replace(arch, media_config=None, text_only=reason)


def check_images_fit(config: VllmConfig) -> None:
    """Refuse a config whose steps have no room for an image, if the model needs a whole image in
    one step.

    Raises:
        ConfigError: states how much room there is, and what to raise.
    """
    limits = config.scheduler
    if not config.model.resolved_arch.media_sees_ahead or not limits.enable_chunked_prefill:
        return
    family = family_of_model(config)
    assert family is not None
    num_tokens = num_embeddings(family, family.largest())
    if num_tokens <= limits.longest_chunk:
        return
    settings, fix = "long_prefill_token_threshold or max_num_partial_prefills", "Change these"
    if num_tokens <= limits.prefill_chunk_limit:
        settings = (
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}), which also has to hold one "
            f"token for each other request (max_num_seqs: {limits.max_num_seqs})"
        )
        fix = f"Raise max_num_batched_tokens to {num_tokens + limits.max_num_seqs - 1}"
    raise ConfigError(
        f"an image of this model has {num_tokens} tokens, which must run in one step, but one step "
        f"can compute at most {limits.longest_chunk} tokens of a prompt because of {settings}. "
        f"{fix}, or serve text only: limit_mm_per_prompt image=0"
    )


def check_media_settings(arch: ModelArch, folder: Path, config: MultiModalConfig) -> None:
    """Refuse settings of an image processor or feature extractor before transformers completes
    config.json.

    Args:
        arch: architecture from config.json, not completed.
        folder: folder of the model.
        config: config of the engine.

    Raises:
        ConfigError: a setting cannot be used; names the file and the key.
    """
    if arch.media_module is None or arch.media_config is None:
        return
    rules = family_class(arch.media_module)
    is_used = any(config.counts[modality] for modality in rules.modalities)
    if not is_used or not has_settings(rules, folder):
        return
    settings = override_settings(rules, read_settings(rules, folder), config.mm_processor_kwargs)
    try:
        rules(arch.media_config, settings)
    except SettingsError:
        raise
    except ConfigError as error:
        logger.debug(
            "config.json cannot be checked yet and is checked once it is complete: %s", error
        )


def _reason_for_text(
    arch: ModelArch,
    folder: Path,
    load: LoadConfig,
    max_items: Mapping[str, int] | None,
    kind: _Kind,
) -> str | None:
    """Return the reason why a model reads only text; None if it also reads images or audio."""
    family = family_of_architecture(arch.architecture)
    if family.media is None:
        return family.text_only
    if arch.media_config is None:
        return f"config.json describes no encoder of {kind.name}"
    if max_items is None:
        return "a draft model reads only tokens"
    rules = family_class(family.media)
    modalities = rules.modalities
    if not any(max_items[modality] for modality in modalities):
        return f"limit_mm_per_prompt allows no {' and no '.join(map(plural, modalities))}"
    if not has_settings(rules, folder):
        return f"{folder} has no settings of {kind.processor} ({SETTINGS_FILE})"
    if find_spec(kind.package) is None:
        return f"{kind.library} is not installed: pip install 'vllm[{kind.extra}]'"
    if load.load_format == "dummy" or family.decoder_keys:
        return None
    names = names_of_tensors(folder, load.load_format)
    if names and not any(set(TOWER_PARTS) & set(name.split(".")[:2]) for name in names):
        return f"the checkpoint has no tensors of an encoder of {kind.name}"
    return None
