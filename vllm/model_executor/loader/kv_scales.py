"""Scales of an fp8 KV cache that a checkpoint brings along, in the names that tools give them.

A checkpoint may say `layers.0.self_attn.k_scale`, `...self_attn.k_proj.k_scale`,
`...self_attn.attn.k_scale`, the same for v, or `...self_attn.kv_scale` for both.
"""

import math
import re

import torch
from torch import nn

from vllm.attention import Attention
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import Source
from vllm.ops import get_ops

_LARGEST = torch.finfo(torch.float8_e4m3fn).max

_NAME = re.compile(
    r"(?P<block>.+?)(\.attn|\.k_proj(?=\.k_)|\.v_proj(?=\.v_))?\.(?P<of>kv|k|v)_scale"
)


def load_kv_scale(model: nn.Module, name: str, source: Source) -> bool:
    """Set the scales of the attention layer that a checkpoint tensor is for.

    Args:
        model: has an `Attention` named attn in each attention block.
        name: of the tensor, renamed as the model's are.
        source: one number.

    Returns:
        False, and nothing done, when the tensor is something else.

    Raises:
        WeightLoadError: it is not one number above 0.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    layer = dict(model.named_modules()).get(f"{match['block']}.attn")
    if not isinstance(layer, Attention):
        return False
    numbers = source.read(()).flatten().tolist()
    if len(numbers) > 1:
        raise WeightLoadError(
            f"tensor {name} has {len(numbers)} numbers, such as one for each head; supported: one "
            f"for each layer. Use a checkpoint whose kv_cache_scheme has the strategy 'tensor', or "
            f"one without scales of the KV cache, and measure them with `vllm calibrate`"
        )
    if len(numbers) != 1 or not (math.isfinite(numbers[0]) and numbers[0] > 0):
        raise WeightLoadError(f"tensor {name} must be one number above 0, got {numbers}")
    # Scales of checkpoints are for numbers up to 448. Where fp8 ends at 240, all are halved.
    scale = numbers[0] * (2 if get_ops().fp8_max < _LARGEST else 1)
    if "k" in match["of"]:
        layer.key_scale = scale
    if "v" in match["of"]:
        layer.value_scale = scale
    return True
