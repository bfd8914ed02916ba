"""Choose the chat template of a folder that has several, as transformers does."""

from pathlib import Path
from typing import TypeVar

from vllm.utils.files.json_file import read_json_object

OwnT = TypeVar("OwnT")

_PROCESSOR = "processor_config.json"
_FILES = (_PROCESSOR, "chat_template.json")
"""Files with the template of a processor; the first that has one decides."""


def template_of_folder(folder: Path, own: OwnT | None) -> OwnT | str | None:
    """Return the chat template of a folder.

    Processors of transformers read their files before `chat_template.jinja`. Without a processor,
    the template of the tokenizer is used.

    Args:
        folder: folder of the model.
        own: template of the tokenizer, from `chat_template.jinja` or `tokenizer_config.json`.

    Raises:
        ConfigError: a file is not JSON.
    """
    has_processor = any(
        (folder / name).is_file() for name in (_PROCESSOR, "preprocessor_config.json")
    )
    if own is not None and not has_processor:
        return own
    for name in _FILES:
        path = folder / name
        template = read_json_object(path).get("chat_template") if path.is_file() else None
        if isinstance(template, str):
            return template
    return own
