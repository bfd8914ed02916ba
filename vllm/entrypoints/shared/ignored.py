"""One log line for each kind of thing in requests that the server accepts and does not use.

Programs send the same fields and tools with every request, so a line for each request would fill
the log.
"""

from vllm.logger import init_logger

logger = init_logger(__name__)

_MAX_NOTED = 200
"""Clients choose the names, so their number has a limit."""
_MAX_NAME_CHARS = 80
_noted: set[str] = set()


def note_ignored(what: str, name: object, consequence: str) -> None:
    """Log that a part of a request has no effect, the first time that it is met.

    Args:
        what: is ignored, such as "tools of the type".
        name: as the client sent it.
        consequence: says what happens without it.
    """
    text = f"{what} {name!r:.{_MAX_NAME_CHARS}}"
    if text in _noted or len(_noted) >= _MAX_NOTED:
        return
    _noted.add(text)
    logger.info("%s: %s (this line appears once)", text, consequence)


def forget_ignored() -> None:
    """Forget what was logged, so that it is logged once more."""
    _noted.clear()
