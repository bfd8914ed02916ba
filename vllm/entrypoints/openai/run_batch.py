"""Run the requests of a file: `vllm run-batch`, or `python -m` this module.

It calls the application of the server without a socket, so that a request in a file has the same
effect as online.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

from vllm.entrypoints.batch.files import open_input, open_output
from vllm.entrypoints.openai.cli_args import exit_after_help, make_arg_parser, read_args
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError, RequestError
from vllm.logger import init_logger
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_number, add_switch, add_text
from vllm.utils.process.program_end import end_program
from vllm.utils.process.startup_progress import process_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.batch.lines import BatchCounts

# A literal name, because __name__ is "__main__" if this module runs as a program.
logger = init_logger("vllm.entrypoints.openai.run_batch")

_SHOWN_FAILURES = 3
"""Number of different reasons of failed requests that the summary shows."""


def add_arguments(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add the flags of the batch, the engine and the server to a parser, and return it."""
    make_arg_parser(parser)
    group = parser.add_argument_group("batch")
    add_text(
        group,
        ("-i", "--input-file"),
        "requests: a file with one JSON object per line, or its http(s) URL",
        metavar="FILE",
        required=True,
    )
    add_text(
        group,
        ("-o", "--output-file"),
        "output: a file, - for standard output, or an http(s) URL to which the answers are sent "
        "with PUT",
        metavar="FILE",
        required=True,
    )
    add_text(
        group,
        "--output-tmp-dir",
        "folder for the answers until they are sent to a URL (default: the system's folder "
        "for temporary files)",
        metavar="DIR",
    )
    add_number(group, "--max-concurrent-requests", "maximum number of concurrent requests", 256)
    add_switch(
        group,
        "--fail-on-error",
        "exit with code 1 if a request fails (default: 0, because its error is in the output)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run all requests of the input file.

    Returns:
        The exit code: 1 if the engine died, or if a request failed and the user asked for an error
            in this case.

    Raises:
        ConfigError: flags, input or output cannot be used; the output file is unchanged.
    """
    given = vars(args)
    source, target = given.pop("input_file"), given.pop("output_file")
    folder = given.pop("output_tmp_dir")
    max_concurrent = given.pop("max_concurrent_requests")
    fails_on_error = given.pop("fail_on_error")
    if max_concurrent < 1:
        raise ConfigError(f"max_concurrent_requests must be at least 1, got {max_concurrent}")
    engine_args, server_args = read_args(args)
    exit_after_help(server_args)

    from vllm.entrypoints.server.log_setup import configure_logs
    from vllm.entrypoints.server.start_checks import check_start
    from vllm.entrypoints.shared.replayed_traffic import with_recorded_traffic

    configure_logs(server_args)
    engine_args = with_recorded_traffic(engine_args.without_streams())
    config = check_start(engine_args, server_args)
    with open_input(source) as lines, open_output(target, folder) as output:
        num_lines = _count_lines(source, lines)
        with _progress(num_lines, output.write) as sink:
            try:
                return asyncio.run(
                    _run(
                        engine_args,
                        config,
                        server_args,
                        lines,
                        sink,
                        max_concurrent,
                        fails_on_error=fails_on_error,
                    )
                )
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None  # SIGTERM ends a batch in the same way as Ctrl-C


async def _run(
    engine_args: "EngineArgs",
    config: "VllmConfig | None",
    args: ServerArgs,
    lines: IO[bytes],
    sink: Callable[[bytes], object],
    max_concurrent: int,
    *,
    fails_on_error: bool,
) -> int:
    from vllm.engine.async_llm_engine import AsyncLLM
    from vllm.engine.process.admission import AdmissionLimits
    from vllm.entrypoints.batch.lines import run_lines
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.shared.context import ServerContext

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # A batch has no clients, so it needs no keys, no limit of waiting requests and no access log.
    args = dataclasses.replace(
        args, api_key=(), middleware=(), max_queued_requests=None, disable_uvicorn_access_log=True
    )
    limits = AdmissionLimits(request_timeout=args.request_timeout)
    engine = AsyncLLM(
        engine_args if config is None else None,
        config=config,
        limits=limits,
        num_restarts=args.restart_engine,
        began=process_start(),
    )
    context = ServerContext(args, engine, created=time.time())
    try:
        # The core's process imports its modules while this process imports its own.
        engine.prepare()
        app = await asyncio.to_thread(build_app, context)
        await engine.start()
        context.has_been_ready = True
        begin = time.perf_counter()

        async def fetch(url: str, where: str) -> bytes:
            return await context.media_fetcher.fetch(url, "audio", where)

        counts = await run_lines(app, lines, sink, max_concurrent, fetch)
        elapsed_s = time.perf_counter() - begin
        _log_end(counts, elapsed_s)
        return 1 if engine.errored or (fails_on_error and counts.num_failed) else 0
    finally:
        engine.shutdown()


def _count_lines(source: str, lines: IO[bytes]) -> int:
    """Count the lines that are not blank, and rewind `lines`.

    Raises:
        ConfigError: no line is a valid request. The model is then not loaded.
    """
    from vllm.entrypoints.batch.lines import read_line

    num_lines, first_error, has_request = 0, None, False
    for line in lines:
        if not line.strip():
            continue
        num_lines += 1
        if not has_request:
            try:
                read_line(line)
                has_request = True
            except RequestError as error:
                first_error = first_error or error
    lines.seek(0)
    if first_error is not None and not has_request:
        raise ConfigError(
            f"{source!r} has no valid request. Error in the first line: {first_error}"
        )
    return num_lines


def _log_end(counts: "BatchCounts", elapsed_s: float) -> None:
    logger.info(
        "%d requests in %.1f s: %d answered, %d failed",
        counts.num_written,
        elapsed_s,
        counts.num_written - counts.num_failed,
        counts.num_failed,
    )
    for reason, count in counts.failures.most_common(_SHOWN_FAILURES):
        logger.warning("%d requests failed: %s", count, reason)
    if len(counts.failures) > _SHOWN_FAILURES:
        logger.warning(
            "%d other reasons for failed requests are not shown",
            len(counts.failures) - _SHOWN_FAILURES,
        )


@contextlib.contextmanager
def _progress(
    num_lines: int, write: Callable[[bytes], object]
) -> Iterator[Callable[[bytes], object]]:
    """Yield `write`, wrapped to update a progress bar if stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(total=num_lines, desc="requests", dynamic_ncols=True, disable=None) as bar:

        def sink(record: bytes) -> None:
            write(record)
            bar.update()

        yield sink


def main(argv: Sequence[str] | None = None) -> int:
    """Run the batch as a program. Returns the exit code."""
    from vllm.entrypoints.shared.program import run_command

    parser = add_arguments(FlexibleArgumentParser(prog="run_batch"))
    return run_command(lambda: run(parser.parse_args(argv)), parser.flag_names)


if __name__ == "__main__":
    end_program(main())
