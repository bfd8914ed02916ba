"""Implement `vllm complete`: complete text with a model on a server."""

import argparse

from vllm.entrypoints.cli.api_client import add_client_flags, answer_prompts, connect, write_answer
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_text

DESCRIPTION = (
    "Complete text with a model on a running server. Ctrl-C stops a completion, Ctrl-D exits."
)


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    add_client_flags(parser)
    add_text(parser, ("-q", "--quick"), "complete one text and exit")


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
