"""Holds the table of device-dependent operators that is in use.

Layers call `get_ops().rms_norm(...)`. The platform installs its implementation once, before the
model is built. Until then the torch reference is used, so a layer can be tested without a platform.
"""

from vllm.ops.interface import Ops

__all__ = ["Ops", "get_ops", "set_ops"]

_ops: Ops | None = None


def get_ops() -> Ops:
    """Return the installed operators; `NativeOps` if none were installed."""
    global _ops
    if _ops is None:
        from vllm.ops.native.operators import NativeOps

        _ops = NativeOps()
    return _ops


def set_ops(ops: Ops) -> None:
    """Install the operators that every layer of this process uses from now on."""
    global _ops
    _ops = ops
