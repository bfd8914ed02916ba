"""AWQ checkpoints (arXiv 2306.00978) in the layout `gemm`: 4 bits, with zero points or without.

Without them (`zero_point: false`) numbers are less 8; `qzeros`, where a checkpoint has it, says so.
"""

from vllm.model_executor.layers.linear import LinearMethod
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.grouped import GroupedLinear, GroupLayout
from vllm.model_executor.quantization.settings import (
    Settings,
    choice,
    group_size_of,
    is_listed,
    names,
)


class AWQ(CheckpointFormat[GroupLayout]):
    """`quant_method: awq`."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            ConfigError: a setting is not supported.
        """
        old_names = {"w_bit": "bits", "q_group_size": "group_size"}
        settings = {old_names.get(key, key): value for key, value in settings.items()}
        choice(settings, "version", ("gemm",), "gemm")
        self.layout = GroupLayout(
            bits=choice(settings, "bits", (4,)),
            group_size=group_size_of(settings, "group_size"),
            is_awq=True,
            is_symmetric=not choice(settings, "zero_point", (True, False), True),
        )
        self.has_head = choice(settings, "lm_head", (False, True), False)
        self.ignored = names(settings, "modules_to_not_convert")

    def stores_head(self, names: Names) -> bool:
        return bool(self.has_head)

    def storage_of(self, names: Names) -> GroupLayout | None:
        return None if is_listed(names, self.ignored) else self.layout

    def method(self, name: str, storage: GroupLayout) -> LinearMethod:
        return GroupedLinear(name, storage)
