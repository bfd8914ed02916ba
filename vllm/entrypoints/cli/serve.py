"""`vllm serve`: an OpenAI-compatible server for one model."""

import argparse

from vllm.utils import FlexibleArgumentParser


def add_parser(
    subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]",
) -> FlexibleArgumentParser:
    """Declare the subcommand and return its parser."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser

    parser = subparsers.add_parser(
        "serve",
        description="Serve a model with the OpenAI API.",
        usage="vllm serve [MODEL] [flags]",
    )
    return make_arg_parser(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit code."""
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import exit_after_help, read_args

    engine_args, server_args = read_args(args)
    exit_after_help(server_args)
    return run_server(engine_args, server_args)
