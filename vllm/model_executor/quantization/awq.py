"""AWQ checkpoints (arXiv 2306.00978) in the layout `gemm`: 4 bits, with zero points."""

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
        version = settings.get("version", "gemm")
        if isinstance(version, str):
            settings["version"] = version.lower()
        choice(settings, "version", ("gemm",), "gemm")
        choice(settings, "zero_point", (True,), True)
        self.layout = GroupLayout(
            bits=choice(settings, "bits", (4,)),
            group_size=group_size_of(settings, "group_size"),
            is_awq=True,
        )
        self.has_head = choice(settings, "lm_head", (False, True), False)
        self.ignored = names(settings, "modules_to_not_convert")

    @property
    def stores_head(self) -> bool:
        return bool(self.has_head)

    def storage_of(self, names: Names) -> GroupLayout | None:
        return None if is_listed(names, self.ignored) else self.layout

    def method(self, name: str, storage: GroupLayout) -> LinearMethod:
        return GroupedLinear(name, storage)
