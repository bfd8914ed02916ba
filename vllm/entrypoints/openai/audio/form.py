"""Read the form of a request with a file into the class of its body."""

from collections import defaultdict
from typing import Any, NamedTuple, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from vllm.entrypoints.openai.protocol.transcription import SpeechFields
from vllm.errors import RequestError

Body = TypeVar("Body", bound=SpeechFields)

FILE = "file"
_MAX_PARTS = 64
_MAX_TEXT_BYTES = 2**20
"""Limit for all fields of a form together, without the file."""


class UploadedFile(NamedTuple):
    """A file in a form."""

    name: str
    data: bytes


def read_form(kind: type[Body], data: bytes, content_type: str) -> Body:
    """Return the body of a request from its form.

    A field with several values occurs several times, as `name`, `name[]` or `name[0]`. The fields
    of an object are `name[field]`.

    Args:
        kind: class of the body; its field `file` is an `UploadedFile`.
        data: the whole form.
        content_type: Content-Type header of the request, with the boundary of the parts.

    Raises:
        RequestError: the data is not a complete form, has too many or too large parts, or the file
            is missing.
        RequestValidationError: a field has a wrong value.
    """
    parts = _read_parts(data, content_type)
    lists = {field.alias for field in kind.model_fields.values() if field.alias is not None}
    given: dict[str, Any] = {name: dict(fields) for name, fields in parts.objects.items()}
    for name, values in parts.values.items():
        if f"{name}[]" in lists:
            given[f"{name}[]"] = values
        elif name not in kind.model_fields:
            given[name] = values[0] if len(values) == 1 else values
        elif len(values) > 1:
            raise RequestError(f"{name} must be sent once, got {len(values)} parts", param=name)
        else:
            given[name] = values[0]
        is_file = any(isinstance(value, UploadedFile) for value in values)
        if is_file and name in kind.model_fields and name != FILE:
            raise RequestError(f"{name} must be a string, got an uploaded file", param=name)
    if not isinstance(given.get(FILE), UploadedFile):
        what = "a string" if FILE in given else "no such part"
        raise RequestError(f"{FILE} must be an uploaded file, got {what}", param=FILE)
    try:
        return kind(**given)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _read_parts(data: bytes, content_type: str) -> "_Parts":
    """Return the values of all parts."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import FormParser, parse_options_header
    except ImportError:
        raise RequestError(
            "uploads need python-multipart, which is not installed: pip install 'vllm[audio]'"
        ) from None
    type_, options = parse_options_header(content_type)
    if type_ != b"multipart/form-data" or not options.get(b"boundary"):
        raise RequestError(
            f"Content-Type must be multipart/form-data with a boundary, got {content_type!r:.100}"
        )
    parts = _Parts()
    try:
        parser = FormParser(
            "multipart/form-data",
            parts.add_field,
            parts.add_file,
            parts.end,
            boundary=options[b"boundary"],
            config={
                # Files are kept in memory and not written to disk.
                "MAX_MEMORY_FILE_SIZE": len(data) + 1,
                "UPLOAD_ERROR_ON_BAD_CTE": True,  # do not log bytes of the client
            },
        )
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise RequestError(f"the form cannot be read: {str(error)[:200]}") from None
    if not parts.is_complete:
        raise RequestError("the form must end with its boundary, got an incomplete one")
    return parts


class _Parts:
    """Collects the parts of a form; the multipart parser calls its methods.

    Attributes:
        values: values by field name, without `[]` or an index after the name.
        objects: fields of objects, by the name of the object.
        is_complete: whether the end of the form was read.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = defaultdict(list)
        self.objects: dict[str, dict[str, Any]] = defaultdict(dict)
        self.is_complete = False
        self._num_parts = 0
        self._num_bytes = 0

    def add_field(self, field: Any) -> None:
        value = field.value or b""
        self._num_bytes += len(value)
        if self._num_bytes > _MAX_TEXT_BYTES:
            raise RequestError(
                f"the fields of the form must have at most {_MAX_TEXT_BYTES} bytes in total"
            )
        self._add(field.field_name, _text_of(value))

    def add_file(self, file: Any) -> None:
        file.file_object.seek(0)
        name = _text_of(file.file_name or b"")
        self._add(file.field_name, UploadedFile(name, file.file_object.read()))

    def end(self) -> None:
        self.is_complete = True

    def _add(self, name: bytes | None, value: Any) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise RequestError(f"the form must have at most {_MAX_PARTS} parts, got more")
        field, _, key = _text_of(name or b"").partition("[")
        key = key.rstrip("]")
        if not key or key.isdigit():
            self.values[field].append(value)
        else:
            self.objects[field][key] = value


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError("the names and values of the form must be UTF-8") from None
