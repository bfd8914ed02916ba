"""Split one dictionary of options and tensors, as tests list them, into those for layers and those
for operators.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.ops.attention_options import AttentionOptions, AttentionTensors

_OPTIONS = {field.name for field in fields(AttentionOptions)}


def split_options(given: Mapping[str, Any]) -> tuple[AttentionOptions, dict[str, Any]]:
    """Return the attention options in the dictionary, and the remaining entries."""
    rest = {name: value for name, value in given.items() if name not in _OPTIONS}
    return AttentionOptions(**{name: given[name] for name in _OPTIONS & set(given)}), rest


def operator_options(**given: Any) -> tuple[AttentionOptions, AttentionTensors]:
    """Return the entries that attention operators accept."""
    options, rest = split_options(given)
    return options, AttentionTensors(**rest)
