"""Keep media apart from the text of users while a template renders a conversation.

A user's text may contain the placeholder of an item, such as `<image>`, and must remain text. So a
character that occurs nowhere in the conversation is inserted into such text before rendering, and
removed afterwards. Media in strings are represented by such characters around their index until
then.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm.entrypoints.conversation.media import MediaText, is_media
from vllm.entrypoints.conversation.messages import Content, Message
from vllm.entrypoints.conversation.rules import as_parts
from vllm.entrypoints.conversation.template import media_of_template

_PRIVATE_USE = "\ue001-\uf8ff"
"""Characters without a meaning. The one before them marks the end of a continued message."""


class MediaMarks:
    """Marks the media and the placeholders that users wrote in one conversation.

    Args:
        texts: placeholder of an item, by modality.
        given: all values from the client that a template may show.

    Raises:
        ValueError: no unused character is left for marks.
    """

    def __init__(self, texts: Mapping[str, MediaText], given: Sequence[Any]) -> None:
        self._texts = texts
        strings = list(_strings(given))
        self._mark = _unused_char(strings)
        self._literals = {
            each.placeholder: each.placeholder[0] + self._mark + each.placeholder[1:]
            for each in texts.values()
            if any(each.placeholder in text for text in strings)
        }
        """Placeholders that the client has written -> how they are protected."""
        self._modalities: dict[int, str] = {}
        """Index of an item -> its modality."""

    def with_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, in which the media parts also have a text."""
        return [_map_media(message, self._with_text) for message in messages]

    def _with_text(self, part: dict[str, Any]) -> dict[str, Any]:
        self._modalities[part["index"]] = part["type"]
        return {**part, "text": f"{self._mark}{part['index']}{self._mark}"}

    def order_of(self, messages: Sequence[Message]) -> list[int]:
        """Return the indices of the items in the order of the fitted messages."""
        found: list[int] = []
        for message in messages:
            content: Content = message["content"]
            for part in as_parts(content):
                if is_media(part):
                    found.append(part["index"])
                else:
                    pattern = f"{self._mark}([0-9]+){self._mark}"
                    found += map(int, re.findall(pattern, part["text"]))
        return found

    def count(self, indices: Sequence[int]) -> Counter[str]:
        """Return the number of items of each modality among the given indices."""
        return Counter(self._modalities[index] for index in indices)

    def protect(self, value: Any) -> Any:
        """Return a JSON value in which no string contains a placeholder."""
        if not self._literals:
            return value
        if isinstance(value, str):
            for placeholder, literal in self._literals.items():
                value = value.replace(placeholder, literal)
            return value
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(each) for each in value]
        return value

    def remove(self, text: str) -> tuple[str, list[int], Counter[str]]:
        """Remove the marks from a rendered text.

        Returns:
            The text; the indices of the placeholders that a user has written, among all
            placeholders; and the number of the other placeholders by modality.
        """
        literals, counts = list[int](), Counter[str]()
        written = {literal: placeholder for placeholder, literal in self._literals.items()}
        modality_of = {each.placeholder: kind for kind, each in self._texts.items()}

        def read(found: re.Match[str]) -> str:
            if found[0] in written:
                literals.append(len(literals) + counts.total())
                return written[found[0]]
            is_item = found[1] is not None
            kind = self._modalities[int(found[1])] if is_item else modality_of[found[0]]
            counts[kind] += 1
            return self._texts[kind].text if is_item else found[0]

        known = sorted((*written, *modality_of), key=len, reverse=True)
        pattern = "|".join([f"{self._mark}([0-9]+){self._mark}", *map(re.escape, known)])
        return re.sub(pattern, read, text).replace(self._mark, ""), literals, counts


def _unused_char(texts: Sequence[str]) -> str:
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(re.findall(f"[{_PRIVATE_USE}]", text))
    for code in range(ord(_PRIVATE_USE[0]), ord(_PRIVATE_USE[-1]) + 1):
        if chr(code) not in used:
            return chr(code)
    raise ValueError(
        "the conversation has every character of Unicode's private use area (U+E001 to U+F8FF), "
        "and the server needs an unused one. Remove some of them"
    )


def without_index(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with media parts in the form that templates expect."""
    return [_map_media(each, lambda part: media_of_template(part["type"])) for each in messages]


def _map_media(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    content = message["content"]
    if isinstance(content, str) or not any(map(is_media, content)):
        return message
    return {**message, "content": [change(p) if is_media(p) else p for p in content]}


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)
