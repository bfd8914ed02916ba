"""Options and tensors of attention layers by one table of names, as tests list them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.ops.attention_options import AttentionOptions, AttentionTensors

_OPTIONS = {field.name for field in fields(AttentionOptions)}


def split_options(given: Mapping[str, Any]) -> tuple[AttentionOptions, dict[str, Any]]:
    """Return the options among what is given, and the rest."""
    rest = {name: value for name, value in given.items() if name not in _OPTIONS}
    return AttentionOptions(**{name: given[name] for name in _OPTIONS & set(given)}), rest


def operator_options(**given: Any) -> tuple[AttentionOptions, AttentionTensors]:
    """Return what operators of attention take of what is given."""
    options, rest = split_options(given)
    return options, AttentionTensors(**rest)
