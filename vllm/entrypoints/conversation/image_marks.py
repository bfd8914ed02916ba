"""Keeps images and the text of users apart while a template renders a conversation.

A user's text may have the text of the token of an image, such as `<image>`, and must stay text.
So a character that occurs nowhere in the conversation is put into it before rendering, and taken
out afterwards. Images in strings are such characters around their index, until the end.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm.entrypoints.conversation.media import ImageText, is_image
from vllm.entrypoints.conversation.messages import Content, Message
from vllm.entrypoints.conversation.rules import as_parts

_PRIVATE_USE = "\ue001-\uf8ff"
"""Characters without a meaning. The one before them marks the end of a continued message."""


class ImageMarks:
    """Marks the images and the placeholders of users in one conversation.

    Args:
        image: the texts of an image.
        given: all values from the client that a template may show.

    Raises:
        ValueError: no character is left for marks.
    """

    def __init__(self, image: ImageText, given: Sequence[Any]) -> None:
        self._image = image
        texts = list(_strings(given))
        self._mark = _unused_char(texts)
        self._has_placeholder = any(image.placeholder in text for text in texts)
        self._literal = image.placeholder[0] + self._mark + image.placeholder[1:]

    def with_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, in which the parts of images have a text."""
        return [_map_images(message, self._with_text) for message in messages]

    def _with_text(self, part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "text": f"{self._mark}{part['index']}{self._mark}"}

    def order_of(self, messages: Sequence[Message]) -> list[int]:
        """Return the indices of the images, in the order of fitted messages."""
        found: list[int] = []
        for message in messages:
            content: Content = message["content"]
            for part in as_parts(content):
                if is_image(part):
                    found.append(part["index"])
                else:
                    pattern = f"{self._mark}([0-9]+){self._mark}"
                    found += map(int, re.findall(pattern, part["text"]))
        return found

    def protect(self, value: Any) -> Any:
        """Return a value of JSON in which no text has the placeholder."""
        if not self._has_placeholder:
            return value
        if isinstance(value, str):
            return value.replace(self._image.placeholder, self._literal)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(each) for each in value]
        return value

    def remove(self, text: str) -> tuple[str, list[int], int]:
        """Take the marks out of a rendered text.

        Returns:
            The text; the indices of the placeholders, of all in it, that a user has written; and
            the number of the others.
        """
        image, literals, count = self._image, list[int](), 0

        def read(found: re.Match[str]) -> str:
            nonlocal count
            if found[0] == self._literal:
                literals.append(count)
            count += 1
            return image.text if found[1] is not None else image.placeholder

        placeholder, literal = map(re.escape, (image.placeholder, self._literal))
        pattern = f"{self._mark}([0-9]+){self._mark}|{placeholder}|{literal}"
        return re.sub(pattern, read, text).replace(self._mark, ""), literals, count - len(literals)


def _unused_char(texts: Sequence[str]) -> str:
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(re.findall(f"[{_PRIVATE_USE}]", text))
    for code in range(ord(_PRIVATE_USE[0]), ord(_PRIVATE_USE[-1]) + 1):
        if chr(code) not in used:
            return chr(code)
    raise ValueError("the conversation has all characters that are reserved for private use")


def without_index(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with parts of images as templates know them."""
    return [_map_images(message, lambda part: {"type": part["type"]}) for message in messages]


def _map_images(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    content = message["content"]
    if isinstance(content, str) or not any(map(is_image, content)):
        return message
    return {**message, "content": [change(p) if is_image(p) else p for p in content]}


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)
