"""Convert batch lines about audio, which have a URL instead of an uploaded file."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from vllm.errors import RequestError

Fetch = Callable[[str, str], Awaitable[bytes]]
"""Returns the content of the sound at a URL; the second argument is its name in errors."""

SOUND_URLS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Routes whose bodies are forms with a file."""
_FILE_URL = "file_url"
_FORMATS = ("json", "verbose_json")


class Form(NamedTuple):
    """The body of a form, and its content type."""

    data: bytes
    content_type: str


def check_sound_body(body: bytes) -> dict[str, Any]:
    """Return the fields of a line about audio.

    Raises:
        RequestError: the URL of the audio is missing, or the answer would not be JSON.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"this line is not a valid request: {error}") from None
    url = fields.get(_FILE_URL)
    if not isinstance(url, str) or not url:
        raise RequestError(
            f"{_FILE_URL} must be the URL of a sound (http://, https://, data: or file://), got "
            f"{type(url).__name__ if url is not None else 'none'}",
            param=_FILE_URL,
        )
    if "file" in fields:
        raise RequestError(f"file cannot be used in a batch: use {_FILE_URL}", param="file")
    form = fields.get("response_format")
    if form is not None and form not in _FORMATS:
        raise RequestError(
            f"response_format must be {' or '.join(_FORMATS)} in a batch, got {form!r:.50}",
            param="response_format",
        )
    for name, value in fields.items():
        if isinstance(value, Mapping):
            raise RequestError(f"{name} must be a string, a number or a list, got an object")
    return dict(fields)


async def sound_form(body: bytes, fetch: Fetch) -> Form:
    """Return the form that is equivalent to a line, with the audio file from its URL.

    Raises:
        RequestError: the line is not valid, or the file cannot be fetched.
    """
    fields = check_sound_body(body)
    data = await fetch(fields.pop(_FILE_URL), _FILE_URL)
    boundary = f"batch-{uuid4().hex}"
    begin = f"--{boundary}\r\nContent-Disposition: form-data; name="
    parts = [
        f'{begin}"{name}"\r\n\r\n{value}\r\n'.encode("utf-8", "surrogatepass")
        for name, value in _values(fields)
    ]
    file = f'{begin}"file"; filename="sound"\r\nContent-Type: application/octet-stream\r\n\r\n'
    end = f"\r\n--{boundary}--\r\n"
    return Form(
        b"".join([*parts, file.encode(), data, end.encode()]),
        f"multipart/form-data; boundary={boundary}",
    )


def _values(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each part of a form. A list becomes one part per value."""
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                # Replace quotes and line breaks, which would end the field name in the header.
                yield name.translate(_UNSAFE), str(each).lower() if isinstance(each, bool) else each


_UNSAFE = {ord(char): "_" for char in '"\r\n\\'}
