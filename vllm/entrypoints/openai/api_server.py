"""Run the OpenAI-compatible server: `vllm serve`, or `python -m
vllm.entrypoints.openai.api_server`.

Flags are checked first (`start_checks`); then the socket is bound and served at once. While it
answers, the application is imported and the engine starts. Clients that send requests meanwhile are
told about the progress (`startup_app`, `health`) or wait (`gate`). For that reason this module
imports nothing that is slow to import.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.engine.process.core_launch import early_core, end_early_core
from vllm.entrypoints.openai.cli_args import (
    exit_after_help,
    make_arg_parser,
    read_args,
    serve_while_warming,
)
from vllm.entrypoints.server.log_setup import configure_logs
from vllm.entrypoints.shared.open_files import allow_many_connections
from vllm.entrypoints.shared.replayed_traffic import with_recorded_traffic
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.utils import FlexibleArgumentParser
from vllm.utils.imports import leave_torch_out, without_collections
from vllm.utils.process.program_end import end_program
from vllm.utils.process.startup_progress import process_start

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.async_llm_engine import AsyncLLM
    from vllm.entrypoints.shared.context import ServerContext

    LoadServer = Callable[[AsyncLLM, ServerArgs], tuple[ServerContext, FastAPI]]


def build_app(context: "ServerContext") -> "FastAPI":
    """Create the application for an engine, which may start later.

    Raises:
        ConfigError: the user's middleware or tracing cannot be used.
    """
    from vllm.entrypoints.server import app

    return app.build_app(context)


def run_server(
    engine_args: "EngineArgs", args: ServerArgs, load_server: "LoadServer | None" = None
) -> int:
    """Serve until a signal arrives or the engine dies. Returns the exit code.

    Args:
        engine_args: arguments of the engine.
        args: arguments of the server.
        load_server: creates the application; None: `app.load_server`.

    Raises:
        ConfigError: the engine or the server cannot start with these arguments.
        EngineDeadError: the engine has died.
    """
    configure_logs(args)
    if not engine_args.trust_remote_code:  # the code of a model may need torch
        leave_torch_out()
    serve_while_warming(engine_args)
    if args.headless or engine_args.data_parallel_size_local == 0:
        # This process runs no engine core. `HeadlessReplicas` starts cores when the server asks for
        # them.
        end_early_core()
        return _check_and_serve(engine_args, args, load_server)
    with early_core():
        return _check_and_serve(engine_args, args, load_server)


def _check_and_serve(
    engine_args: "EngineArgs", args: ServerArgs, load_server: "LoadServer | None"
) -> int:
    from vllm.entrypoints.server.start_checks import check_start

    engine_args = with_recorded_traffic(engine_args)
    config = check_start(engine_args, args)
    if args.headless:
        from vllm.engine.replicas.headless import run_host

        return run_host(config or engine_args.create_engine_config())

    from vllm.entrypoints.server.uvicorn_server import bind

    allow_many_connections()
    with bind(args) as listener:
        return _serve(engine_args, config, args, listener, load_server)


def _serve(
    engine_args: "EngineArgs",
    config: "VllmConfig | None",
    args: ServerArgs,
    listener: "socket.socket",
    load_server: "LoadServer | None",
) -> int:
    """Serve on a socket; see `run_server`. `config` is resolved from `engine_args` already, or
    None.
    """
    from vllm.engine.async_llm_engine import AsyncLLM
    from vllm.engine.process.admission import AdmissionLimits
    from vllm.entrypoints.server.uvicorn_server import serve

    engine = AsyncLLM(
        engine_args if config is None else None,
        config=config,
        limits=AdmissionLimits(
            max_queued_requests=args.max_queued_requests,
            max_queued_tokens=args.max_queued_tokens,
            request_timeout=args.request_timeout,
        ),
        num_restarts=args.restart_engine,
        began=process_start(),
    )

    def load() -> "tuple[ServerContext, FastAPI]":
        with without_collections():
            from vllm.entrypoints.server import app

            return (load_server or app.load_server)(engine, args)

    try:
        return serve(load, args, listener, engine.prepare)
    finally:
        engine.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server as a program. Returns the exit code."""
    from vllm.entrypoints.shared.program import run_command

    parser = make_arg_parser(FlexibleArgumentParser(prog="api_server"))

    def run() -> int:
        engine_args, args = read_args(parser.parse_args(argv))
        exit_after_help(args)
        return run_server(engine_args, args)

    return run_command(run, parser.flag_names)


if __name__ == "__main__":
    end_program(main())
