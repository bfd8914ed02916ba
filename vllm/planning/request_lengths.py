"""Reads lengths of requests from a file: CSV with a header, or JSON Lines."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from vllm.errors import ConfigError

MAX_REQUESTS = 20_000
"""Requests that are replayed; of a longer file an even sample."""
MAX_LINES = 10_000_000
"""Lines that are read at most."""
_MAX_TOKENS = 10**8

_INPUT = (
    *("input_tokens", "input_length", "input_len", "prompt_tokens", "request tokens"),
    *("contexttokens", "input"),
)
_OUTPUT = (
    *("output_tokens", "output_length", "output_len", "completion_tokens", "response tokens"),
    *("generatedtokens", "output"),
)
_SECONDS_OF_TIME = {
    "timestamp_ms": 1e-3,
    "timestamp": 1.0,
    "timestamp_s": 1.0,
    "time": 1.0,
    "arrival": 1.0,
}


@dataclass(frozen=True)
class RequestLengths:
    """Lengths and arrival times of requests, in the order of their times."""

    num_inputs: npt.NDArray[np.int64]
    """[n] tokens of each prompt."""
    num_outputs: npt.NDArray[np.int64]
    """[n] tokens that are generated for each."""
    times: npt.NDArray[np.float64] | None
    """[n] seconds since the first request; None: the file has no times."""
    notes: tuple[str, ...] = ()
    """Sentences about data that was left out."""

    def __len__(self) -> int:
        return len(self.num_inputs)

    @property
    def rate(self) -> float | None:
        """Mean requests per second; None if there are no times, or all are equal."""
        if self.times is None or len(self) < 2 or not self.times[-1] > self.times[0]:
            return None
        return float((len(self) - 1) / (self.times[-1] - self.times[0]))

    def at_rate(self, rate: float) -> "RequestLengths":
        """Return the same requests with an arrival rate of `rate` per second.

        The times are scaled. Without times, arrivals are a Poisson process.
        """
        if self.times is None or self.rate is None:
            gaps = np.random.default_rng(0).exponential(1 / rate, len(self))
            times = np.cumsum(gaps) - gaps[0]
        else:
            times = self.times * (self.rate / rate)
        return RequestLengths(self.num_inputs, self.num_outputs, times, self.notes)

    def part(self, index: slice) -> "RequestLengths":
        """Return the requests of a slice."""
        times = None if self.times is None else self.times[index]
        return RequestLengths(self.num_inputs[index], self.num_outputs[index], times, self.notes)


def is_recorded(path: Path) -> bool:
    """Return whether a file contains recorded traffic instead of lengths of requests.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # reading may never end
        raise _unreadable(path, "it is a device or a pipe, not a file")
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            beginning = file.read(200)
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    # Any of the first keys, because another program may have sorted them.
    return any(f'"{key}"' in beginning for key in ("format", "cells", "columns"))


def _unreadable(path: Path, reason: str | None) -> ConfigError:
    return ConfigError(
        f"--traffic {path} cannot be read: {reason}. Name a file that --record-traffic has "
        f"written, or a file with lengths of requests"
    )


def read_lengths(path: Path, max_requests: int = MAX_REQUESTS) -> RequestLengths:
    """Read lengths of requests from a file.

    Args:
        path: path of a file with the columns or keys input_tokens, output_tokens and, if it has
            times, timestamp; other usual names are accepted as well.
        max_requests: maximum number of requests; of a longer file every n-th request is used, and
            `notes` says so. The lengths of the others are not checked.

    Raises:
        ConfigError: the file cannot be read, has no request, or has a bad line, which is named.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(file, str(path), max_requests)
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "it is not text in UTF-8") from None


def _lines_of(
    file: TextIO, source: str
) -> tuple[Iterator[tuple[int, Any]], Callable[[Any, str], Mapping[str, Any]]]:
    """Return the numbered lines of a file, and the function that reads the fields of one line."""
    if _is_json(file):
        return _json_lines(file, source), _json_record
    return _csv_lines(file, source)


def _read(file: TextIO, source: str, max_requests: int) -> RequestLengths:
    lines, parse = _lines_of(file, source)
    rows: list[tuple[int, int, float | None]] = []
    stride = count = 1
    for count, (number, line) in enumerate(islice(lines, MAX_LINES), start=1):
        if (count - 1) % stride:
            continue  # without parsing it, which takes most of the time
        where = f"{source}, line {number}"
        rows.append(_read_request(parse(line, where), where))
        if len(rows) == 2 * max_requests:  # from here on, keep only every second request
            rows, stride = rows[::2], stride * 2
    if not rows:
        raise ConfigError(
            f"--traffic {source} has no request. Each line needs input and output tokens: CSV with "
            f"the header input_tokens,output_tokens,timestamp, or JSON Lines with these keys."
        )
    step = -(-len(rows) // max_requests)
    rows = rows[::step]
    notes = []
    if stride * step > 1:
        notes.append(f"{source}: {len(rows):,} of {count:,} requests are used, evenly sampled")
    if next(lines, None) is not None:
        notes.append(f"{source}: only the first {MAX_LINES:,} lines are read")
    times = None
    num_timed = sum(row[2] is not None for row in rows)
    if 0 < num_timed < len(rows):
        notes.append(
            f"{source}: times are left out, as {len(rows) - num_timed:,} of {len(rows):,} requests "
            f"have none"
        )
    if num_timed == len(rows):
        rows.sort(key=lambda row: row[2] or 0.0)
        # Shorten the times, because fewer requests in the same time would be a lower rate.
        found = np.array([row[2] for row in rows], np.float64)
        times = (found - found[0]) / (stride * step)
    columns = np.array([row[:2] for row in rows], np.int64)
    return RequestLengths(columns[:, 0], columns[:, 1], times, tuple(notes))


def _is_json(file: TextIO) -> bool:
    first = file.readline().lstrip("\ufeff \t")
    file.seek(0)
    return first.startswith("{")


def _json_lines(file: TextIO, source: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty.

    Raises:
        ConfigError: a line does not end like a JSON object.
    """
    for number, line in enumerate(file, start=1):
        text = line.strip("\ufeff \t\r\n")
        if not text:
            continue
        if text[-1] != "}":
            raise ConfigError(
                f"--traffic {source}, line {number}: it is not a JSON object, or is cut off"
            )
        yield number, text


def _json_record(text: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--traffic {where}: it is not JSON, or is cut off ({error})") from None
    if not isinstance(record, dict):
        raise ConfigError(f"--traffic {where}: it is not a JSON object")
    return {str(key).lower(): value for key, value in record.items()}


def _csv_lines(
    file: TextIO, source: str
) -> tuple[Iterator[tuple[int, list[str]]], Callable[[list[str], str], Mapping[str, Any]]]:
    """Return number and values of each line, and a function that names the values of a line.

    Raises:
        ConfigError: the header does not name the lengths. While the lines are read: a line is not
            CSV, or has another number of values.
    """
    first = file.readline()
    file.seek(0)
    # Spreadsheets write semicolons or tabs, depending on the language.
    reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
    try:
        header = [name.strip().lower().lstrip("\ufeff") for name in next(reader, [])]
    except csv.Error as error:
        raise _not_csv(source, reader.line_num, error) from None
    if not (set(header) & set(_INPUT) and set(header) & set(_OUTPUT)):
        raise ConfigError(
            f"--traffic {source} is not a CSV file with lengths of requests: its first line "
            "must name the columns input_tokens and output_tokens, or each line must be a "
            f"JSON object, got {','.join(header)[:80]!r}"
        )
    size = len(header)

    def lines() -> Iterator[tuple[int, list[str]]]:
        try:
            for values in reader:
                if not values:
                    continue
                if len(values) != size:
                    raise ConfigError(
                        f"--traffic {source}, line {reader.line_num}: it must have {size} "
                        f"values, got {len(values)}; is the file cut off?"
                    )
                yield reader.line_num, values
        except csv.Error as error:
            raise _not_csv(source, reader.line_num, error) from None

    return lines(), lambda values, where: dict(zip(header, values, strict=True))


def _not_csv(source: str, number: int, error: csv.Error) -> ConfigError:
    return ConfigError(f"--traffic {source}, line {number}: it is not CSV ({error})")


def _read_request(record: Mapping[str, Any], where: str) -> tuple[int, int, float | None]:
    num_input = _tokens(record, _INPUT, where, 1)
    num_output = _tokens(record, _OUTPUT, where, 0)
    for name, factor in _SECONDS_OF_TIME.items():
        if name in record:
            return num_input, num_output, _seconds(record[name], factor, f"{where}: {name}")
    return num_input, num_output, None


def _tokens(record: Mapping[str, Any], names: tuple[str, ...], where: str, least: int) -> int:
    for name in names:
        if name in record:
            value = _number(record[name])
            if value is None or value != int(value) or not least <= value <= _MAX_TOKENS:
                raise ConfigError(
                    f"--traffic {where}: {name} must be an integer between {least} and "
                    f"{_MAX_TOKENS}, got {str(record[name])[:40]!r}"
                )
            return int(value)
    raise ConfigError(f"--traffic {where}: it must have {names[0]}")


def _seconds(value: Any, factor: float, where: str) -> float:
    number = _number(value)
    if number is not None:
        return number * factor
    try:
        # Cut to microseconds: some traces have more decimals than older versions of Python accept.
        return datetime.fromisoformat(str(value).strip()[:26]).timestamp()
    except ValueError:
        raise ConfigError(
            f"--traffic {where} must be a number or a date such as 2023-11-16 18:15:46.68, got "
            f"{str(value)[:40]!r}"
        ) from None


def _number(value: Any) -> float | None:
    """Return the value as a finite float, or None if it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
