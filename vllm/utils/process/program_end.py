"""End a program without the end of the interpreter."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from vllm.env.bridge import has_vendor_library


def end_program(code: int) -> NoReturn:
    """End this process with an exit code, and leave its memory to the system.

    As the interpreter does, waits for threads that are no daemons, runs the exit handlers, and
    writes what is buffered. The interpreter would then visit and destroy all objects of torch and
    of the model, which takes a second of processor time.

    The interpreter ends as usual if a profiler or a debugger waits for its end, or where the
    vendor's library is installed, which may have handlers in C.
    """
    if has_vendor_library() or _is_observed():
        sys.exit(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        code = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # the reader of the output has exited
            code = code or 1
    os._exit(code)


def _is_observed() -> bool:
    """Return whether a profiler or a debugger runs this program."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return True
    if sys.version_info < (3, 12):
        return False
    tools = (sys.monitoring.DEBUGGER_ID, sys.monitoring.PROFILER_ID)
    return any(sys.monitoring.get_tool(tool) is not None for tool in tools)
