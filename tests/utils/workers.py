"""Functions that the child processes of test_deadline_worker.py run."""

import ctypes
import os
import time


def echo(setup: bytes):
    """Return a handler that answers with the setup and the argument; some arguments are
    commands.
    """

    def handle(argument: bytes, files=()) -> bytes:
        match argument:
            case b"pid":
                return str(os.getpid()).encode()
            case b"sleep":
                time.sleep(60)
            case b"crash":
                ctypes.string_at(0)
            case b"exit":
                os._exit(3)
            case b"memory":
                return str(len(bytearray(2**30))).encode()
            case b"raise":
                raise ValueError("argument is wrong")
            case b"write":
                for file in files:
                    os.write(file, setup)
                return str(len(os.listdir("/proc/self/fd"))).encode()
            case b"print":
                print("this is no answer", flush=True)
        return setup + argument

    return handle


def broken(setup: bytes):
    raise RuntimeError(f"cannot start with {setup!r}")


def endless(setup: bytes):
    """Never become ready. `setup` names a file that is created when the start is tried."""
    with open(setup, "wb"):
        time.sleep(3600)
