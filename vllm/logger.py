"""Log lines of the form `INFO 09-24 17:31:39 file.py:123] message` on the `vllm` logger.

Configured on the first `init_logger` call. An application that has put handlers on the `vllm`
logger by then keeps them, its level and its propagation.
"""

import logging
import sys
from functools import cache

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class _CurrentStderr(logging.Handler):
    """Writes to whatever `sys.stderr` is at the time, so that redirection works."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a broken stream is reported as logging does, never raised."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is its `__name__`.

    Raises:
        ConfigError: an environment variable has a bad value.
    """
    _configure()
    return logging.getLogger(name)


@cache
def _configure() -> None:
    """Set up the `vllm` logger and report unknown variables; once per process."""
    level = envs.get().VLLM_LOGGING_LEVEL  # before any change: a bad value raises
    root = logging.getLogger("vllm")
    if not root.handlers:
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        root.addHandler(handler)
        root.setLevel(level)
        root.propagate = False
    for name, nearest in envs.unknown().items():
        hint = f"; did you mean {nearest}?" if nearest else ""
        root.warning("environment variable %s is not known and has no effect%s", name, hint)
