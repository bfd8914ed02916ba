"""Collect the properties of each model family in one table, `FAMILIES`.

The modules of a family are in `vllm.model_executor.models`. All other properties that the package
needs are here, so that no other code compares a `model_type` with a name. Imports neither torch
nor transformers.
"""

from vllm.config.families.family import ConfigDefaults, Family, GGUFFormat
from vllm.config.families.table import FAMILIES

__all__ = [
    "FAMILIES",
    "TEXT_TYPES",
    "ConfigDefaults",
    "Family",
    "GGUFFormat",
    "family_of",
    "family_of_architecture",
    "text_types_of",
    "usual_architecture",
]

_UNKNOWN = Family(model_type="", tokenizer=None)
_BY_TYPE = {
    name: family for family in FAMILIES.values() for name in (family.model_type, *family.also_typed)
}
_BY_ARCHITECTURE = {
    name: family
    for family in reversed(FAMILIES.values())  # the first of two families with a name has it
    for names in (family.architectures, family.also_published_as, family.pooling_architectures)
    for name in names
}

TEXT_TYPES = {
    name: family.text_type
    for family in FAMILIES.values()
    if family.text_type
    for name in (*family.architectures, *family.also_published_as)
}
"""Architecture with a part for images -> `model_type` of its language model."""


def family_of(model_type: object) -> Family:
    """Return the family of a `model_type`; for an unknown one, a family with all defaults.

    >>> family_of("gemma2").full_attention_every
    2
    >>> family_of("unheard_of").windows
    'configured'
    """
    known = isinstance(model_type, str) and _BY_TYPE.get(model_type)
    return known or _UNKNOWN


def family_of_architecture(name: object) -> Family:
    """Return the family with an architecture; for an unknown one, a family with all defaults.

    >>> family_of_architecture("XLMRobertaModel").is_encoder
    True
    """
    known = isinstance(name, str) and _BY_ARCHITECTURE.get(name)
    return known or _UNKNOWN


def text_types_of(architecture: str) -> tuple[str, ...]:
    """Return each `model_type` that the language model of a multimodal architecture may have, the
    usual one first.

    Empty if the architecture is not multimodal.

    >>> text_types_of("Gemma3ForConditionalGeneration")
    ('gemma3_text',)
    """
    if architecture not in TEXT_TYPES:
        return ()
    return TEXT_TYPES[architecture], *family_of_architecture(architecture).also_text_types


def usual_architecture(name: str) -> str:
    """Return the usual name of an architecture, which may be published under several names.

    >>> usual_architecture("MPTForCausalLM")
    'MptForCausalLM'
    """
    family = family_of_architecture(name)
    return family.architectures[0] if name in family.also_published_as else name
