"""Holds the table of device-dependent operators that is in use.

Layers call `get_ops().rms_norm(...)`. The platform installs its implementation once, before the
model is built. Until then the torch reference is used, so a layer can be tested without a platform.
"""

from vllm.ops.native.operators import NativeOps

__all__ = ["get_ops", "set_ops"]

_ops: NativeOps | None = None


def get_ops() -> NativeOps:
    """Return the installed operators; the reference if none were installed."""
    global _ops
    if _ops is None:
        _ops = NativeOps()
    return _ops


def set_ops(ops: NativeOps) -> None:
    """Install the operators that every layer of this process uses from now on."""
    global _ops
    _ops = ops
