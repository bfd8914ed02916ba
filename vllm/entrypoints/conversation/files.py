"""Read files that are parts of messages, in the forms of OpenAI's APIs.

Only text can be read: a model sees the name of the file and its text.
"""

import base64
from collections.abc import Mapping
from typing import Any

from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

OPENAI_FILES = ("file", "input_file")
"""Types of the parts with a file: of the chat API, whose fields are in `file`, and of the Responses
API."""
_PDF = b"%PDF-"
_INSTEAD = "send the text of the file as a part of the type text"
_ELSEWHERE = {
    "file_id": f"because this server stores no files: send file_data, or {_INSTEAD}",
    "file_url": f"because this server fetches no files: send file_data, or {_INSTEAD}",
}
"""Field that names a file without having it -> why it is not supported."""


def read_file(where: str, part: Mapping[str, Any], param: str | None = None) -> str:
    """Return the text of a file, after its name.

    Args:
        where: position of the part in the request, for errors.
        part: a part whose type is in `OPENAI_FILES`.
        param: field for errors; None: the position of the wrong field.

    Raises:
        RequestError: the part has no file, or the file is not text.
    """
    inner = part.get("file")
    if isinstance(inner, Mapping):
        where, part = f"{where}.file", inner
    data, title = part.get("file_data"), part.get("filename")
    for field, reason in _ELSEWHERE.items():
        if data is None and part.get(field) is not None:
            name = f"{where}.{field}"
            raise RequestError(f"{name} is not supported, {reason}", param=param or name)
    where = f"{where}.file_data"
    if not isinstance(data, str) or not data:
        raise RequestError(
            f'{where} must be a file in base64, such as "data:text/plain;base64,...", '
            f"got {show_value(data)}",
            param=param or where,
        )
    is_url = data[:5].lower() == "data:"
    encoded = data.partition(",")[2] if is_url else data
    try:
        content = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise RequestError(
            f"{where} must be base64, or a data: URL with ;base64", param=param or where
        ) from None
    text = _as_text(content)
    if text is None:
        what, more = "not text in UTF-8", ""
        if content.startswith(_PDF):
            what, more = "a PDF", ", or its pages as images to a model that reads images"
        raise RequestError(
            f"{where} is {what}, and this server reads text only: {_INSTEAD}{more}",
            param=param or where,
        )
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _as_text(content: bytes) -> str | None:
    """Return the content of a text file; None for any other file."""
    if content.startswith(_PDF) or b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
