"""Python's garbage collector in a process that has started and will run for long."""

import atexit
import gc


def keep_for_good() -> None:
    """Leave what is alive now out of every collection to come.

    Modules, models and tables stay until the end. A full collection that walks over them stops the
    process for a quarter of a second, in the middle of all streams.
    """
    gc.collect()
    gc.freeze()
    # Libraries look at the end of the process for what was never freed, and print it.
    atexit.register(gc.unfreeze)
