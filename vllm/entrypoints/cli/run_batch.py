"""Implement `vllm run-batch`: run the requests of a file as the server would."""

import argparse

from vllm.utils import FlexibleArgumentParser


def add_parser(
    subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]",
) -> FlexibleArgumentParser:
    """Declare the subcommand and return its parser."""
    from vllm.entrypoints.openai.run_batch import add_arguments

    parser = subparsers.add_parser(
        "run-batch",
        description="Run the requests of an OpenAI batch file with a model, without a server.",
        usage="vllm run-batch -i FILE -o FILE [MODEL] [flags]",
    )
    return add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run all requests. Returns the exit code."""
    from vllm.entrypoints.openai.run_batch import run as run_batch

    return run_batch(args)
