"""Implement `vllm chat`: a conversation with a model on a server."""

import argparse

from vllm.entrypoints.cli.api_client import add_client_flags, answer_prompts, connect, write_answer
from vllm.errors import RequestError
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_text

DESCRIPTION = (
    "Chat with a model on a running server. Ctrl-C stops an answer, Ctrl-D ends the conversation."
)


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    add_client_flags(parser)
    add_text(parser, "--system-prompt", "system message at the beginning of the conversation")
    add_text(parser, ("-q", "--quick"), "send one message and exit")


def run(args: argparse.Namespace) -> None:
    """Chat until the input ends.

    Raises:
        ConfigError: the server cannot be reached.
        RequestError: the server refuses the message given with --quick.
    """
    client, fields = connect(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def ask(text: str) -> None:
        messages.append({"role": "user", "content": text})
        chunks = client.stream("/chat/completions", {**fields, "messages": messages})
        try:
            answer = write_answer(chunks)
        except RequestError:  # the conversation continues without this message
            messages.pop()
            raise
        messages.append({"role": "assistant", "content": answer})

    answer_prompts(args.quick, f"talking to {fields['model']}", ask)
