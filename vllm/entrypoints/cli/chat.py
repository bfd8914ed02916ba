"""`vllm chat`: a conversation with a model on a server."""

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
        "chat",
        description="Talk to a model on a server. Ctrl-C ends an answer, Ctrl-D the conversation.",
    )
    add_client_flags(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="begins the conversation")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send one message and exit")
    return parser


def run(args: argparse.Namespace) -> None:
    """Talk until the input ends.

    Raises:
        ConfigError: the server cannot be reached.
        RequestError: it refuses the only message.
    """
    client, fields = connect(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def ask(text: str) -> None:
        messages.append({"role": "user", "content": text})
        chunks = client.stream("/chat/completions", {**fields, "messages": messages})
        messages.append({"role": "assistant", "content": write_answer(chunks)})

    if args.quick is not None:
        ask(args.quick)
        return
    sys.stderr.write(f"talking to {fields['model']}; Ctrl-D ends\n")
    for text in read_prompts():
        try:
            ask(text)
        except RequestError as error:  # one message failed: the conversation goes on without it
            messages.pop()
            sys.stderr.write(f"error: {error}\n")
