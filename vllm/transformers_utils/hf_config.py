"""Read config.json, and add the defaults of the model type from transformers."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from vllm.config.arch.model_arch import WHOLE_CONFIG
from vllm.config.arch.sizes import check_kinds, check_sizes, with_whole_sizes
from vllm.config.families import (
    TEXT_TYPES,
    Family,
    family_of,
    family_of_architecture,
    text_types_of,
    usual_architecture,
)
from vllm.config.quantization.settings_error import SETTINGS_FILES
from vllm.errors import ConfigError
from vllm.transformers_utils.configs.architecture import with_architecture
from vllm.transformers_utils.configs.chatglm_config import complete_chatglm_config
from vllm.transformers_utils.configs.decilm_config import complete_decilm_config
from vllm.transformers_utils.configs.mistral_params import PARAMS, read_params
from vllm.transformers_utils.configs.old_spellings import with_usual_spellings
from vllm.transformers_utils.configs.plain_config import complete_plain_config
from vllm.transformers_utils.transformers_version import is_version_4
from vllm.utils.files.json_file import read_json_object
from vllm.utils.files.weight_files import CONSOLIDATED
from vllm.utils.imports import without_torch

_OF_THE_WHOLE = (
    *("architectures", "quantization_config", SETTINGS_FILES, "dtype", "torch_dtype"),
    "tie_word_embeddings",
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
)
"""Keys that are taken from the whole where it has them."""

_SIZES = {"hidden_size", "num_hidden_layers"}
"""Keys of every language model."""

_TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Keys with the values of the language model, in configs of several programs."""

_POSITIONS = ("max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")
"""Keys whose defaults cannot be taken from another family: without them Baichuan has ALiBi."""


def read_hf_config(
    folder: Path,
    overrides: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], None] = lambda raw: None,
) -> dict[str, Any]:
    """Read config.json, or the params.json of Mistral AI, and apply `overrides`.

    Does not import transformers. For a multimodal model the result is the config of its language
    model (`_text_config`).

    Args:
        folder: folder of the file.
        overrides: values that replace values of the file.
        check: called before the types and sizes of values are checked, because unsupported models
            may have other ones.

    Raises:
        ConfigError: no config.json, broken JSON, or unreasonable sizes.
    """
    path = folder / "config.json"
    if path.is_file():
        raw = _with_floats(read_json_object(path))
    elif (folder / PARAMS).is_file():
        raw = read_params(folder)
    else:
        raise ConfigError(f"model folder '{folder}' has no config.json{_found_instead(folder)}")
    raw = with_architecture(raw, overrides)
    if "quantization_config" not in raw:
        raw |= _other_quantization(raw, folder)
    own = raw.get("quantization_config")
    if isinstance(own, dict) and {"load_in_4bit", "load_in_8bit"} & own.keys():
        own.setdefault("quant_method", "bitsandbytes")  # old versions did not write quant_method
    if isinstance(own, dict) and own == raw.get("quantization"):
        own.setdefault("quant_method", "mlx")  # mlx writes its settings twice, without quant_method
    if isinstance(own, dict) and own and "quant_method" not in own:
        # ModelOpt wrote quant_method only into a separate file, or only as the name of the
        # producer.
        from_file = _other_quantization({}, folder)
        more = from_file.get("quantization_config", {})
        if from_file:
            (where,) = from_file[SETTINGS_FILES].values()
            added = more.keys() | more.get(where[0], {}).keys()
            raw[SETTINGS_FILES] = dict.fromkeys(added - own.keys(), where)
        own |= more | own
        if isinstance(producer := own.get("producer"), dict) and "name" in producer:
            own.setdefault("quant_method", producer["name"])
    raw = _with_overrides(_text_config(raw), overrides)
    if raw.get("model_type") is None and (name := _architecture(raw)) is not None:
        raw["model_type"] = family_of_architecture(name).model_type or None
    check(raw)
    check_kinds(raw)
    check_sizes(raw)  # checked before transformers creates lists of these lengths
    return with_whole_sizes(raw)


_OTHER_FILES = {
    "adapter_config.json": "an adapter of a model: give the model that it was trained on, and the "
    "adapter with lora_modules or a LoRARequest",
    "model_index.json": "a pipeline of diffusers, which makes images. Use a language model",
}
"""File that shows that a folder is not a model -> what the folder is."""
_INNER_CONFIGS = ("*/config.json", "snapshots/*/config.json")
"""Patterns of the file in a subfolder. The second one is the cache of the hub."""


def _found_instead(folder: Path) -> str:
    found = next((name for name in _OTHER_FILES if (folder / name).is_file()), None)
    if found is not None:
        return f", but {found}: it is {_OTHER_FILES[found]}"
    if weights := sorted(folder.glob(CONSOLIDATED)):
        return (
            f", but {weights[0].name}, which has weights in the format of Mistral AI. Copy "
            f"{PARAMS} of the same model into the folder"
        )
    inner = (path for pattern in _INNER_CONFIGS for path in sorted(folder.glob(pattern)))
    if (path := next(inner, None)) is not None:
        return f", but its subfolder has one: name '{path.parent}'"
    return ". Name the folder of a checkpoint, which contains config.json, or a GGUF file"


def complete_hf_config(
    raw: Mapping[str, Any],
    folder: Path,
    *,
    trust_remote_code: bool,
    code_folder: Path | None = None,
    code_revision: str | None = None,
    token: str | bool | None = None,
) -> dict[str, Any]:
    """Return the values of config.json, completed with the defaults of the model type.

    The keys are the usual names of transformers, and the result is plain data.

    Args:
        raw: values of config.json, from `read_hf_config`.
        folder: folder of config.json.
        trust_remote_code: run the model's own config class, if it has one.
        code_folder: folder of that class; None: `folder`.
        code_revision: revision of the class, if it is in another repository on the hub.
        token: access token for that repository.

    Raises:
        ConfigError: an unknown model type, or values that transformers refuses.
    """
    raw = with_usual_spellings(raw)
    if raw.get("model_type") is None:
        raise ConfigError(
            f"config.json of '{folder}' has no 'model_type', the family of the model. Add it, such "
            'as "llama", or give it with hf_overrides'
        )
    family = family_of(raw["model_type"])
    if family.decoder_keys:
        return _config_of_decoder(raw, family)
    if family.config_format == "chatglm":
        return complete_chatglm_config(raw)
    if family.config_format == "decilm":
        return complete_decilm_config(raw)
    plain = complete_plain_config(raw)
    if plain is not None:
        return plain
    classes = _config_classes()
    from transformers import __version__
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model_type = raw.get("model_type")
    has_own_code = "AutoConfig" in (raw.get("auto_map") or {})
    # transformers and custom model code raise exceptions of various types.
    try:
        if has_own_code and trust_remote_code:
            config_class: Any = get_class_from_dynamic_module(
                raw["auto_map"]["AutoConfig"],
                str(code_folder or folder),
                code_revision=code_revision,
                token=token,
            )
            return {**config_class.from_dict(dict(raw)).to_dict(), **raw}
        if isinstance(model_type, str) and model_type in classes:
            known, others = _known_to_transformers(raw, family)
            config_class = classes[model_type]
            completed = config_class.from_dict(_with_usual_types(known, config_class)).to_dict()
            return _without_default_ropes({**completed, **others}, raw)
        if family.config_class is not None:
            config_class = classes[family.config_class]
            completed = config_class.from_dict(_with_usual_types(raw, config_class)).to_dict()
            given = {name: value for name, value in completed.items() if name not in _POSITIONS}
            return {**given, **family.own_defaults, **raw}
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"config.json of '{folder}': {_own_words(error)}") from error
    fix = (
        "the model has its own code, which runs only with trust_remote_code"
        if has_own_code
        else f"transformers {__version__} does not support it; a newer version may"
    )
    raise ConfigError(f"model_type {model_type!r} of '{folder}': {fix}")


def _config_classes() -> Any:
    """Return the config classes of transformers by model type. They do not need torch."""
    with without_torch():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    return CONFIG_MAPPING


def _own_words(error: Exception) -> str:
    """Return what an error of transformers says about a value, in one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return _VALIDATOR.sub("", " ".join(str(text).split()))


_VALIDATOR = re.compile(r"^Class validation error for validator '\w+': \w+: ")
_TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list[int]: "a list of integers",
    NoneType: "null",
}
"""Types of the fields of configs in transformers, as a message names them."""


_UNUSED_SIZES = {
    *("max_window_layers", "original_max_position_embeddings", "pretraining_tp"),
    *("num_logits_to_keep", "num_nextn_predict_layers", "bos_token_id", "pad_token_id"),
}
"""Integers that may be null, because they only matter with other settings, or in training."""


def _has_type(value: object, types: Collection[Any]) -> bool:
    """Return whether transformers accepts a value, either its type or a similar number."""
    if isinstance(value, list):
        return list[int] in types and all(type(each) is int for each in value)
    if isinstance(value, (int, float)):
        return bool({bool, int, float} & set(types))
    return type(value) in types


def _with_usual_types(raw: Mapping[str, Any], config_class: type[Any]) -> dict[str, Any]:
    """Convert values of config.json to the types that transformers 5 requires.

    Other programs write 1 for 1.0, or 1 for true, and the first files of Llama 4 have 4 for true.
    A null instead of a text, a switch or a number that is no size is the same as an absent key, and
    so is a null for a key that the class does not have.

    Raises:
        ConfigError: a value has another type.
    """
    known = fields(config_class) if is_dataclass(config_class) else ()
    names = {field.name for field in known} or raw.keys()
    usual = {key: value for key, value in raw.items() if value is not None or key in names}
    for field in known:
        if field.name not in usual:
            continue
        value, types = usual[field.name], get_args(field.type) or (field.type,)
        is_size = int in types and float not in types
        if value is None and NoneType not in types and Any not in types:
            if field.name == "num_key_value_heads" and "num_attention_heads" in usual:
                usual[field.name] = usual["num_attention_heads"]  # as transformers 4 reads it
                continue
            if not is_size or field.name in _UNUSED_SIZES:
                del usual[field.name]
                continue
        if set(types) <= _TYPE_NAMES.keys() and not _has_type(value, types):
            accepted = " or ".join(dict.fromkeys(_TYPE_NAMES[each] for each in types))
            raise ConfigError(
                f"config.json: {field.name!r} must be {accepted}, got {repr(value)[:80]}. Correct "
                "the file, or give another value with hf_overrides"
            )
        if type(value) not in (int, float) or type(value) in types or Any in types:
            continue
        if type(value) is int and float in types:
            usual[field.name] = float(value)
        elif type(value) is int and bool in types:
            usual[field.name] = bool(value)
        elif type(value) is float and int in types and value.is_integer():
            usual[field.name] = int(value)
    return usual


def _known_to_transformers(
    raw: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into the values that the installed transformers accepts, and the rest. Version
    4 refuses some values that version 5 writes.
    """
    known, others = dict(raw), dict[str, Any]()
    if not is_version_4():
        return known, others
    from transformers import PretrainedConfig

    if family.has_new_layer_types and "layer_types" in known:
        others["layer_types"] = known.pop("layer_types")
    for section in family.plain_sections:
        if isinstance(own := known.get(section), Mapping):
            usual = _config_classes()[family.model_type]().to_dict()[section]
            names = usual.keys() - PretrainedConfig().to_dict().keys()
            known[section] = {name: own[name] for name in names & own.keys()}
    return known, others


def _without_default_ropes(completed: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Remove default rotary settings from a completed config if config.json has its own.

    transformers 4 does not know `rope_parameters`, and adds its usual keys for the same values:
    GPT-OSS would get the factor 32 of the published models, whatever the file contains.
    """
    if "rope_parameters" not in raw:
        return dict(completed)
    added = {"rope_scaling", "rope_theta", "rope_local_base_freq"} - raw.keys()
    return {name: value for name, value in completed.items() if name not in added}


def _config_of_decoder(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config of the decoder of an encoder-decoder, under the usual names of decoders.

    transformers uses these names for the sizes of the encoder.
    """
    whole = dict(raw)
    for name in (*family.decoder_keys.values(), "num_key_value_heads"):
        whole.pop(name, None)
    try:
        config_class = _config_classes()[family.model_type]
        completed = config_class.from_dict(_with_usual_types(whole, config_class)).to_dict()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"config.json: {' '.join(str(error).split())}") from error
    usual = {name: completed[own] for own, name in family.decoder_keys.items()}
    return {**completed, **usual, WHOLE_CONFIG: whole}


def is_known_to_transformers(architecture: str, model_type: object = None) -> bool:
    """Return whether the installed transformers has a decoder for an architecture, or for its
    language model.

    Args:
        architecture: name in config.json.
        model_type: type of the language model; None: the usual one.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = usual_architecture(architecture)
    if architecture in TEXT_TYPES:
        return (model_type or TEXT_TYPES[architecture]) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


_QUANTIZATION_FILES = (
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
    ("hf_quant_config.json", "modelopt"),
)
"""Files with the settings of a quantization, and the method of files that do not name it."""


def _other_quantization(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the quantization of a checkpoint that stores it under another key or in a separate
    file, as tools did before transformers had a key for it.
    """
    for key, method in (("compression_config", "compressed-tensors"), ("quantization", "mlx")):
        settings = raw.get(key)
        if isinstance(settings, dict) and (method != "mlx" or "group_size" in settings):
            return {
                "quantization_config": {"quant_method": method, **settings},
                SETTINGS_FILES: {"": [key, "config.json"]},
            }
    for name, method in _QUANTIZATION_FILES:
        path = folder / name
        if path.is_file():
            settings = read_json_object(path)
            nested = "quantization" if isinstance(settings.get("quantization"), dict) else ""
            return {
                "quantization_config": {"quant_method": method, **settings},
                SETTINGS_FILES: {"": [nested, name]},
            }
    return {}


def _with_floats(raw: dict[str, Any]) -> dict[str, Any]:
    """Replace {"__float__": "Infinity"}, which transformers writes because JSON has no infinity.

    >>> _with_floats({"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    {'time_step_limit': [0.0, inf]}
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        text = value.get("__float__")
        if len(value) == 1 and text in ("Infinity", "-Infinity", "NaN"):
            return float(text)
        return {name: plain(each) for name, each in value.items()}

    return {name: plain(value) for name, value in raw.items()}


def _with_overrides(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values by overrides. Names of transformers 4 are also applied to
    `rope_parameters`.
    """
    text = overrides.get("text_config")
    if isinstance(text, Mapping) and WHOLE_CONFIG in raw:  # the values of the text are in `raw`
        others = {key: value for key, value in overrides.items() if key != "text_config"}
        overrides = {**others, **text}
    merged = {**raw, **overrides}
    rope = raw.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in overrides:
        if isinstance(overrides.get("rope_scaling"), Mapping):
            # Moved and not copied: transformers would prefer the copy and lose rope_theta.
            scaling = merged.pop("rope_scaling")
            rope = {"rope_theta": rope.get("rope_theta"), **scaling}
        if "rope_theta" in overrides:
            rope = {**rope, "rope_theta": overrides["rope_theta"]}
        merged["rope_parameters"] = dict(rope)
    return merged


def _architecture(raw: Mapping[str, Any]) -> str | None:
    """Return the first architecture in config.json; None if there is none."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw`, or the config of the language model in it.

    A multimodal checkpoint has the values of its language model in `text_config`; older checkpoints
    of Qwen have them at the top level. They are read as if the checkpoint were a language model;
    only `architectures` still names the multimodal model.

    Args:
        raw: values of config.json.

    Raises:
        ConfigError: the language model is missing, or does not belong to the family of the
            architecture.
    """
    text = raw.get("text_config")
    if "architectures" not in raw and isinstance(text, Mapping) and "architectures" in text:
        # Transformers 4.57 saves Qwen2-VL in this way.
        raw = {**raw, "architectures": text["architectures"]}
    name = _architecture(raw)
    wanted = None if name is None else TEXT_TYPES.get(name)
    section = next((key for key in _TEXT_KEYS if isinstance(raw.get(key), Mapping)), None)
    if name is not None and wanted is None and section is not None:
        own, inner = family_of_architecture(name), raw[section]
        # Programs that save a part of a multimodal model keep its values where they were.
        is_whole = inner.get("model_type", own.model_type) == own.model_type
        if own.module and is_whole and not _SIZES & raw.keys():
            return {**inner, **{key: raw[key] for key in raw if key != section}}
    if wanted is None or (text is None and raw.get("model_type") in text_types_of(str(name))):
        return dict(raw)
    family = family_of_architecture(str(name))
    is_named = raw.get("model_type") in (family.model_type, *family.also_typed)
    if text is None and is_named and _SIZES & raw.keys():
        tower = {WHOLE_CONFIG: dict(raw)} if "vision_config" in raw else {}
        return {**raw, "model_type": wanted, **tower}
    if not isinstance(text, Mapping):
        raise ConfigError(
            f"config.json of {name} has no 'text_config', which describes its language model. "
            f"Download the file again"
        )
    model_type = text.get("model_type") or wanted
    accepted = text_types_of(str(name))
    if model_type not in accepted:
        raise ConfigError(
            f"config.json: the language model of {name} must be of model_type "
            f"{' or '.join(map(repr, accepted))}, got {model_type!r}. Use a checkpoint that "
            "contains only the language model"
        )
    shared: dict[str, Any] = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    if text.get("tie_word_embeddings") is True:
        # Older files have it only here, and false as the default of the whole. Whoever loads the
        # weights unties them if the checkpoint has an output head.
        shared["tie_word_embeddings"] = True
    rest = {key: value for key, value in raw.items() if key != "text_config"}
    return {**text, **shared, "model_type": model_type, WHOLE_CONFIG: rest}
