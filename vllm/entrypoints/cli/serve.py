"""Implement `vllm serve`: an OpenAI-compatible server for one model."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from vllm.utils import FlexibleArgumentParser

DESCRIPTION = "Serve a model with the OpenAI API."
USAGE = "vllm serve [MODEL] [flags]"


def prepare(words: Sequence[str]) -> AbstractContextManager[None]:
    """Launch the process of the engine core early. It is killed at the end of the context if it was
    not used.

    Args:
        words: the command line, not parsed yet.
    """
    from vllm.engine.process.core_launch import early_core

    is_for_help = any(word == "-h" or word.startswith("--help") for word in words)
    return nullcontext() if is_for_help else early_core()


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser

    make_arg_parser(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Returns the exit code."""
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import exit_after_help, read_args

    engine_args, server_args = read_args(args)
    exit_after_help(server_args)
    return run_server(engine_args, server_args)
