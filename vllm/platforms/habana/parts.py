"""List the parts of the bridge that some builds do not have: their modules, and their replacement.

All other parts exist in every supported build, and the engine does not start without them. Each
part is looked up once, when the card is opened.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from vllm.errors import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

Version = tuple[int, int]
"""Version of the Gaudi software: 1.24 is (1, 24)."""

OLDEST: Version = (1, 19)
NEWEST: Version = (1, 24)
"""The first and the last release whose interface this table was written from."""

OPERATORS = "torch.ops.hpu"


@dataclass(frozen=True)
class Part:
    """One optional part of the bridge."""

    module: str
    """Below `habana_frameworks.torch`; or `OPERATORS`."""
    names: tuple[str, ...]
    """Names that the module must have; the overload of an operator follows a dot."""
    instead: str
    """Replacement if a build lacks the part."""
    since: Version = OLDEST
    """The first release that is known to have it; `OLDEST` may be later than the first."""
    arguments: tuple[str, ...] = ()
    """Parameters that the first of the names must have."""
    cards: tuple[str, ...] = ()
    """Cards that have the kernel; empty for all."""
    of: str = ""
    """Name of the part that this part is an argument of."""


_PLAIN_EXPERTS = "the experts are computed by torch operators, one after the other, which is slower"

PARTS: dict[str, Part] = {
    "FusedSDPA": Part(
        "hpex.kernels",
        ("FusedSDPA",),
        "prompt attention is computed by torch operators, which is slower",
    ),
    "FusedSDPA window_size": Part(
        "hpex.kernels",
        ("FusedSDPA",),
        "layers with a sliding window use a mask, which takes more memory",
        since=(1, 22),
        arguments=("window_size",),
        of="FusedSDPA",
    ),
    "FusedSDPA sink": Part(
        "hpex.kernels",
        ("FusedSDPA",),
        "prompt attention of layers with sinks is computed by torch operators, which is slower",
        since=(1, 24),
        arguments=("sink",),
        of="FusedSDPA",
    ),
    "fp8_fused_sdpa": Part(
        "hpex.kernels",
        ("fp8_fused_sdpa",),
        "prompt attention is computed in bfloat16, also with VLLM_PROMPT_USE_FP8_FUSEDSDPA=1",
        arguments=("d_scale_q", "d_scale_k", "d_scale_v", "q_scale_s", "d_scale_s"),
    ),
    "FusedRMSNorm": Part(
        "hpex.normalization", ("FusedRMSNorm",), "RMS norms are computed by torch operators"
    ),
    "apply_rotary_pos_emb": Part(
        "hpex.kernels",
        ("apply_rotary_pos_emb", "RotaryPosEmbeddingMode"),
        "rotary embeddings are computed by torch operators",
    ),
    "block_softmax": Part(
        OPERATORS,
        ("block_softmax",),
        "the softmax of decode attention is computed by torch operators",
        since=(1, 22),
        cards=("GAUDI3",),
    ),
    "block_softmax_adjustment": Part(
        OPERATORS,
        ("block_softmax_adjustment",),
        "the block maxima of decode attention are combined by torch operators",
        since=(1, 22),
        cards=("GAUDI3",),
    ),
    "mixture_of_experts": Part(OPERATORS, ("mixture_of_experts.fused_weights",), _PLAIN_EXPERTS),
    "mixture_of_experts with biases": Part(
        OPERATORS, ("mixture_of_experts.bias_fused_weights",), _PLAIN_EXPERTS, since=(1, 23)
    ),
    "mixture_of_experts in fp8": Part(
        OPERATORS, ("mixture_of_experts.fp8_fused_weights_dynamic",), _PLAIN_EXPERTS, since=(1, 22)
    ),
    "mixture_of_experts in MXFP4": Part(
        OPERATORS,
        ("mixture_of_experts.mxfp4_fused_weights",),
        "weights in MXFP4 become bfloat16 for each forward pass",
        since=(1, 24),
    ),
    "mixture_of_experts in MXFP4 with biases": Part(
        OPERATORS,
        ("mixture_of_experts.bias_mxfp4_fused_weights",),
        "weights in MXFP4 become bfloat16 for each forward pass",
        since=(1, 24),
    ),
    "metrics": Part(
        "hpu.metrics",
        ("metric_global",),
        "compilations and operators that run on the host are not counted",
    ),
    "bridge_config": Part(
        "internal.bridge_config",
        ("env_setting", "get_pt_compile_only_mode"),
        "the warm-up runs each graph that it compiles",
    ),
}
"""Name -> part, in the order of the report."""


def parse_release(text: str) -> Version:
    """Parse a release such as "1.24"."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def parse_names(text: str) -> list[str]:
    """Parse a comma-separated list of parts.

    Raises:
        ConfigError: a part has an unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise ConfigError(
                f"VLLM_HPU_SIM_ABSENT: {name!r} is unknown; accepted: {', '.join(PARTS)}"
            )
    return names


Found = Mapping[str, tuple[Any, ...]]
"""Name of a part -> the objects of its names. Parts that a build lacks are missing."""


def load_vendor(module: str) -> ModuleType:
    """Import a module of the installed bridge."""
    return import_module(f"habana_frameworks.torch.{module}")


def find_parts(load: Callable[[str], ModuleType] = load_vendor) -> Found:
    """Look up every optional part. Called once for each opened card.

    Args:
        load: imports the module of a part.
    """
    found = {}
    for name, part in PARTS.items():
        objects = _operators(part) if part.module == OPERATORS else _objects(part, load)
        if objects is not None:
            found[name] = objects
    return found


def _objects(part: Part, load: Callable[[str], ModuleType]) -> tuple[Any, ...] | None:
    try:
        module = load(part.module)
    except (ImportError, OSError) as error:  # OSError: a library that it needs is missing
        logger.debug("cannot import %s of the bridge: %s", part.module, error)
        return None
    objects = tuple(getattr(module, name, None) for name in part.names)
    if None in objects or not _takes(objects[0], part.arguments):
        return None
    return objects


def _takes(function: Any, arguments: Iterable[str]) -> bool:
    """Return whether a kernel has these parameters.

    The kernel is a function, or an autograd function, whose `apply` has the parameters of its
    `forward`.
    """
    wanted = set(arguments)
    if not wanted:
        return True
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return False
    return wanted <= set(parameters)


def _operators(part: Part) -> tuple[Any, ...] | None:
    objects = []
    for name in part.names:
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.hpu, packet_name, None)
        if packet is None or (overload or "default") not in packet.overloads():
            return None
        objects.append(packet)
    return tuple(objects)


def absent_of_release(release: Version, absent: Iterable[str] = ()) -> list[str]:
    """Return the parts that a simulated release does not have.

    Args:
        release: the simulated release.
        absent: parts that it lacks in addition to the parts of later releases.
    """
    lacking = set(absent)
    return [
        name
        for name, part in PARTS.items()
        if part.since > release or name in lacking or part.of in lacking
    ]


def log_absent(found: Found) -> None:
    """Warn about each missing part that all known releases have, and name its replacement."""
    for name, part in PARTS.items():
        if name not in found and part.since == OLDEST:
            logger.warning("this build of the bridge has no %s: %s", name, part.instead)
