"""The facts about each family of models, for all code that needs them: one table, `FAMILIES`.

The modules of a family are in `vllm.model_executor.models`. Everything that other parts have to
know of it is here, so that nothing else in the package asks for a `model_type` by name. Knows no
torch and no transformers.
"""

from vllm.config.families.family import ConfigDefaults, Family, GGUFFacts
from vllm.config.families.table import FAMILIES

__all__ = [
    "FAMILIES",
    "TEXT_TYPES",
    "ConfigDefaults",
    "Family",
    "GGUFFacts",
    "family_of",
    "family_of_architecture",
    "text_types_of",
    "usual_architecture",
]

_UNKNOWN = Family(model_type="")
_BY_TYPE = {
    name: family for family in FAMILIES.values() for name in (family.model_type, *family.also_typed)
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


def family_of_architecture(name: str) -> Family:
    """Return the family with an architecture; for an unknown one, a family with all defaults.

    >>> family_of_architecture("XLMRobertaModel").is_encoder
    True
    """
    for family in FAMILIES.values():
        names = (family.architectures, family.also_published_as, family.pooling_architectures)
        if any(name in each for each in names):
            return family
    return _UNKNOWN


def text_types_of(architecture: str) -> tuple[str, ...]:
    """Return each `model_type` that the language model of an architecture with a part for images
    may have, the usual one first; empty: it is no such architecture.

    >>> text_types_of("Gemma3ForConditionalGeneration")
    ('gemma3_text',)
    """
    if architecture not in TEXT_TYPES:
        return ()
    return TEXT_TYPES[architecture], *family_of_architecture(architecture).also_text_types


def usual_architecture(name: str) -> str:
    """Return the usual name of an architecture that is published under several.

    >>> usual_architecture("MPTForCausalLM")
    'MptForCausalLM'
    """
    family = family_of_architecture(name)
    return family.architectures[0] if name in family.also_published_as else name
