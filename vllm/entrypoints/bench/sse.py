"""Server-sent events out of the pieces that a connection gives. Knows no HTTP and no JSON."""

import re

_END = re.compile(rb"\r?\n\r?\n")
_MAX_EVENT_BYTES = 16 << 20


class SseParser:
    """Joins pieces of a body into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The `data` of every event that this piece completes; comments and names are left out.

        Raises:
            ValueError: an event does not end.
        """
        text = self._rest + piece if self._rest else piece
        # Nearly every piece is one event with one line.
        if text.endswith(b"\n\n") and text.startswith(b"data: ") and text.count(b"\n") == 2:
            self._rest = b""
            return [text[6:-2]]
        *events, self._rest = _END.split(text)
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None
