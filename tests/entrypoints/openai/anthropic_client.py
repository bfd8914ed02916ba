"""Read streams as the official client of Anthropic does."""

from collections.abc import Iterable
from functools import cache
from typing import Any


def accumulate(events: Iterable[dict[str, Any]]) -> Any:
    """Return the message that the official client builds from a stream."""
    # Imported late: this takes over a second, and test processes import all tests.
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot, buffers = None, {}
    for event in events:
        if event["type"] != "ping":
            parsed = _event_type().validate_python(event)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot


@cache
def _event_type() -> Any:
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(RawMessageStreamEvent)
