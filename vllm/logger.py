"""Log lines in the format `INFO 09-24 17:31:39 file.py:123] message` on the `vllm` logger.

Configured on the first `init_logger` call. An application that has put handlers on the `vllm`
logger by then keeps them, its level and its propagation, and VLLM_CONFIGURE_LOGGING=0 leaves
everything to it. VLLM_LOGGING_CONFIG_PATH names a file that replaces this configuration. With
VLLM_LOGGING_FORMAT=json a line is a JSON object. Lines and lists that are too long are shortened
in their middle.
"""

import json
import logging
import logging.config
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vllm import envs
from vllm.errors import ConfigError

MAX_LINE = 2000
"""Characters of one log line, its prefix included."""

_MAX_LIST = 1500
"""Characters of a list in a log line, which leaves room for the rest of the line."""

_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class _CurrentStderr(logging.Handler):
    """Writes log lines to the current `sys.stderr`, so that redirecting it works."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; errors of the stream are reported as `logging` does, never raised."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _TextFormatter(logging.Formatter):
    """Formats lines of at most `MAX_LINE` characters; a longer one is cut in the middle."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(cut_line(line) for line in super().format(record).split("\n"))


class _JsonFormatter(logging.Formatter):
    """Formats a log line as a JSON object.

    `extra={"fields": {...}}` of a log call adds fields. A long message is cut in the middle.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the log line, without a line end."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "place": f"{record.filename}:{record.lineno}",
            "message": cut_line(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def use_format(log_format: str) -> None:
    """Write lines as "text" or "json" from now on, if this module has set up the logger."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, _CurrentStderr):
            handler.setFormatter(_formatter(log_format))


def current_format() -> str:
    """Return the format of lines: "text" or "json"."""
    handlers = logging.getLogger("vllm").handlers
    return "json" if any(isinstance(h.formatter, _JsonFormatter) for h in handlers) else "text"


def share_handlers(name: str) -> None:
    """Let the logger of another package write to the same handlers."""
    configure()
    root, other = logging.getLogger("vllm"), logging.getLogger(name)
    other.handlers, other.propagate = list(root.handlers), root.propagate


def _formatter(log_format: str) -> logging.Formatter:
    if log_format == "json":
        return _JsonFormatter()
    prefix = envs.get().VLLM_LOGGING_PREFIX.replace("%", "%%")
    return _TextFormatter(prefix + _FORMAT, _DATE_FORMAT)


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; `name` is its `__name__`.

    Raises:
        ConfigError: an environment variable has a bad value, or its file cannot be used.
    """
    configure()
    return logging.getLogger(name)


@cache
def configure() -> None:
    """Set up the `vllm` logger and report variables without effect, once per process.

    Child processes of this package do not report variables.
    """
    _set_handlers()
    if envs.is_child():
        return
    root = logging.getLogger("vllm")
    for variable in envs.without_effect():
        root.warning("environment variable %s has no effect: %s", variable.name, variable.reason)
    for name, nearest in envs.unknown().items():
        hint = f"; did you mean {nearest}?" if nearest else ""
        root.warning("environment variable %s is not known and has no effect%s", name, hint)
    for name, nearest in envs.misspelt().items():
        root.warning("environment variable %s is not known; did you mean %s?", name, nearest)


def configure_again(log_format: str) -> None:
    """Set up the `vllm` logger again in a forked process.

    It must not use the parent's handlers and the files that they have open.

    Args:
        log_format: format; see `use_format`.
    """
    named = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict]
    enabled = [each for each in named if not each.disabled]
    for each in (logging.getLogger(), *named):
        each.handlers.clear()
    _set_handlers()
    use_format(log_format)
    for each in enabled:  # loggers that existed before were disabled by the configuration file
        each.disabled = False


def _set_handlers() -> None:
    settings = envs.get()  # first, because an invalid variable raises
    root = logging.getLogger("vllm")
    if settings.VLLM_LOGGING_CONFIG_PATH is not None:
        _configure_from_file(settings.VLLM_LOGGING_CONFIG_PATH, settings.VLLM_CONFIGURE_LOGGING)
    elif settings.VLLM_CONFIGURE_LOGGING and not root.handlers:
        handler = _CurrentStderr()
        handler.setFormatter(_formatter(settings.VLLM_LOGGING_FORMAT))
        root.addHandler(handler)
        root.setLevel(settings.VLLM_LOGGING_LEVEL)
        root.propagate = False


def _configure_from_file(path: str, is_wanted: bool) -> None:
    if not is_wanted:
        raise ConfigError(
            "VLLM_LOGGING_CONFIG_PATH cannot be used with VLLM_CONFIGURE_LOGGING=0, which turns "
            "the configuration of logging off: unset one of them"
        )
    try:
        config = json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
        if not isinstance(config, dict):
            raise ValueError("it must contain a JSON object")
        logging.config.dictConfig(config)
    # Handlers and formatters may raise any of these errors for a wrong setting.
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ConfigError(f"VLLM_LOGGING_CONFIG_PATH={path!r}: {error}{cause}") from error


def cut_list(values: Sequence[object], max_length: int = _MAX_LIST) -> str:
    """Return the text of a list; a long one is shortened to its first and last values.

    >>> cut_list([1, 2, 3])
    '[1, 2, 3]'
    >>> cut_list(list(range(100)), max_length=40)
    '[0, 1, 2, ... 95 more ..., 98, 99]'
    """
    if len(text := str(list(values))) <= max_length:
        return text
    room = (max_length - len(f"[, ... {len(values)} more ..., ]")) // 2
    first, last = _within(values, room), _within(values[::-1], room)[::-1]
    missing = len(values) - len(first) - len(last)
    return f"[{', '.join([*first, f'... {missing} more ...', *last])}]"


def cut_line(line: str, max_length: int = MAX_LINE) -> str:
    """Return the line; a long one is shortened to its beginning and end.

    >>> cut_line("a" * 50 + "b" * 50, max_length=60)
    'aaaaaaaaaaaaa[... 73 characters left out ...]bbbbbbbbbbbbbb'
    """
    if len(line) <= max_length:
        return line
    room = max_length - len(f"[... {len(line)} characters left out ...]")
    first, last = line[: room // 2], line[len(line) - (room + 1) // 2 :]
    return f"{first}[... {len(line) - len(first) - len(last)} characters left out ...]{last}"


def _within(values: Sequence[object], room: int) -> list[str]:
    texts: list[str] = []
    for value in values:
        text = str(value)
        room -= len(text) + len(", ")
        if room < 0:
            break
        texts.append(text)
    return texts
