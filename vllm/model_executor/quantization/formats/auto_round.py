"""AutoRound checkpoints (arXiv 2309.05516), whose tensors have the layout of GPTQ or AWQ.

Only the settings differ: `packing_format` (formerly `backend`) says how values are packed, and
`extra_config` has settings of single layers.
"""

import re
from typing import Any

from vllm.model_executor.quantization.formats.awq import AWQ
from vllm.model_executor.quantization.formats.gptq import GPTQ
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import Settings, choice, wrong

_DENSE_BITS = 16
"""A layer with this many bits or more is not quantized."""


def create_auto_round(settings: Settings) -> Quantization:
    """Create the quantization format for `quant_method: auto-round`.

    Raises:
        ConfigError: a setting is not supported.
    """
    choice(settings, "data_type", ("int",), "int")
    choice(settings, "act_bits", tuple(range(_DENSE_BITS, 33)), _DENSE_BITS)
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        raise wrong("extra_config", extra, "names of layers, each with an object of settings")
    dense = [name for name, own in extra.items() if _is_dense(own)]
    others = {name: own for name, own in extra.items() if not _is_dense(own)}
    packing = _packing_of(settings)
    if packing == "awq":
        if others:
            raise wrong("extra_config", others, "layers of 16 bits, if values are packed as AWQ")
        own = {"modules_to_not_convert": dense, "zero_point": True, "version": "gemm"}
        return AWQ({**_whole(settings), **own})
    dynamic: dict[str, Any] = {f"-:.*{re.escape(name)}$": {} for name in dense}
    dynamic |= {f"+:.*{re.escape(name)}$": _whole(own) for name, own in others.items()}
    has_head = any(name.endswith("lm_head") for name in others)
    gptq = {"checkpoint_format": "gptq", "dynamic": dynamic, "lm_head": has_head}
    return GPTQ({**_whole(settings), **gptq})


def _packing_of(settings: Settings) -> str:
    """Return the tensor layout, "gptq" or "awq"."""
    key = "packing_format" if "packing_format" in settings else "backend"
    packing = settings.get(key, "auto_round:auto_gptq")
    words = re.split(r"[:_]", packing) if isinstance(packing, str) else []
    found = [word for word in words if word in ("gptq", "awq")]
    if len(found) != 1:
        raise wrong(key, packing, "auto_round:auto_gptq, auto_round:auto_awq")
    return found[0]


def _is_dense(own: dict[str, Any]) -> bool:
    bits = own.get("bits")
    return type(bits) is int and bits >= _DENSE_BITS


def _whole(settings: Settings) -> dict[str, Any]:
    return {key: settings[key] for key in ("bits", "group_size", "sym") if key in settings}
