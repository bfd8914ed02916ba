"""Derive the class of a model from its model type, if config.json names none.

Programs that save a wrapped model write the name of the wrapper, or no name.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from vllm.config.families import TEXT_TYPES, family_of, family_of_architecture
from vllm.logger import init_logger

logger = init_logger(__name__)

_WRAPPERS = frozenset(
    {
        *("AutoModel", "AutoModelForCausalLM", "DistributedDataParallel", "OptimizedModule"),
        *("FullyShardedDataParallel", "PeftModel", "PeftModelForCausalLM"),
    }
)
"""Classes that contain a model of any family."""
_SHARDED = "FSDP"
"""Begins the name of a class whose model was trained with fully_shard of torch."""


def with_architecture(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config.json with `architectures`, if they can be derived.

    Args:
        raw: values of config.json.
        overrides: values that will replace them.

    >>> with_architecture({"model_type": "qwen2"}, {})["architectures"]
    ['Qwen2ForCausalLM']
    """
    names = raw.get("architectures")
    if overrides.get("architectures") or "_class_name" in raw:
        return dict(raw)
    if names and not (isinstance(names, list) and isinstance(names[0], str)):
        return dict(raw)  # an error for whoever checks the value
    given = names[0] if names else None
    inner = given.removeprefix(_SHARDED) if given else ""
    if given and inner != given and family_of_architecture(inner).model_type:
        return {**raw, "architectures": [inner]}
    if names and not _is_known(names[0]):
        known = next((name for name in names[1:] if _is_known(name)), None)
        if known is not None and not _is_of_transformers(names[0]):
            _log_other_once(names[0], known)
            return {**raw, "architectures": [known]}
    if given and given not in _WRAPPERS:
        return dict(raw)
    text = raw.get("text_config")
    if given is None and isinstance(text, Mapping) and text.get("architectures"):
        return dict(raw)  # the names of the whole model, which transformers 4.57 writes there
    model_type = overrides.get("model_type") or raw.get("model_type")
    name = _architecture_of(model_type) if isinstance(model_type, str) else None
    if name is None:
        return dict(raw)
    _log_once(given, name, model_type)
    return {**raw, "architectures": [name]}


def _is_known(name: object) -> bool:
    if not isinstance(name, str):
        return False
    return name in TEXT_TYPES or bool(family_of_architecture(name).model_type)


def _is_of_transformers(name: str) -> bool:
    """Return whether the installed transformers has a decoder of this class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _architecture_of(model_type: str) -> str | None:
    """Return the class that generates with models of a type, or the encoder itself; None: no class
    or several.
    """
    family = family_of(model_type)
    if family.architectures:
        is_sure = family.is_encoder or len(family.architectures) == 1
        return family.architectures[0] if is_sure else None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name if isinstance(name, str) and name.endswith("ForCausalLM") else None


@cache
def _log_once(given: str | None, name: str, model_type: str) -> None:
    logger.info(
        "config.json %s, so the model runs as %s, the usual class of its model_type %r. Give "
        "another class with hf_overrides, such as %s",
        "has no 'architectures'" if given is None else f"names the wrapper {given}",
        *(name, model_type, '{"architectures": ["LlamaForSequenceClassification"]}'),
    )


@cache
def _log_other_once(given: str, name: str) -> None:
    logger.info(
        "config.json names the class %s, which is not known, and then %s: the model runs as %s",
        *(given, name, name),
    )
