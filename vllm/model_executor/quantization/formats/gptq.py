"""GPTQ checkpoints (arXiv 2210.17323) as AutoGPTQ and GPTQModel write them.

Values have 2, 3, 4 or 8 bits. Symmetric ones have zero points as well, all equal. The first format
(`checkpoint_format: gptq`) stores zero points minus 1, `gptq_v2` stores them unchanged. With
`desc_act` the inputs of a group are not neighbours (`g_idx`): columns are permuted once while
loading.
"""

import re
from typing import Any

from vllm.model_executor.layers.linear import LinearMethod
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.grouped import GroupedLinear, GroupLayout
from vllm.model_executor.quantization.settings import (
    NOT_MARLIN,
    Settings,
    choice,
    group_size_of,
    is_listed,
    names,
    wrong,
)
from vllm.utils.text.patterns import compile_pattern

_OLD_NAMES = {"wbits": "bits", "groupsize": "group_size"}
"""Names of settings in GPTQ-for-LLaMa -> their names today."""
_IN_BLOCK = re.compile(r"\.\d+\.")
"""Matches the names of modules inside the decoder layers."""


class GPTQ(CheckpointFormat[GroupLayout]):
    """The quantization format of `quant_method: gptq`."""

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        settings = {_OLD_NAMES.get(key, key): value for key, value in settings.items()}
        self.layout = _layout_of(settings)
        self.has_head = choice(settings, "lm_head", (False, True), False)
        self.ignored = names(settings, "modules_to_not_convert")
        self.dynamic = _dynamic_of(settings)
        self.in_blocks = _modules_in_blocks(settings)

    def stores_head(self, names: Names) -> bool:
        return bool(self.has_head)

    def storage(self, names: Names) -> GroupLayout | None:
        is_in_block = any(_IN_BLOCK.search(name) for name in names)
        if self.in_blocks and is_in_block and not is_listed(names, self.in_blocks):
            return None
        rule = self.rule_for(names)
        return self.layout if rule is None else self.dynamic[rule][1]

    def rule_for(self, names: Names) -> str | None:
        """Return the first rule of the setting `dynamic` that matches a layer with these names."""
        return next(
            (
                rule
                for rule, (pattern, _) in self.dynamic.items()
                if any(pattern.match(name) for name in names)
            ),
            None,
        )

    def method(self, name: str, storage: GroupLayout) -> LinearMethod:
        return GroupedLinear(name, storage)


def _layout_of(settings: Settings) -> GroupLayout:
    bits = choice(settings, "bits", (2, 3, 4, 8))
    formats = ("gptq", "gptq_v2")
    for key, value in (("is_marlin_format", True), ("checkpoint_format", "marlin")):
        if settings.get(key) == value:
            raise wrong(key, value, f"{', '.join(formats)}. Use {NOT_MARLIN}")
    choice(settings, "is_marlin_format", (False,), False)
    checkpoint_format = choice(settings, "checkpoint_format", formats, "gptq")
    return GroupLayout(
        bits=bits,
        group_size=group_size_of(settings),
        zero_offset=1 if checkpoint_format == "gptq" else 0,
        has_groups=True,
        is_ordered=choice(settings, "desc_act", (True, False), False),
        is_symmetric=choice(settings, "sym", (True, False), False),
    )


def _modules_in_blocks(settings: Settings) -> list[str]:
    """Return the module names in a list of names or of lists of names, as optimum writes it."""
    key = "modules_in_block_to_quantize"
    given = settings.get(key) or []
    flat: list[Any] = []
    for each in given if isinstance(given, list) else [given]:
        flat += each if isinstance(each, list) else [each]
    return names({key: flat}, key)


def _dynamic_of(settings: Settings) -> dict[str, tuple[re.Pattern[str], GroupLayout | None]]:
    """Read GPTQModel's setting `dynamic`: pattern of module names -> layout, or None for dense."""
    dynamic: Any = settings.get("dynamic") or {}
    accepted = "patterns of module names, each with an object of settings"
    if not isinstance(dynamic, dict) or not all(isinstance(v, dict) for v in dynamic.values()):
        raise wrong("dynamic", dynamic, accepted)
    found: dict[str, tuple[re.Pattern[str], GroupLayout | None]] = {}
    for pattern, other in dynamic.items():
        try:
            compiled = compile_pattern(pattern.removeprefix("+:").removeprefix("-:"))
        except ValueError as error:
            raise wrong("dynamic", pattern, f"{accepted} ({error})") from error
        is_dense = pattern.startswith("-:")
        found[pattern] = compiled, None if is_dense else _layout_of({**settings, **other})
    return found
