"""Reads the scales of an FP8 KV cache from a checkpoint, under the names that tools use.

The names are `layers.0.self_attn.k_scale`, `...self_attn.k_proj.k_scale`,
`...self_attn.attn.k_scale`, the same with v, or `...self_attn.kv_scale` for both. Each has one
value for the layer, or one for each key/value head.
"""

import re

import torch
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.ops import get_ops

_LARGEST = torch.finfo(torch.float8_e4m3fn).max

_NAME = re.compile(
    r"(?P<block>.+?)(\.attn|\.k_proj(?=\.k_)|\.v_proj(?=\.v_))?\.(?P<of>kv|k|v)_scale"
)


def load_kv_scale(model: nn.Module, name: str, source: CheckpointTensor, tp: TPGroup) -> bool:
    """Set the KV-cache scales of an attention layer, if the checkpoint tensor contains such scales.

    Args:
        model: has an `Attention` named attn in each attention block.
        name: name of the tensor, after the renames of the model class.
        source: one value, or one for each key/value head of the model.
        tp: the ranks that share the layer.

    Returns:
        Whether the tensor was such a scale; if False, nothing was done.

    Raises:
        WeightLoadError: the number of values is wrong, or a value is not above 0.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    layer = dict(model.named_modules()).get(f"{match['block']}.attn")
    if not isinstance(layer, Attention):
        return False
    numbers = source.read(()).flatten().float()
    scales = numbers if len(numbers) == 1 else _of_rank(name, numbers, layer.num_kv_heads, tp)
    wrong = numbers[~(numbers.isfinite() & (numbers > 0))].tolist()
    if wrong:
        raise WeightLoadError(f"tensor {name} must have values above 0 only, got {wrong[0]}")
    scales = scales * cache_scale_factor()
    if "k" in match["of"]:
        layer.set_cache_scales(key=scales)
    if "v" in match["of"]:
        layer.set_cache_scales(value=scales)
    return True


def cache_scale_factor() -> int:
    """Return the factor by which scales of checkpoints are multiplied on this device.

    Checkpoints assume an e4m3 range up to 448. On devices whose range ends at 240 scales are
    doubled, so that values are halved.
    """
    return 2 if get_ops().fp8_max < _LARGEST else 1


def _of_rank(name: str, numbers: Tensor, num_kv_heads: int, tp: TPGroup) -> Tensor:
    """Select the scales of this rank's heads from the scales of all heads.

    With fewer heads than ranks, several ranks have the same heads.
    """
    total = num_kv_heads * tp.size
    num_replicas = total // len(numbers) if len(numbers) else 0
    if num_replicas * len(numbers) != total or (num_replicas > 1 and num_kv_heads > 1):
        raise WeightLoadError(
            f"tensor {name} must have one value for the layer, or one for each of its key/value "
            f"heads ({num_kv_heads} on this rank), got {len(numbers)}"
        )
    start = tp.rank // num_replicas * num_kv_heads
    return numbers[start : start + num_kv_heads]
