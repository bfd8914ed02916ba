"""`vllm complete`: text that a model on a server continues."""

import argparse
import sys

from vllm.entrypoints.cli.api_client import add_client_flags, connect, read_prompts, write_answer
from vllm.errors import RequestError
from vllm.utils import FlexibleArgumentParser


def add_parser(
    subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]",
) -> FlexibleArgumentParser:
    """Declare the subcommand and return its parser."""
    parser = subparsers.add_parser(
        "complete",
        description="Let a model on a server continue text. Ctrl-C ends a text, Ctrl-D all.",
    )
    add_client_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="continue one text and exit")
    return parser


def run(args: argparse.Namespace) -> None:
    """Continue lines until the input ends.

    Raises:
        ConfigError: the server cannot be reached.
        RequestError: it refuses the only text.
    """
    client, fields = connect(args)

    def ask(text: str) -> None:
        write_answer(client.stream("/completions", {**fields, "prompt": text}))

    if args.quick is not None:
        ask(args.quick)
        return
    sys.stderr.write(f"{fields['model']} continues each line; Ctrl-D ends\n")
    for text in read_prompts():
        try:
            ask(text)
        except RequestError as error:  # one text failed: the next may do better
            sys.stderr.write(f"error: {error}\n")
