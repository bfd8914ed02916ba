"""Requests of a file instead of clients: `vllm run-batch`, or `python -m` this module.

The application is that of the server, called without a socket, so that a request in a file does
what it would do online.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from vllm.entrypoints.openai.cli_args import exit_after_help, make_arg_parser, read_args
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

# Not __name__: this module is also run as a program.
logger = init_logger("vllm.entrypoints.openai.run_batch")

_DOWNLOAD_TIMEOUT_S = 60.0
"""For a server to send some more of the input."""


def add_arguments(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add all flags to a parser and return it: those of the batch, the engine and the server."""
    make_arg_parser(parser)
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests: a file with one JSON object per line, or its http(s) URL",
    )
    group.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="where the answers go"
    )
    group.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=256,
        metavar="N",
        help="requests at once (default: 256)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Answer all requests of the input file; the exit code, which is 1 when the engine died.

    Raises:
        ConfigError: flags, input or output cannot be used; the output file is as it was.
    """
    given = vars(args)
    source, target = given.pop("input_file"), Path(given.pop("output_file"))
    max_concurrent = given.pop("max_concurrent_requests")
    if max_concurrent < 1:
        raise ConfigError(f"max_concurrent_requests must be at least 1, got {max_concurrent}")
    engine_args, server_args = read_args(args)
    exit_after_help(server_args)

    from vllm.entrypoints.openai.log_setup import configure_logs

    configure_logs(server_args)
    with open_input(source) as lines, open_output(target) as output:
        num_lines = sum(1 for line in lines if line.strip())
        lines.seek(0)
        with _progress(num_lines, output.write) as sink:
            try:
                return asyncio.run(_run(engine_args, server_args, lines, sink, max_concurrent))
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None  # SIGTERM ends a batch as Ctrl-C does


async def _run(
    engine_args: "EngineArgs",
    args: ServerArgs,
    lines: IO[bytes],
    sink: Callable[[bytes], object],
    max_concurrent: int,
) -> int:
    from vllm.engine.admission import AdmissionLimits
    from vllm.engine.async_llm_engine import AsyncLLM
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.batch.lines import run_lines
    from vllm.entrypoints.openai.context import ServerContext

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # Nobody comes from outside: no keys, no queue that may be full, no log line per request.
    args = dataclasses.replace(
        args, api_key=(), middleware=(), max_queued_requests=None, disable_uvicorn_access_log=True
    )
    limits = AdmissionLimits(request_timeout=args.request_timeout)
    engine = AsyncLLM(engine_args, limits=limits, num_restarts=args.restart_engine)
    context = ServerContext(args, engine, created=time.time())
    try:
        app = build_app(context)
        await engine.start()
        context.has_been_ready = True
        begin = time.perf_counter()
        counts = await run_lines(app, lines, sink, max_concurrent)
        elapsed_s = time.perf_counter() - begin
        logger.info(
            "%d requests in %.1f s, %d failed", counts.num_written, elapsed_s, counts.num_failed
        )
        return 1 if engine.errored else 0
    finally:
        engine.shutdown()


@contextlib.contextmanager
def open_input(source: str) -> Iterator[IO[bytes]]:
    """The input, which can be read twice.

    Raises:
        ConfigError: it is not there, or cannot be downloaded.
    """
    if not source.startswith(("http://", "https://")):
        try:
            file = open(source, "rb")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot read {source!r}: {error.strerror}") from None
        with file:
            yield file
        return
    with tempfile.TemporaryFile() as copy:
        try:
            with urllib.request.urlopen(source, timeout=_DOWNLOAD_TIMEOUT_S) as response:
                shutil.copyfileobj(response, copy)
        except OSError as error:  # URLError and HTTPError are such
            raise ConfigError(f"cannot download {source!r}: {error}") from None
        copy.seek(0)
        yield cast(IO[bytes], copy)


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when everything is written.

    When it does not come to that, what was written stays beside it, and the log says where. Every
    write is in the file at once: a process that is killed loses none.

    Raises:
        ConfigError: there can be no such file.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write {str(path)!r}: it is there, and no file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        file = partial.open("xb", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None
    try:
        with file:
            yield file
    except BaseException:
        if partial.stat().st_size:
            logger.warning("the answers so far are in %s", partial)
        else:
            partial.unlink()
        raise
    partial.replace(path)


@contextlib.contextmanager
def _progress(
    num_lines: int, write: Callable[[bytes], object]
) -> Iterator[Callable[[bytes], object]]:
    """`write`, with a bar that counts what is written; none where stderr is no terminal."""
    from tqdm import tqdm

    with tqdm(total=num_lines, desc="requests", dynamic_ncols=True, disable=None) as bar:

        def sink(record: bytes) -> None:
            write(record)
            bar.update()

        yield sink


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program of its own; the exit code."""
    from vllm.entrypoints.cli.main import run_command

    parser = add_arguments(FlexibleArgumentParser(prog="run_batch"))
    return run_command(lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
