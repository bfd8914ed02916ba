"""AWQ checkpoints (arXiv 2306.00978) in the layout `gemm`: 4 bits, with zero points."""

from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.stored_experts import StoredExperts
from vllm.model_executor.quantization.grouped import GroupedLinear, GroupLayout
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import (
    Settings,
    choice,
    first_expert,
    group_size_of,
    is_below,
    is_quantized,
    names,
)


class AWQ(Quantization):
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
        self.ignored = names(settings, "modules_to_not_convert")

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if layer.keeps_precision or not is_quantized(name, layer, self.ignored):
            return None
        return GroupedLinear(name, self.layout)

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        return None if is_below(first_expert(name), self.ignored) else StoredExperts(name)
