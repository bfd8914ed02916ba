"""Read the events of a stream."""

import json
from typing import Any


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Return the data of all events of a stream, which must end as the OpenAI API specifies."""
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Return the content of one choice, joined from its deltas."""
    pieces = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces)
