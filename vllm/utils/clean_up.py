"""Clean up after a failed start without hiding its cause."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

logger = init_logger(__name__)


@contextmanager
def on_failure(*clean_ups: Callable[[], object]) -> Iterator[None]:
    """Call each of `clean_ups` if the block raises, then raise the error of the block again.

    An object that was only partly started may fail to close. Errors of clean-ups are logged and not
    raised, because the user must see the first error, which has the cause.
    """
    try:
        yield
    except BaseException:
        for clean_up in clean_ups:
            try:
                clean_up()
            except Exception:  # only logged, because an earlier error is being raised
                logger.warning(
                    "another error while cleaning up after a failed start:", exc_info=True
                )
        raise
