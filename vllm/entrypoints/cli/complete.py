"""Implement `vllm complete`: complete text with a model on a server."""

import argparse

from vllm.entrypoints.cli.api_client import add_client_flags, answer_prompts, connect, write_answer
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_text


def add_parser(
    subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]",
) -> FlexibleArgumentParser:
    """Declare the subcommand and return its parser."""
    parser = subparsers.add_parser(
        "complete",
        description="Complete text with a model on a running server. Ctrl-C stops a completion, "
        "Ctrl-D exits.",
    )
    add_client_flags(parser)
    add_text(parser, ("-q", "--quick"), "complete one text and exit")
    return parser


def run(args: argparse.Namespace) -> None:
    """Complete each line until the input ends.

    Raises:
        ConfigError: the server cannot be reached.
        RequestError: the server refuses the text given with --quick.
    """
    client, fields = connect(args)

    def ask(text: str) -> None:
        write_answer(client.stream("/completions", {**fields, "prompt": text}))

    answer_prompts(args.quick, f"{fields['model']} continues each line", ask)
