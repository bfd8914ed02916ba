"""Read the chat template of a multimodal processor, which tokenizers do not read."""

from pathlib import Path

from vllm.utils.files.json_file import read_json_object

_JINJA = "chat_template.jinja"
_FILES = ("chat_template.json", "processor_config.json")


def processor_template(folder: Path) -> str | None:
    """Return the chat template in a file of the processor; None if there is none.

    `chat_template.jinja` has priority over these files, and tokenizers read it.

    Raises:
        ConfigError: a file is not JSON.
    """
    if (folder / _JINJA).is_file():
        return None
    for name in _FILES:
        path = folder / name
        template = read_json_object(path).get("chat_template") if path.is_file() else None
        if isinstance(template, str):
            return template
    return None
