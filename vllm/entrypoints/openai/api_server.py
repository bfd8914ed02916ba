"""The OpenAI-compatible server: `vllm serve`, or `python -m vllm.entrypoints.openai.api_server`.

The socket is bound first and served at once. The application is imported, and the engine starts,
while it answers: who asks meanwhile is told how far it is (`early_app`, `health`), or waits
(`gate`). So nothing is imported here that takes long.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.cli_args import exit_after_help, make_arg_parser, read_args
from vllm.entrypoints.openai.log_setup import configure_logs
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.context import ServerContext

    LoadServer = Callable[[EngineArgs, ServerArgs], tuple[ServerContext, FastAPI]]


def build_app(context: "ServerContext") -> "FastAPI":
    """The application around an engine, which may start later.

    Raises:
        ConfigError: middleware of the user, or tracing, cannot be used.
    """
    from vllm.entrypoints.openai import app

    return app.build_app(context)


def run_server(
    engine_args: "EngineArgs",
    args: ServerArgs,
    load_server: "LoadServer | None" = None,
) -> int:
    """Serve until a signal or the death of the engine; the exit code.

    Args:
        engine_args: what to run.
        args: of the server.
        load_server: makes the application; None is `app.load_server`.

    Raises:
        ConfigError: the engine or the server cannot start with these arguments.
        EngineDeadError: the engine has died.
    """
    from vllm.entrypoints.openai.http.uvicorn_server import bind, serve

    def load() -> "tuple[ServerContext, FastAPI]":
        from vllm.entrypoints.openai import app

        return (load_server or app.load_server)(engine_args, args)

    configure_logs(args)
    with bind(args) as listener:
        return serve(load, args, listener)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server as a program of its own; the exit code."""
    from vllm.entrypoints.cli.main import run_command

    def run() -> int:
        parser = make_arg_parser(FlexibleArgumentParser(prog="api_server"))
        engine_args, args = read_args(parser.parse_args(argv))
        exit_after_help(args)
        return run_server(engine_args, args)

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
