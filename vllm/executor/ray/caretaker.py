"""Kill what is left of a local Ray cluster after the process that started it has exited: `python
caretaker.py PID:START ...`, with a pipe to that process as standard input.

Ray's agents notice the end of their cluster only after half a minute. Imports nothing of this
package, to stay small.
"""

import os
import signal
import sys

import psutil


def main(arguments: list[str]) -> None:
    """Wait until standard input is closed, then kill the processes.

    Args:
        arguments: "id:start time" of each process, as psutil reports them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.read(0, 1)
    for argument in arguments:
        pid, started = argument.split(":")
        try:
            process = psutil.Process(int(pid))
            if str(process.create_time()) == started:
                process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
