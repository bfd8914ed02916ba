"""The progress bar of a load: requests that ended, those in flight, and pieces per second."""

import asyncio
import time
from typing import Any

from vllm.entrypoints.bench.backends import RequestRecord
from vllm.entrypoints.bench.load import LoadRun

_INTERVAL_S = 0.5


class LoadProgress:
    """Shows a load on stderr while it runs; to be entered inside an event loop.

    Tokens per second are pieces per second: most servers send one token in a piece, and the
    true count comes at the end of each stream.
    """

    def __init__(self, run: LoadRun, total: int, *, is_shown: bool) -> None:
        self._run = run
        self._total = total
        self._is_shown = is_shown
        self._bar: Any = None
        self._task: asyncio.Task[None] | None = None
        self._num_failed = 0

    def __enter__(self) -> "LoadProgress":
        if self._is_shown:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="req", dynamic_ncols=True)
            self._task = asyncio.get_running_loop().create_task(self._show_speed())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._bar is not None:
            self._bar.close()

    def update(self, record: RequestRecord) -> None:
        """One more request has ended."""
        self._num_failed += record.error is not None
        if self._bar is not None:
            self._bar.update(1)

    async def _show_speed(self) -> None:
        last_s, last_pieces = time.perf_counter(), 0
        while True:
            await asyncio.sleep(_INTERVAL_S)
            now_s, pieces = time.perf_counter(), self._run.num_pieces
            speed = (pieces - last_pieces) / (now_s - last_s)
            last_s, last_pieces = now_s, pieces
            failed = f", {self._num_failed} failed" if self._num_failed else ""
            self._bar.set_postfix_str(f"{speed:,.0f} tok/s, {self._run.num_running} open{failed}")
