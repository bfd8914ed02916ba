"""Convert keys and values of older config.json files to the names that transformers uses.

The spellings of single families are in the table of families.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config.families import family_of, family_of_architecture
from vllm.errors import ConfigError

_OF_ROTATIONS = (
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
    "partial_rotary_factor",
)
_TYPES = ("rope_type", "type")
_DTYPES = ("dtype", "torch_dtype")
_DTYPE_NAMES = {
    "auto": None,
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float"), "float32"),
}
_DTYPES_OF_TORCH = (
    *("bfloat16", "float16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_FACTORS = {"short_factor", "long_factor"}
_LONGROPE = "longrope"


def with_usual_spellings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the names that transformers uses for its keys and values.

    A key that has its usual name already is not changed.

    >>> with_usual_spellings({"model_type": "RefinedWeb", "n_layer": 60})["num_hidden_layers"]
    60
    """
    model_type = _model_type(raw)
    family = family_of(model_type)
    usual = {**raw, "model_type": model_type} if "model_type" in raw else dict(raw)
    if model_type in family.also_typed:
        assert isinstance(model_type, str)
        usual = {**family.values_of_type.get(model_type, {}), **raw}
        usual["model_type"] = family.model_type
    for old, name in family.old_keys.items():
        parent, _, key = old.rpartition(".")
        given = usual.get(parent) if parent else usual
        if isinstance(given, Mapping) and key in given:
            usual.setdefault(name, given[key])
    for key in _DTYPES:
        dtype = usual.get(key)
        if isinstance(dtype, str):
            short = dtype.lower().removeprefix("torch.")
            usual[key] = _DTYPE_NAMES.get(short, short)
            if usual[key] not in (None, *_DTYPES_OF_TORCH):
                raise ConfigError(
                    f"config.json: {key!r} must be one of {', '.join(_DTYPES_OF_TORCH)}, got "
                    f"{dtype!r}. Correct the file, or give another value with hf_overrides"
                )
    for key in _OF_ROTATIONS:
        if usual.get(key) is None:
            usual.pop(key, None)  # transformers does not take null for an absent key
        elif isinstance(usual[key], Mapping):
            usual[key] = _usual_rope(usual[key])
    return usual


def _model_type(raw: Mapping[str, Any]) -> object:
    """Return the model type. The first configs of some families share a type with another
    family.
    """
    model_type, names = raw.get("model_type"), raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        family = family_of_architecture(names[0])
        if model_type in family.first_typed:
            return family.model_type
    return model_type


def _usual_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings without values that are null, and with `longrope` instead of `su`, or
    of `yarn` with factors for short and long contexts.
    """
    given = {k: v for k, v in rope.items() if v is not None}
    usual = {k: _usual_rope(v) if isinstance(v, Mapping) else v for k, v in given.items()}
    if rope.keys() >= _FACTORS:
        usual |= {key: _LONGROPE for key in _TYPES if key in usual}
    return usual
