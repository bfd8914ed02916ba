"""Counts of the sizes that forward passes needed, before they were padded to a bucket.

The table has a limited size. Sizes are rounded up by at most 1/16, so that similar batches share an
entry; sizes up to 32 are exact. It knows no text, no requests and no devices.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.step_limits import StepLimits
from vllm.errors import ConfigError
from vllm.utils.files.whole_file import write_whole

MAX_CELLS = 4096
"""Maximum number of different shapes in a table."""

ROUNDING = 17 / 16
"""A rounded size is at most so many times the size."""

Shapes = npt.NDArray[np.int64]
"""[n, 4]: phase, batch, query length and blocks of each shape."""
Weights = npt.NDArray[np.float64]

_Key = tuple[int, int, int, int]

_FORMAT, _VERSION = "vllm traffic", 1
_MAX_SIZE = 2**31 - 1
_MAX_COUNT = 10**15
_EVEN_STEPS = 12
"""Sizes of each dimension in an even traffic, at most."""


def rounded(phase: int, batch: int, query_len: int, blocks: int) -> tuple[int, int, int, int]:
    """Return phase and rounded sizes: the key of the entry that counts a forward pass."""
    if (shift := batch.bit_length() - 5) > 0:
        batch = -(-batch >> shift) << shift
    if (shift := query_len.bit_length() - 5) > 0:
        query_len = -(-query_len >> shift) << shift
    if (shift := blocks.bit_length() - 5) > 0:
        blocks = -(-blocks >> shift) << shift
    return phase, batch, query_len, blocks


def rounded_sizes(sizes: Shapes) -> Shapes:
    """Round an array of sizes as `rounded` does."""
    shift = np.maximum(np.frexp(sizes)[1] - 5, 0)
    found: Shapes = -(-sizes >> shift) << shift
    return found


class TrafficTable:
    """Counts of forward passes by the shape that they needed.

    If there is no space for another shape, the rarest quarter of the shapes is dropped, so a table
    adapts to its traffic. Single-threaded.

    Args:
        block_size: tokens of a KV block.

    Attributes:
        num_forgotten: forward passes whose shapes were dropped.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_forgotten = 0.0
        self._cells: dict[_Key, list[float]] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrafficTable):
            return NotImplemented
        return (self.block_size, self._cells) == (other.block_size, other._cells)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(
        self,
        phase: int,
        batch: int,
        query_len: int,
        blocks: int,
        seconds: float = 0.0,
        count: float = 1.0,
    ) -> None:
        """Count forward passes of one shape. Takes a microsecond.

        Args:
            phase: a `Phase`.
            batch: sequences, before padding.
            query_len: tokens of the longest, before padding.
            blocks: KV blocks, before padding.
            seconds: time that they took together; 0: not known.
            count: number of forward passes.
        """
        key = rounded(phase, batch, query_len, blocks)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= MAX_CELLS:
                self._forget_rarest()
            cell = self._cells[key] = [0.0, 0.0]
        cell[0] += count
        cell[1] += seconds

    def merge(self, other: "TrafficTable") -> None:
        """Add the counts of another table with the same block size.

        Raises:
            ConfigError: its block size is different.
        """
        if other.block_size != self.block_size:
            raise ConfigError(
                f"cannot add traffic that was recorded with blocks of {other.block_size} tokens "
                f"to traffic with blocks of {self.block_size} tokens. Record it again with "
                f"--block-size {self.block_size}."
            )
        self.num_forgotten += other.num_forgotten
        for key, (count, seconds) in list(other._cells.items()):
            self.add(*key, seconds, count)

    def copy(self) -> "TrafficTable":
        """Return an independent copy of the table."""
        table = TrafficTable(self.block_size)
        table.num_forgotten = self.num_forgotten
        table._cells = {key: list(cell) for key, cell in self._cells.items()}
        return table

    def since(self, earlier: "TrafficTable") -> "TrafficTable":
        """Return a table with the counts since an earlier copy of this one.

        Shapes that were dropped since then are missing.
        """
        table = TrafficTable(self.block_size)
        for key, (count, seconds) in list(self._cells.items()):
            before = earlier._cells.get(key, (0.0, 0.0))
            if count > before[0]:
                table._cells[key] = [count - before[0], max(0.0, seconds - before[1])]
        return table

    # ---- what it has ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Bucket, float, float]]:
        """Yield shape, count and seconds of each entry, ascending by shape."""
        for (phase, *sizes), (count, seconds) in sorted(self._cells.items()):
            yield Bucket(Phase(phase), *sizes), count, seconds

    @property
    def num_launches(self) -> float:
        """Number of forward passes that are counted."""
        return math.fsum(count for count, _ in self._cells.values())

    def shapes(self, phase: Phase | None = None) -> tuple[Shapes, Weights]:
        """Return the shapes [n, 4], ascending, and the count [n] of each.

        Args:
            phase: phase of the shapes; None: both.
        """
        found = [key for key in sorted(self._cells) if phase is None or key[0] == phase]
        shapes = np.array(found, np.int64).reshape(-1, 4)
        return shapes, np.array([self._cells[key][0] for key in found], np.float64)

    def shapes_within(self, limits: StepLimits, phase: Phase) -> tuple[Shapes, Weights]:
        """Return shapes and counts like `shapes`, with sizes limited to what is possible.

        Rounded sizes may exceed the limits, and so may the traffic of an engine with other limits.
        """
        shapes, weights = self.shapes(phase)
        rows = [_within(shape, limits) for shape in shapes.tolist()]
        return np.array(rows, np.int64).reshape(-1, 4), weights

    def sizes(self, phase: Phase) -> dict[str, dict[int, float]]:
        """Return for each dimension size -> count, ascending."""
        shapes, weights = self.shapes(phase)
        found: dict[str, dict[int, float]] = {}
        for column, name in enumerate(("batch", "query_len", "blocks"), start=1):
            values, index = np.unique(shapes[:, column], return_inverse=True)
            counts = np.bincount(index.reshape(-1), weights, minlength=len(values))
            found[name] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        return found

    # ---- files ----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the content of a traffic file."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "block_size": self.block_size,
            "num_forgotten": self.num_forgotten,
            "columns": ["phase", "batch", "query_len", "blocks", "count", "seconds"],
            "cells": [
                [str(Phase(phase)), *sizes, count, round(seconds, 6)]
                for (phase, *sizes), (count, seconds) in sorted(self._cells.items())
            ],
        }

    @classmethod
    def from_json(cls, content: object, source: str) -> "TrafficTable":
        """Make the table from the content of a traffic file.

        Args:
            content: content of the file.
            source: name of the file, for errors.

        Raises:
            ConfigError: the content is damaged, of another kind, or of a newer version.
        """
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ConfigError(
                f"{source} is not a file of recorded traffic: its field 'format' must be "
                f"{_FORMAT!r}. Record one with --record-traffic."
            )
        if content.get("version") != _VERSION:
            raise ConfigError(
                f"{source}: the version of recorded traffic must be {_VERSION}, got "
                f"{content.get('version')!r}. Record it again with --record-traffic."
            )
        block_size, cells = content.get("block_size"), content.get("cells")
        if not isinstance(block_size, int) or not _is_size(block_size, 1):
            raise _damaged(source, f"its block size is {block_size!r}, not a positive integer")
        if not isinstance(cells, list):
            raise _damaged(source, "it has no list 'cells'")
        table = cls(block_size)
        for number, cell in enumerate(cells):
            key, count, seconds = _read_cell(cell, f"cell {number}", source)
            table.add(*key, seconds, count)
        forgotten = content.get("num_forgotten", 0)
        if not _is_amount(forgotten):
            raise _damaged(source, f"num_forgotten is {forgotten!r}, not a count")
        table.num_forgotten += forgotten
        return table

    def save(self, path: Path, more: Mapping[str, Any] | None = None) -> None:
        """Write the table to a file and rename it, so that readers see either the old or the new
        one.

        Args:
            path: path of the file.
            more: further fields, which `load` does not read.

        Raises:
            OSError: the folder cannot be written, or is full.
        """
        content = self.to_json() | dict(more or {})
        write_whole(path, f"{json.dumps(content)}\n".encode())

    @classmethod
    def load(cls, path: Path, block_size: int | None = None) -> "TrafficTable":
        """Read a file of recorded traffic.

        Args:
            path: path of the file.
            block_size: tokens per block of the engine that will use it; None: any.

        Raises:
            ConfigError: the file cannot be read, is damaged or truncated, has no traffic, or has
                another block size.
        """
        if path.is_char_device():  # reading one may never end
            raise _unreadable(path, "it is a device")
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from None
        except UnicodeDecodeError:
            raise _unreadable(path, "it is not text in UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise _damaged(str(path), f"it is not JSON, or is cut off ({error})") from None
        table = cls.from_json(content, str(path))
        table.check(str(path), block_size)
        return table

    def check(self, source: str, block_size: int | None) -> None:
        """Check that buckets can be chosen for this traffic.

        Raises:
            ConfigError: there is no traffic, or the block size is different.
        """
        if not self._cells:
            raise ConfigError(
                f"{source} has no traffic: no forward pass was counted. Record it while requests "
                f"are served."
            )
        if block_size is not None and block_size != self.block_size:
            raise ConfigError(
                f"{source} was recorded with blocks of {self.block_size} tokens, and this engine "
                f"has blocks of {block_size}. Use --block-size {self.block_size}, or record it "
                f"again."
            )

    def _forget_rarest(self) -> None:
        rarest = sorted(self._cells, key=lambda key: (self._cells[key][0], key))[: MAX_CELLS // 4]
        self.num_forgotten += math.fsum(self._cells.pop(key)[0] for key in rarest)


def even_traffic(limits: StepLimits) -> TrafficTable:
    """Return a traffic that is even in the logarithm of each size, for use if none is recorded.

    Args:
        limits: limits of a forward pass.
    """
    table = TrafficTable(limits.block_size)
    for query_len in limits.decode_query_lens:
        for batch in _even_sizes(1, limits.max_batch_of(query_len)):
            for blocks in _even_sizes(batch, max(batch, limits.max_decode_blocks(batch))):
                table.add(Phase.DECODE, batch, query_len, blocks)
    for batch in _even_sizes(1, limits.max_decode_batch):
        longest = min(limits.max_query_len, limits.max_num_batched_tokens // batch)
        if longest < 1:
            continue
        for query_len in _even_sizes(min(limits.block_size, longest), longest):
            most = limits.max_context_blocks(query_len)
            for blocks in (0, *(_even_sizes(1, most) if most else ())):
                table.add(Phase.PREFILL, batch, query_len, blocks)
    return table


def _within(shape: list[int], limits: StepLimits) -> tuple[int, int, int, int]:
    phase, batch, query_len, blocks = shape
    batch = min(batch, limits.max_decode_batch)
    if phase == Phase.DECODE:
        lengths = limits.decode_query_lens
        query_len = next((n for n in lengths if n >= query_len), lengths[-1])
        batch = min(batch, limits.max_batch_of(query_len))
        return phase, batch, query_len, min(blocks, limits.max_decode_blocks(batch))
    longest = min(limits.max_query_len, limits.max_num_batched_tokens - batch + 1)
    query_len = max(1, min(query_len, longest))
    most = limits.max_context_blocks(query_len if batch == 1 else 1)
    return phase, batch, query_len, min(blocks, most)


def _even_sizes(smallest: int, largest: int) -> list[int]:
    """Return up to `_EVEN_STEPS` sizes at a constant ratio, the largest included."""
    count = min(_EVEN_STEPS, 1 + math.ceil(math.log2(largest / smallest))) if smallest else 1
    ratios = np.geomspace(smallest, largest, max(1, count) if largest > smallest else 1)
    return sorted({*np.rint(ratios).astype(int).tolist(), largest})


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"recorded traffic {path} cannot be read: {reason}. Name a file that --record-traffic has "
        f"written"
    )


def _read_cell(cell: object, name: str, source: str) -> tuple[_Key, float, float]:
    if not isinstance(cell, list) or len(cell) != 6:
        raise _damaged(source, f"{name} does not have six values")
    word, batch, query_len, blocks, count, seconds = cell
    phases = {str(phase): phase for phase in Phase}
    if not isinstance(word, str) or word not in phases:
        raise _damaged(source, f"{name} has phase {word!r}, not {' or '.join(phases)}")
    for column, value, least in (
        ("batch", batch, 1),
        ("query_len", query_len, 1),
        ("blocks", blocks, 0),
    ):
        if not _is_size(value, least):
            raise _damaged(
                source,
                f"{name} has {column} {value!r}, not an integer between {least} and {_MAX_SIZE}",
            )
    for column, value in (("count", count), ("seconds", seconds)):
        if not _is_amount(value):
            raise _damaged(source, f"{name} has {column} {value!r}, not between 0 and {_MAX_COUNT}")
    if not count:
        raise _damaged(
            source, f"{name} has count 0, but a recorded shape has at least one forward pass"
        )
    return (phases[word], batch, query_len, blocks), count, seconds


def _is_size(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= _MAX_SIZE


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_COUNT  # type: ignore[operator]


def _damaged(source: str, what: str) -> ConfigError:
    return ConfigError(
        f"recorded traffic {source} is damaged: {what}. Record it again with --record-traffic."
    )
