"""Format timed text as subtitles: SubRip (SRT) and WebVTT."""

from collections.abc import Iterable
from typing import NamedTuple


class TimedText(NamedTuple):
    """Text, and the times between which it is spoken."""

    start_s: float
    end_s: float
    text: str


def srt(texts: Iterable[TimedText]) -> str:
    r"""Return the texts as a SubRip file.

    >>> srt([TimedText(0.0, 61.5, " Hello.")])
    '1\n00:00:00,000 --> 00:01:01,500\nHello.\n\n'
    """
    return "".join(
        f"{number}\n{_time(each.start_s, ',')} --> {_time(each.end_s, ',')}\n"
        f"{_one_line(each.text).replace('-->', '->')}\n\n"
        for number, each in enumerate(texts, 1)
    )


def vtt(texts: Iterable[TimedText]) -> str:
    r"""Return the texts as a WebVTT file.

    >>> vtt([TimedText(3600.0, 3601.25, " a < b")])
    'WEBVTT\n\n01:00:00.000 --> 01:00:01.250\na &lt; b\n\n'
    """
    cues = (
        f"{_time(each.start_s, '.')} --> {_time(each.end_s, '.')}\n"
        f"{_escaped(_one_line(each.text))}\n\n"
        for each in texts
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, mark: str) -> str:
    """Format a time as hours, minutes, seconds and milliseconds."""
    total, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{mark}{thousandths:03}"


def _one_line(text: str) -> str:
    """Return the text without line breaks, because an empty line would end its subtitle."""
    return " ".join(text.split())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
