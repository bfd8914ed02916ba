"""Implement `vllm run-batch`: run the requests of a file as the server would."""

import argparse

from vllm.utils import FlexibleArgumentParser

DESCRIPTION = "Run the requests of an OpenAI batch file with a model, without a server."
USAGE = "vllm run-batch -i FILE -o FILE [MODEL] [flags]"


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    from vllm.entrypoints.openai.run_batch import add_arguments

    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run all requests. Returns the exit code."""
    from vllm.entrypoints.openai.run_batch import run as run_batch

    return run_batch(args)
