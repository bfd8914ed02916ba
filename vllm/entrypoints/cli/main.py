"""Implement the `vllm` command, with one module per subcommand.

A subcommand is a module with `DESCRIPTION`, `add_flags(parser)` and `run(args)`, listed in
`_COMMANDS`. It may have `USAGE`, and `prepare(words)`, which starts slow work before the flags are
declared, and returns the context in which the command runs. Only the module of the given command is
imported, and it imports torch and the engine inside `run`, so that `--help` and a bad flag answer
at once. `run` may return an exit code; None is 0.
"""

import difflib
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from vllm.entrypoints.shared.program import run_command
from vllm.utils import FlexibleArgumentParser
from vllm.utils.process.program_end import end_program
from vllm.version import __version__

_COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "chat with a model on a running server",
    "complete": "complete text with a model on a running server",
    "bench": "measure throughput and latency",
    "run-batch": "run the requests of a batch file, without a server",
    "generate": "complete prompts, without a server",
    "quantize": "write a quantized checkpoint of a model",
    "calibrate": "measure the FP8 scales of a model",
    "collect-env": "show versions, hardware and settings for a bug report",
    "hpu-check": "self-test of a Gaudi card",
    "plan": "show what a model needs on a device, without the device",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. argparse itself exits after flag errors and
    `--help`.
    """

    words = list(sys.argv[1:] if argv is None else argv)
    parser: FlexibleArgumentParser | None = None

    def run() -> int | None:
        with _prepared(words):
            return run_prepared()

    def run_prepared() -> int | None:
        nonlocal parser
        parser = create_parser(words)
        if not words:
            parser.print_help()
            return 0
        if (mistake := _find_mistake(words[0])) is not None:
            parser.error(mistake)
        args = parser.parse_args(words)
        return args.run(args)

    return run_command(run, lambda: () if parser is None else parser.flag_names())


def _prepared(words: Sequence[str]) -> AbstractContextManager[None]:
    """Return the context that `prepare` of the command opens; an empty context if the command has
    none.
    """
    name = _given(words)
    prepare = getattr(_module(name), "prepare", None) if name in _COMMANDS else None
    return nullcontext() if prepare is None else prepare(words)


def _given(words: Sequence[str]) -> str:
    """Return the first word that is not a flag, which should be the command; empty if there is
    none.
    """
    return next((word for word in words if not word.startswith("-")), "")


def _module(name: str) -> Any:
    return import_module(f"vllm.entrypoints.cli.{name.replace('-', '_')}")


def create_parser(words: Sequence[str]) -> FlexibleArgumentParser:
    """Return the parser of all commands; only the given one declares its flags."""
    parser = FlexibleArgumentParser(
        prog="vllm",
        description="LLM inference on Gaudi and CPU.",
        epilog="'vllm COMMAND --help' lists the flags of a command. To begin: vllm serve MODEL",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    given = _given(words)
    for name, text in _COMMANDS.items():
        if name == given:
            command = _module(name)
            command_parser = subparsers.add_parser(
                name, description=command.DESCRIPTION, usage=getattr(command, "USAGE", None)
            )
            command.add_flags(command_parser)
            command_parser.set_defaults(run=command.run)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def _find_mistake(word: str) -> str | None:
    """Describe the mistake in the first word of a command line; None if it may be right."""
    if word in _COMMANDS or word in ("-h", "--help", "-v", "--version"):
        return None
    if word.startswith("-"):
        return f"{word} comes before the command. Flags follow it, as in 'vllm serve {word} ...'"
    if "/" in word or Path(word).is_dir():
        return f"{word!r} is not a command. To serve that model: vllm serve {shlex.quote(word)}"
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    if near:
        return f"{word!r} is not a command. Did you mean 'vllm {near[0]}'?"
    return (
        f"{word!r} is not a command. The commands are {', '.join(_COMMANDS)}. "
        f"To serve a model of that name: vllm serve {shlex.quote(word)}"
    )


def program() -> NoReturn:
    """Run the command line as a program: the process ends with the exit code."""
    end_program(main())


if __name__ == "__main__":
    program()
