"""Futures of threads."""

from concurrent.futures import Future


def when_both(first: "Future[None] | None", second: "Future[None] | None") -> "Future[None] | None":
    """Done when both are; neither of them fails. None is done already."""
    if first is None or second is None:
        return first or second
    both: Future[None] = Future()
    first.add_done_callback(lambda _: second.add_done_callback(lambda _: both.set_result(None)))
    return both
