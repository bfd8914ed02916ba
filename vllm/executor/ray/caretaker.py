"""A program that ends what is left of a local Ray cluster when the process that has started it has
ended: `python ray_caretaker.py PID:START ...`, with a pipe to that process as standard input.

Ray's agents notice the end of their cluster only after half a minute. Imports nothing of this
package, so that it is small.
"""

import os
import signal
import sys

import psutil


def main(arguments: list[str]) -> None:
    """Wait for the end of standard input, then kill the processes.

    Args:
        arguments: of each process its id and when it has started, as psutil says.
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
