"""Check the optional parts of the bridge: whether they are used, or what replaces them."""

from functools import partial

from vllm.hpu_check.check import Outcome
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.habana.parts import PARTS
from vllm.platforms.habana.trials import TRIALS


def check_part(bridge: HabanaBridge, name: str) -> Outcome:
    """Check whether the engine uses an optional part on this card."""
    part = PARTS[name]
    reason = bridge.kernels.why_unused(name)
    if reason is not None:
        return Outcome("skip", f"{reason}: {part.instead}")
    tried = ", computes the values of torch on the host" if name in TRIALS else ""
    since = ".".join(str(number) for number in part.since)
    return Outcome("pass", f"used{tried} (known from release {since} on)")


PART_CHECKS = {f"kernel {name}": partial(check_part, name=name) for name in PARTS}
"""Row of the report -> check of a card."""
