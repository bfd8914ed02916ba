"""Logs which weights and caches each forward pass converts before it multiplies."""

from torch import nn

from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.ops.attention_options import FP8_DTYPES
from vllm.ops.hpu.low_bit_weight import LowBitWeight
from vllm.worker.kv_cache import cache_dtype

logger = init_logger(__name__)


def log_converted(config: VllmConfig, model: nn.Module) -> None:
    """Log which weights and which cache are stored in a smaller format than they are multiplied in.

    Args:
        config: config of the engine.
        model: loaded.
    """
    rows = [module for module in model.modules() if isinstance(module, LowBitWeight)]
    found = []
    if rows:
        num_bytes = sum(param.nbytes for each in rows for param in each.parameters())
        found.append(f"{len(rows)} quantized weights ({format_bytes(num_bytes)})")
    dtype = cache_dtype(config)
    if dtype in FP8_DTYPES:
        found.append(f"the KV cache in {str(dtype).removeprefix('torch.')}")
    if found:
        logger.info(
            "Each forward pass converts %s to %s before a matmul uses them",
            *(" and ".join(found), config.model.dtype_name),
        )
