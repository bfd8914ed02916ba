"""Limit the lists and texts in a request, as the class of its body declares.

Every field with a list, or with texts to search for, has an entry in `LIMITS` of its class, which
names the flag of its limit. Limits are checked before a body is validated, so that refusing it is
cheap. Bodies also have limits in bytes and in JSON values.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import RequestError
from vllm.utils.arguments import flag_of


def count_entries(value: Any) -> int:
    """Count the entries of a list or an object; any other value counts as one."""
    return len(value) if isinstance(value, (list, dict)) else 1


def read_number(value: Any) -> int:
    """Convert a value to an integer as the validation does, which also accepts 3.0, "3" and " 3.0
    ".
    """
    if isinstance(value, int):
        return value
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0  # infinite or NaN


def longest_text(value: Any) -> int:
    """Return the number of characters of the longest text."""
    texts = value if isinstance(value, list) else [value]
    return max((len(text) for text in texts if isinstance(text, str)), default=0)


def count_prompts(value: Any) -> int:
    """Count the prompts in a value. A list of integers is one prompt."""
    if not isinstance(value, list) or (value and isinstance(value[0], int)):
        return 1
    return len(value)


@dataclass(frozen=True)
class Limit:
    """The limit of one field.

    Attributes:
        setting: field of `ServerArgs` with the limit.
        unit: name of the counted things, in the plural.
        count: returns the count for a JSON value of any type; wrong types count as 0.
    """

    setting: str
    unit: str
    count: Callable[[Any], int] = count_entries


Limits = Mapping[str, tuple[Limit, ...]]
"""Field -> its limits."""

OUTPUTS = (Limit("max_n", "outputs", read_number),)
STOP = (
    Limit("max_stop_strings", "strings"),
    Limit("max_word_chars", "characters in a string", longest_text),
)
PROMPTS = (Limit("max_batch_prompts", "prompts", count_prompts),)
TEXTS = (Limit("max_batch_prompts", "texts"),)
DOCUMENTS = (Limit("max_batch_prompts", "documents"),)
MESSAGES = (Limit("max_messages", "messages"),)
TOOLS = (Limit("max_tools", "tools"),)


class LimitedBody:
    """A body whose class declares how long its lists and texts may be."""

    LIMITS: ClassVar[Limits] = {}
    """Limits of the fields of this class; it has the limits of its base classes as well."""

    @classmethod
    def check_totals(cls, body: Mapping[str, Any], args: ServerArgs) -> None:
        """Refuse fields that are within their own limits but exceed a common limit together.

        Args:
            body: parsed JSON; need not be valid.
            args: arguments of the server.

        Raises:
            RequestError: names the field, the counts, the limit, and the flag.
        """


@functools.cache
def limits_of(kind: type[LimitedBody]) -> Limits:
    """Return the field limits that a body class and its base classes declare."""
    found: dict[str, tuple[Limit, ...]] = {}
    for base in reversed(kind.__mro__):
        found.update(vars(base).get("LIMITS", {}))
    return found


def check_limits(kind: type[LimitedBody], body: Mapping[str, Any], args: ServerArgs) -> None:
    """Refuse a body that exceeds a limit of the server.

    Args:
        kind: class of the body.
        body: parsed JSON; need not be valid.
        args: arguments of the server.

    Raises:
        RequestError: names the field, its count, the limit, and the flag.
    """
    for name, limits in limits_of(kind).items():  # type: ignore[arg-type]
        value = body.get(name)
        if value is None:
            continue
        for limit in limits:
            count, most = limit.count(value), getattr(args, limit.setting)
            if count > most:
                raise RequestError(
                    f"{name}: {count} {limit.unit} are more than this server accepts, at most "
                    f"{most} ({flag_of(limit.setting)}). Use fewer.",
                    param=name,
                )
    kind.check_totals(body, args)


def check_num_values(body: bytes, args: ServerArgs) -> None:
    """Refuse a body with too many JSON values before it is parsed.

    Raises:
        RequestError: it has too many values; names the count.
    """
    most = args.max_request_values
    max_names = args.max_request_names
    # An upper bound: it also counts these characters inside strings.
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{") + 1
    if num_values <= most and body.count(b":") <= max_names:
        return
    num_values, num_names = count_values(body)
    if num_values > most:
        raise RequestError(
            f"the body has {num_values} JSON values (numbers, strings, lists and objects), more "
            f"than the {most} that this server accepts (--max-request-values). Send less in one "
            "request."
        )
    if num_names > max_names:
        raise RequestError(
            f"the JSON objects of the body have {num_names} members, more than the {max_names} "
            "that this server accepts (--max-request-names). Send less in one request."
        )


def count_values(body: bytes) -> tuple[int, int]:
    r"""Return the number of values in a JSON text (including lists and objects), and of member
    names.

    An empty list or object counts as two values.

    >>> count_values(b'{"a": [1, 2, "b, \\", c"], "d": {}}')
    (7, 2)
    """
    characters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(characters == ord('"'), dtype=np.uint8) & 1 == 0
    is_value = np.isin(characters, np.frombuffer(b",[{", np.uint8))
    num_names = np.count_nonzero((characters == ord(":")) & is_outside)
    return int(np.count_nonzero(is_value & is_outside)) + 1, int(num_names)
