"""Create readable error messages for fields that accept several types.

For a union, pydantic reports an error per type, with internal names such as
`prompt.list[constrained-int].0`. A field annotated with `accepts` reports one error:

    stop: Annotated[str | ListOf[str] | None, accepts("a string or a list of strings")]

    stop must be a string or a list of strings; entry 1 is null
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from vllm.utils.text.json_words import show_value


def accepts(text: str) -> WrapValidator:
    """Annotate a union with a description of the accepted values, for its error message.

    The message says what is accepted and which part of the value is wrong, judged by the type that
    accepts most of the value.
    """

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            path, best = _most_telling(error.errors(include_url=False))
            raise PydanticCustomError(
                best["type"],
                "must be {accepted}{detail}",
                {"accepted": text, "detail": _describe(path, best)},
            ) from None

    return WrapValidator(check)


def _most_telling(errors: Sequence[Any]) -> tuple[Sequence[int | str], Any]:
    """Return the path and the error of the type that accepts most of the value before it fails.

    If several types are objects, it is the one whose name is in the value.
    """
    # The first part of a location is the type that pydantic tried; the rest is a path.
    wrong_names = {each["loc"][0] for each in errors if each["loc"] and _is_of_name(each)}
    found = [(each["loc"][1:], each) for each in errors]

    def rank(pair: tuple[Sequence[int | str], Any]) -> tuple[bool, list[int]]:
        path, each = pair
        is_named = not each["loc"] or each["loc"][0] not in wrong_names
        return is_named, [part if isinstance(part, int) else 0 for part in path]

    return max(found, key=rank)


def _is_of_name(error: Any) -> bool:
    """Return whether pydantic rejected one type of a union only because a key such as `type` holds
    the name of a different type.
    """
    path = error["loc"][1:]
    return error["type"] == "literal_error" and len(path) == 1 and isinstance(path[0], str)


def _describe(path: Sequence[int | str], error: Any) -> str:
    """Describe the wrong part of a value, as the end of a sentence: ", got 3" for the whole value,
    "; entry 3 is -1" or "; the name of its function is 7" for a part.
    """
    place = ""
    for part in path:
        if isinstance(part, int):
            place = f"entry {part} of {place}" if place else f"entry {part}"
        else:
            place = f"the {part} of {place}" if place else f"its {part}"
    if error["type"] == "missing":
        return f"; {place} is missing"
    shown = show_value(error["input"])
    return f"; {place} is {shown}" if place else f", got {shown}"
