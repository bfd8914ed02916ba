"""Maps checkpoint names to the names of modules of transformers.

Version 5 keeps all experts in one parameter and has renamed other modules. When loading older
checkpoints, it maps their names with a table that it publishes (`get_model_conversion_mapping`).
The same table is applied here, except for experts, which our layer takes separately.
"""

import re
from collections.abc import Collection
from typing import Any

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.fused_weights import JOINED_EXPERTS, split_joined_experts
from vllm.transformers_utils.transformers_version import renamed_weight, weight_conversions


class CheckpointNames:
    """Maps the tensors of a checkpoint to the modules of a transformers model.

    Args:
        model: the model of transformers.
        experts: paths of the modules in it that were replaced by our experts.
    """

    def __init__(self, model: Any, experts: Collection[str]) -> None:
        self._conversions = weight_conversions(model)
        self._experts = frozenset(experts)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Convert name and tensor of the checkpoint to the name and tensor of the model.

        Raises:
            WeightLoadError: transformers computes its weights from the tensor by a rule that is not
                implemented here.
        """
        one = self._of_one_expert(name)
        if one is not None:
            return ((one, source),)
        found, pattern = renamed_weight(name, self._conversions)
        if pattern is not None:
            raise WeightLoadError(
                f"tensor {name}: transformers merges it with other tensors into {found} while it "
                "loads the checkpoint; this engine does not. Save the model again with the "
                "installed transformers (save_pretrained(folder, save_original_format=False)), "
                "and load that"
            )
        if found.rpartition(".")[0] in self._experts:
            return split_joined_experts(found, source)
        return ((found, source),)

    def _of_one_expert(self, name: str) -> str | None:
        """Return this package's name of a tensor of one expert; None if the tensor belongs to no
        single expert.

        It may be a weight, or a tensor of a quantized weight.
        """
        stem, _, kind = name.rpartition(".")
        found, pattern = renamed_weight(f"{stem}.weight", self._conversions)
        path, _, parameter = found.rpartition(".")
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if pattern is None or expert is None or path not in self._experts:
            return None
        sources = next(c.source_patterns for c in self._conversions if pattern in c.source_patterns)
        part = JOINED_EXPERTS[parameter][sources.index(pattern)]
        return f"{path}.{expert.group(1)}.{part}.{kind}"
