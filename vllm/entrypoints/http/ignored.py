"""Log ignored parts of requests once per kind.

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
    """Log once that a part of requests has no effect.

    Args:
        what: ignored part, such as "tools of the type".
        name: name of the field, as the client sent it.
        consequence: what happens without it.
    """
    text = f"{what} {name!r:.{_MAX_NAME_CHARS}}"
    if text in _noted or len(_noted) >= _MAX_NOTED:
        return
    _noted.add(text)
    logger.info("%s: %s (this line appears once)", text, consequence)


def forget_ignored() -> None:
    """Clear the record of logged parts, so that they are logged again."""
    _noted.clear()
