"""Log lines about the formats in which quantized weights are stored on the device."""

from collections import Counter
from typing import Any

from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.stored.stored_experts import DeviceExperts
from vllm.model_executor.layers.stored.stored_linear import KeepsPacked, StoredHead
from vllm.model_executor.layers.weight_method import MethodLayer

logger = init_logger(__name__)


def log_formats(model: nn.Module) -> None:
    """Log one line for each combination of a checkpoint format and a format in memory."""
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for layer in model.modules():
        method: Any = layer.method if isinstance(layer, MethodLayer) else None
        method = method.linear if isinstance(method, StoredHead) else method
        if not isinstance(method, (KeepsPacked, DeviceExperts)):
            continue
        if method.stored_as is not None and method.kept is not None:
            key = method.stored_as, method.kept.kind
            counts[key] += 1
            num_bytes[key] += method.kept.num_bytes
    for key, count in counts.items():
        logger.info(
            "%d layers: stored as %s in the checkpoint, kept as %s in memory (%.1f MiB)",
            *(count, *key, num_bytes[key] / 2**20),
        )
