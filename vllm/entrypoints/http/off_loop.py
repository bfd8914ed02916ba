"""Run the work of large requests in threads, so that it does not block the event loop.

The size of its body decides whether a request is large. The same work runs at once for a small
request and in a thread for a large one.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from vllm.utils.background_work import run_in_time_slices

T = TypeVar("T")

LARGE_BODY_BYTES = 32 * 1024
"""A body with at least this many bytes is large."""
_NUM_THREADS = 2
"""The event loop waits for a turn of each thread whenever it asks for the interpreter."""

_is_large: ContextVar[bool] = ContextVar("is_large_request", default=False)


def mark_request(num_bytes: int) -> None:
    """Record the size of the body of the current task's request."""
    _is_large.set(num_bytes >= LARGE_BODY_BYTES)


async def run(work: Callable[[], T], *, is_large: bool | None = None) -> T:
    """Return the result of `work`, which runs in a thread if the request is large.

    If it is cancelled before its thread starts, `work` does not run; a started thread runs to its
    end.

    Args:
        work: function that must not use anything that belongs to the event loop.
        is_large: whether to use a thread; None: decide by the size given to `mark_request`.
    """
    if not (_is_large.get() if is_large is None else is_large):
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), run_in_time_slices, work)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="large-requests")
