"""Read `--chat-template`. Does not import transformers, and imports jinja2 only for the check."""

import functools
from pathlib import Path

from vllm.errors import ConfigError

_SHOWN_CHARS = 60


@functools.lru_cache(maxsize=4)
def load_chat_template(value: str | None) -> str | None:
    """Return the template of `--chat-template`: the content of a file, or the value itself.

    Raises:
        ConfigError: the value is neither a file nor a template.
    """
    if value is None or "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"chat_template={value!r} is neither a file that can be read ({reason}) nor a "
            f"template, which contains {{{{ or {{%. Name a file, or give the template itself."
        ) from error


def check_chat_template(value: str) -> None:
    """Refuse a template with a syntax error. Renders nothing.

    Raises:
        ConfigError: the template cannot be read, or is not valid Jinja.
    """
    from jinja2 import TemplateSyntaxError

    from vllm.entrypoints.conversation.template import compile_template

    source = load_chat_template(value) or ""
    try:
        compile_template(source)
    except TemplateSyntaxError as error:
        shown = value if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]}..."
        raise ConfigError(
            f"chat_template={shown!r}: line {error.lineno} is not valid Jinja: {error.message}. "
            f"Correct it, or leave it out to use the model's own template."
        ) from None
