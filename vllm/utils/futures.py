"""Combine the futures of threads, and end the tasks of an event loop."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


async def end_tasks(tasks: "Iterable[asyncio.Future[Any]]") -> None:
    """Cancel tasks, and wait until all of them have ended. Their errors are ignored."""
    import asyncio  # only here, because programs without a server do not need it

    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def wait_all(futures: "Sequence[Future[Any] | None]") -> "Future[str | None] | None":
    """Return a future that is done when all the given futures are done.

    Its result is the first result that is a string, or None.

    Args:
        futures: futures with strings or None as results. An entry None counts as done. So does a
            future that fails: its error is reported elsewhere.

    Returns:
        The future; None if there is nothing to wait for.
    """
    left = [future for future in futures if future is not None]
    if not left:
        return None
    joined: Future[str | None] = Future()
    lock, num_done = threading.Lock(), 0

    def note(_: "Future[Any]") -> None:
        nonlocal num_done
        with lock:
            num_done += 1
            is_last = num_done == len(left)
        if is_last:
            results = [each.result() for each in left if each.exception() is None]
            joined.set_result(next((text for text in results if text is not None), None))

    for future in left:
        future.add_done_callback(note)
    return joined


def join_nested(outer: "Future[Future[Any] | None]") -> "Future[str | None]":
    """Return a future that is done when `outer` and the future in its result are both done.

    Its result is the result of the inner future, as in `wait_all`. If `outer` fails, it is the
    reason, which is reported nowhere else.
    """
    joined: Future[str | None] = Future()

    def note(done: "Future[Future[Any] | None]") -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        inner = wait_all([done.result()]) if error is None else None
        if error is not None:
            joined.set_result(f"the request could not be prepared: {error or type(error).__name__}")
        elif inner is None:
            joined.set_result(None)
        else:
            inner.add_done_callback(lambda each: joined.set_result(each.result()))

    outer.add_done_callback(note)
    return joined
